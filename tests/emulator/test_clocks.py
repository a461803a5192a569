"""Virtual time: schedules worked out by hand, and laws that hold for every schedule."""

from __future__ import annotations

import _thread
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmstream.emulator.clocks import Lane, Mark
from fmstream.emulator.machine import QUERY_SECONDS, Machine
from fmstream.errors import ConfigError
from tests.kit_machine import ROUND, copy_in, copy_out, kernel, machine


def times(on: Machine) -> list[tuple[str, float, float]]:
    """Lane, start and end of everything, in the order in which it was enqueued."""
    return [(one.lane, one.start, one.end) for one in on.timeline()]


def in_thread(work: Callable[[], None]) -> None:
    """Do something in another thread that Python starts, and wait for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_the_host_pays_the_launch_and_goes_on() -> None:
    on = machine()
    assert kernel(on, seconds=4.0, launch=1.0) == 5.0
    assert on.now == 1.0
    assert kernel(on, seconds=2.0, launch=1.0) == 7.0
    assert on.now == 2.0
    on.synchronize()
    assert on.now == 7.0
    assert times(on) == [("compute", 1.0, 5.0), ("compute", 5.0, 7.0), ("wait", 2.0, 7.0)]


def test_a_stream_that_idles_starts_when_the_host_comes() -> None:
    on = machine()
    kernel(on)
    on.charge(5.0)
    assert kernel(on) == 6.0


def test_copies_and_kernels_of_two_streams_overlap() -> None:
    """Three units: the copy of one under the kernel of the one before."""
    on = machine()
    side = on.new_stream()
    for _ in range(3):
        copy_in(on, side, seconds=2.0)
        on.wait(0, on.record(side))
        kernel(on, seconds=3.0)
    on.synchronize()
    assert on.now == 11.0  # the first copy, then three kernels
    assert [(start, end) for lane, start, end in times(on) if lane == "copy in"] == [(0, 2), (2, 4), (4, 6)]
    assert [(start, end) for lane, start, end in times(on) if lane == "compute"] == [(2, 5), (5, 8), (8, 11)]


def test_a_window_of_one_makes_the_copy_wait_for_the_reader() -> None:
    on = machine()
    side = on.new_stream()
    for _ in range(3):
        copy_in(on, side, seconds=2.0)
        on.wait(0, on.record(side))
        kernel(on, seconds=3.0)
        on.wait(side, on.record(0))
    on.synchronize()
    assert on.now == 15.0


def test_a_copy_holds_its_engine_for_less_than_it_takes_to_be_seen() -> None:
    on = machine()
    side = on.new_stream()
    assert copy_in(on, side, seconds=1.0, seen=10.0) == 11.0
    assert copy_in(on, side, seconds=1.0, seen=10.0) == 12.0  # the engine goes from one to the next
    assert copy_in(on, 0, seconds=1.0, seen=10.0) == 13.0  # so it does for another stream
    assert kernel(on, side) == 13.0  # what follows on another lane sees the copies of its stream at 12
    assert copy_in(on, side, seconds=1.0) == 14.0


def test_a_stream_does_not_wait_for_its_own_marks() -> None:
    on = machine()
    copy_in(on, seconds=1.0, seen=10.0)
    on.wait(0, on.record(0))
    assert copy_in(on, seconds=1.0, seen=10.0) == 12.0


def test_each_direction_of_the_link_has_an_engine_and_kernels_share_one() -> None:
    on = machine()
    streams = [0, on.new_stream(), on.new_stream()]
    assert [copy_in(on, stream) for stream in streams] == [1.0, 2.0, 3.0]
    on = machine()
    assert [copy_in(on, 0), copy_out(on, on.new_stream()), kernel(on, on.new_stream())] == [1.0, 1.0, 1.0]
    assert kernel(on, on.new_stream()) == 2.0


def test_what_waits_does_not_hold_up_what_was_enqueued_later() -> None:
    on = machine()
    early, late = on.new_stream(), on.new_stream()
    kernel(on, seconds=10.0)
    on.wait(late, on.record(0))
    assert copy_in(on, late, seconds=1.0) == 11.0
    assert copy_in(on, early, seconds=6.0) == 6.0
    assert copy_in(on, early, seconds=5.0) == 16.0  # the 4 seconds that are left do not hold it
    assert copy_in(on, 0, seconds=4.0) == 20.0  # ordered after the kernel
    assert copy_in(on, on.new_stream(), seconds=4.0) == 10.0


def test_the_host_waits_when_too_much_is_enqueued() -> None:
    on = machine(card=replace(ROUND, queue_limit=2))
    kernel(on, seconds=5.0)
    kernel(on, seconds=5.0)
    assert on.now == 0.0
    kernel(on, seconds=5.0)
    assert on.now == 5.0
    kernel(on, seconds=5.0)
    assert on.now == 10.0
    assert on.statistics().wait_seconds == 10.0
    copy_in(on, on.new_stream())
    assert on.now == 10.0  # each stream has a queue


def test_a_blocking_copy_ends_with_the_host() -> None:
    on = machine()
    copy_in(on, seconds=2.0, seen=1.0, launch_seconds=1.0, blocking=True)
    assert on.now == 4.0


def test_the_host_waits_for_a_mark_or_a_stream_alone() -> None:
    on = machine()
    side = on.new_stream()
    kernel(on, seconds=1.0)
    mark = on.record(0)
    kernel(on, seconds=2.0)
    copy_in(on, side, seconds=9.0)
    on.synchronize(mark)
    assert on.now == mark.seconds == 1.0
    on.synchronize(0)
    assert on.now == 3.0
    on.synchronize(side)
    assert on.now == 9.0


def test_marks_tell_the_time_between_them() -> None:
    on = machine()
    kernel(on, seconds=1.0)
    first = on.record(0)
    kernel(on, seconds=2.5)
    assert on.record(0).seconds - first.seconds == 2.5
    on.charge(10.0)
    assert on.record(0).seconds == 10.0  # a stream that idles records when the host asks


def test_asking_costs_time_so_that_a_loop_ends() -> None:
    on = machine()
    kernel(on, seconds=1e-4)
    mark = on.record(0)
    count = 1
    while not on.mark_done(mark):
        count += 1
    assert count == pytest.approx(1e-4 / QUERY_SECONDS, abs=1)
    assert on.mark_done(Mark(0, 0.0, {}))


def test_lanes_of_the_host_take_time_without_moving_the_clock() -> None:
    on = machine()
    disk = on.lane("disk")
    assert disk.occupy(2.0, "read", 100) == (0.0, 2.0)
    assert on.lane("disk").occupy(1.0, "read", 50) == (2.0, 3.0)
    assert on.now == 0.0
    on.join_clock(3.0)
    on.join_clock(1.0)
    assert on.now == 3.0
    on.charge(1.0, "parse")
    assert disk.occupy(1.0, "read") == (4.0, 5.0)
    assert on.statistics().busy["disk"] == 4.0
    assert [(one.lane, one.name, one.num_bytes) for one in on.timeline()] == [
        ("disk", "read", 100),
        ("disk", "read", 50),
        ("host", "parse", 0),
        ("disk", "read", 0),
    ]


def test_each_thread_has_a_clock_and_a_current_stream() -> None:
    on = machine()
    side = on.new_stream()
    on.set_current_stream(side)
    on.charge(5.0)
    seen: list[float] = []

    def work() -> None:
        seen.extend((on.now, on.current_stream))
        kernel(on, 0, seconds=1.0)
        on.join_clock(3.0)
        kernel(on, 0, seconds=1.0)
        on.synchronize()
        seen.append(on.now)

    in_thread(work)
    assert seen == [0.0, 0, 4.0]
    assert (on.now, on.current_stream) == (5.0, side)
    on.set_current_stream(0)
    assert on.current_stream == 0


def test_a_thread_that_python_did_not_start_works_on_the_clock_of_who_called_last() -> None:
    on = machine()
    on.charge(5.0)
    on.set_current_stream(on.new_stream())
    seen: list[tuple[float, int]] = []
    done = threading.Event()

    def work() -> None:
        on.charge(2.0)
        seen.append((on.now, on.current_stream))
        done.set()

    _thread.start_new_thread(work, ())
    assert done.wait(10)
    assert seen == [(7.0, 1)]
    assert on.now == 7.0


def test_statistics_count_what_was_done_since_the_reset() -> None:
    on = machine()
    kernel(on, seconds=1.0)
    on.synchronize()
    on.reset_statistics()
    copy_in(on, seconds=2.0, writes=((1, 100),))
    copy_in(on, seconds=2.0, writes=((1, 100),), num_bytes=30)
    copy_out(on, seconds=1.0, reads=((1, 7),), writes=((1, 5),))
    kernel(on, seconds=0.5)
    on.synchronize()
    found = on.statistics()
    assert found.busy == {"compute": 0.5, "copy in": 4.0, "copy out": 1.0}
    assert (found.bytes_in, found.bytes_out, found.num_copies, found.num_kernels) == (130, 7, 3, 1)
    assert found.seconds == found.wait_seconds == 5.5
    assert [one.num_bytes for one in on.timeline()] == [100, 30, 7, 0, 0]


def test_no_timeline_is_kept_if_it_is_not_wanted() -> None:
    on = machine(keep_timeline=False)
    kernel(on)
    on.charge(1.0)
    assert on.timeline() == []
    assert on.statistics().num_kernels == 1


def test_streams_are_given_out_again_when_there_are_very_many() -> None:
    on = machine()
    numbers = [on.new_stream() for _ in range(600)]
    assert numbers[:256] == list(range(1, 257))
    assert numbers[256:512] == numbers[:256]


@pytest.mark.parametrize(
    ("option", "value"),
    [("execution", "lazy"), ("execution", True), ("check", "warn"), ("capacity", 0), ("pinned_rounding", "page")],
)
def test_an_option_that_cannot_be_used_is_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option}={value!r}"):
        machine(**{option: value})


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 9)),
        max_size=60,
    ),
    st.booleans(),
)
def test_a_lane_does_one_thing_at_a_time_and_nothing_before_it_is_ready(
    asked: list[tuple[int, int]], divisible: bool
) -> None:
    lane = Lane("any", divisible=divisible)
    taken = []
    for ready, seconds in asked:
        pieces = lane.occupy(float(ready), float(seconds))
        assert pieces[0][0] >= ready
        assert sum(end - start for start, end in pieces) == seconds
        assert divisible or len(pieces) == 1
        if seconds:
            taken += pieces
    assert lane.busy == sum(seconds for _, seconds in asked)
    assert all(one[1] <= two[0] for one, two in pairwise(sorted(taken)))


def test_a_long_kernel_runs_beside_short_ones_of_another_stream() -> None:
    lane, copies = Lane("compute", divisible=True), Lane("copy in")
    for each in (lane, copies):
        for ready in (2.0, 4.0, 6.0):
            each.occupy(ready, 1.0)
    assert lane.occupy(1.0, 3.0) == [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]
    assert copies.occupy(1.0, 3.0) == [(7.0, 10.0)]


def test_what_rounding_leaves_of_a_kernel_waits_for_nothing() -> None:
    lane = Lane("compute", divisible=True)
    for ready in (0.1 + 0.2, 0.7, 0.9):
        lane.occupy(ready, 0.1)
    pieces = lane.occupy(0.1, 0.3 + 0.1)
    assert [round(start, 9) for start, _ in pieces] == [0.1, 0.4]
    assert round(pieces[-1][1], 9) == 0.6


class Deeds:
    """Random work on some streams, each piece noting that it was done."""

    def __init__(self, seed: int, execution: object) -> None:
        self.choose = random.Random(seed)
        self.on = machine(execution=execution, check=None)
        self.streams = [0, *(self.on.new_stream() for _ in range(3))]
        self.done: list[int] = []
        self.before: list[set[int]] = []
        """For each piece, those that are to be done before it."""
        self.latest: dict[int, set[int]] = {stream: set() for stream in self.streams}
        self.host: set[int] = set()
        self.marks: list[tuple[Mark, set[int]]] = []

    def step(self) -> None:
        stream = self.choose.choice(self.streams)
        deed = self.choose.random()
        if deed < 0.5:
            self.submit(stream)
        elif deed < 0.7:
            self.marks.append((self.on.record(stream), self.latest[stream] | self.host))
        elif self.marks and deed < 0.9:
            mark, known = self.choose.choice(self.marks)
            self.on.wait(stream, mark)
            self.latest[stream] |= known
        elif self.marks:
            mark, known = self.choose.choice(self.marks)
            self.on.synchronize(mark)
            self.host |= known
            assert known <= set(self.done)

    def submit(self, stream: int) -> None:
        number = len(self.before)
        before = self.latest[stream] | self.host
        self.before.append(before)
        self.latest[stream] = before | {number}
        lane = self.choose.choice(["compute", "copy in", "copy out"])
        self.on.submit(stream, "deed", lane, 1.0, lambda: self.done.append(number), (), ())


@pytest.mark.parametrize("execution", ["eager", "late", 0, 1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_work_is_done_after_what_it_is_ordered_after_and_once(seed: int, execution: object) -> None:
    deeds = Deeds(seed, execution)
    for _ in range(120):
        deeds.step()
    deeds.on.synchronize()
    assert sorted(deeds.done) == list(range(len(deeds.before)))
    place = {number: index for index, number in enumerate(deeds.done)}
    for number, before in enumerate(deeds.before):
        assert all(place[other] < place[number] for other in before)


def test_seeds_give_different_orders_and_each_the_same_again() -> None:
    orders = []
    for execution in (1, 1, 2, 3):
        deeds = Deeds(0, execution)
        for _ in range(100):
            deeds.step()
        deeds.on.synchronize()
        orders.append(tuple(deeds.done))
    assert orders[0] == orders[1]
    assert len(set(orders)) == 3


@pytest.mark.parametrize("seed", range(4))
def test_when_bytes_are_moved_makes_no_difference_to_time(seed: int) -> None:
    found = []
    for execution in ("eager", "late", "dry", 5):
        deeds = Deeds(seed, execution)
        for _ in range(100):
            deeds.step()
        deeds.on.synchronize()
        found.append((deeds.on.now, deeds.on.timeline(), deeds.on.statistics()))
    assert all(one == found[0] for one in found)


def test_late_work_waits_until_it_is_asked_for() -> None:
    on = machine(execution="late")
    done: list[str] = []
    kernel(on, run=lambda: done.append("first"))
    mark = on.record(0)
    kernel(on, run=lambda: done.append("second"))
    copy_in(on, on.new_stream(), run=lambda: done.append("aside"))
    assert done == []
    assert not on.mark_done(mark)
    on.charge(1.0)
    assert on.mark_done(mark)
    assert done == ["first"]
    now = on.now
    on.settle(0)
    assert done == ["first", "second"]
    on.settle()
    assert done == ["first", "second", "aside"]
    assert on.now == now


def test_work_that_fails_fails_once_where_it_is_waited_for() -> None:
    on = machine(execution="late")
    done: list[int] = []

    def fail() -> None:
        assert on.running
        raise LookupError("as told")

    kernel(on, run=fail)
    kernel(on, run=lambda: done.append(1))
    with pytest.raises(LookupError, match="as told"):
        on.synchronize()
    assert not on.running
    on.synchronize()
    assert done == [1]
