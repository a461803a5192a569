"""The race checker: each kind of fault is caught, the same without the fault is not, and the books are exact."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fmstream.emulator.checker import Access, Shadow, SyncError
from fmstream.emulator.machine import Machine
from tests.kit_machine import MIB, copy_in, copy_out, kernel, machine, span

HERE = __file__
HOST_BYTES = (1 << 20, 4096)
"""A pinned range; nothing need be there, for no bytes are moved."""

Fault = Callable[[Machine, bool], None]
"""Does something, with the fault or without."""


def read_before_the_copy(on: Machine, fault: bool) -> None:
    side, block = on.new_stream(), on.allocator.allocate(4096, 0)
    copy_in(on, side, reads=(HOST_BYTES,), writes=(span(block),))
    if not fault:
        on.wait(0, on.record(side))
    kernel(on, reads=(span(block),))


def record_before_the_copy(on: Machine, fault: bool) -> None:
    side, block = on.new_stream(), on.allocator.allocate(4096, 0)
    early = on.record(side)
    copy_in(on, side, reads=(HOST_BYTES,), writes=(span(block),))
    on.wait(0, early if fault else on.record(side))
    kernel(on, reads=(span(block),))


def overwrite_while_reading(on: Machine, fault: bool) -> None:
    side, block = on.new_stream(), on.allocator.allocate(4096, 0)
    copy_in(on, side, reads=(HOST_BYTES,), writes=(span(block),))
    on.wait(0, on.record(side))
    kernel(on, reads=(span(block),))
    if not fault:
        on.wait(side, on.record(0))
    copy_in(on, side, reads=(HOST_BYTES,), writes=(span(block),))


def overwrite_what_another_writes(on: Machine, fault: bool) -> None:
    side, block = on.new_stream(), on.allocator.allocate(4096, 0)
    kernel(on, side, writes=(span(block, 0, 2048),))
    if not fault:
        on.synchronize(side)
    kernel(on, writes=(span(block, 2047, 1),))


def no_record_stream(on: Machine, fault: bool) -> None:
    side, block = on.new_stream(), on.allocator.allocate(4096, 0)
    kernel(on, writes=(span(block),))
    on.wait(side, on.record(0))
    kernel(on, side, reads=(span(block),))
    if not fault:
        on.allocator.record_stream(block, side)
    on.allocator.free(block)
    again = on.allocator.allocate(4096, 0)
    kernel(on, writes=(span(again),))


def host_overwrites_the_source(on: Machine, fault: bool) -> None:
    block = on.allocator.allocate(4096, 0)
    copy_in(on, reads=(HOST_BYTES,), writes=(span(block),))
    if not fault:
        on.synchronize(0)
    on.host_access((), (HOST_BYTES,), "fill")


def host_reads_a_result_early(on: Machine, fault: bool) -> None:
    block = on.allocator.allocate(4096, 0)
    kernel(on, writes=(span(block),))
    copy_out(on, reads=(span(block),), writes=(HOST_BYTES,))
    if not fault:
        on.synchronize(on.record(0))
    on.host_access((HOST_BYTES,), (), "read")


def host_writes_after_it_asked(on: Machine, fault: bool) -> None:
    block = on.allocator.allocate(4096, 0)
    copy_in(on, reads=(HOST_BYTES,), writes=(span(block),), seconds=1e-5)
    mark = on.record(0)
    if fault:
        assert not on.mark_done(mark)
    else:
        while not on.mark_done(mark):
            pass
    on.host_access((), (HOST_BYTES,), "fill")


def freed_before_the_last_use(on: Machine, fault: bool) -> None:
    block = on.allocator.allocate(4096, 0)
    if fault:
        on.allocator.free(block)
    kernel(on, writes=(span(block),))


def beyond_the_end(on: Machine, fault: bool) -> None:
    block = on.allocator.allocate(5000, 0)
    kernel(on, reads=(span(block, 4000, 1001 if fault else 1000),))


def freed_twice(on: Machine, fault: bool) -> None:
    block = on.allocator.allocate(4096, 0)
    on.allocator.free(block)
    if not fault:
        block = on.allocator.allocate(4096, 0)
    on.allocator.free(block)


RACES: dict[Fault, tuple[str, str]] = {
    read_before_the_copy: ("read by kernel on stream 0", "write by copy on stream 1"),
    record_before_the_copy: ("read by kernel on stream 0", "write by copy on stream 1"),
    overwrite_while_reading: ("write by copy on stream 1", "read by kernel on stream 0"),
    overwrite_what_another_writes: ("write by kernel on stream 0", "write by kernel on stream 1"),
    no_record_stream: ("write by kernel on stream 0", "read by kernel on stream 1"),
    host_overwrites_the_source: ("write by fill on the host", "read by copy on stream 0"),
    host_reads_a_result_early: ("read by read on the host", "write by copy on stream 0"),
    host_writes_after_it_asked: ("write by fill on the host", "read by copy on stream 0"),
}
OTHERS: dict[Fault, tuple[str, str]] = {
    freed_before_the_last_use: ("outside", "kernel on stream 0 writes 4096 bytes 0 bytes into the block of 4096 bytes"),
    beyond_the_end: ("outside", "kernel on stream 0 reads 1001 bytes 4000 bytes into the block of 5000 bytes"),
    freed_twice: ("double free", "the block of 4096 bytes at device offset 0x0 was freed before"),
}


def prepared(**options: object) -> Machine:
    on = machine(**options)
    on.pinned.register(*HOST_BYTES)
    return on


@pytest.mark.parametrize("execution", ["eager", "late", "dry", 1, 2])
@pytest.mark.parametrize("fault", [*RACES, *OTHERS])
def test_each_fault_is_caught_however_bytes_are_moved(fault: Fault, execution: object) -> None:
    with pytest.raises(SyncError):
        fault(prepared(execution=execution), True)


@pytest.mark.parametrize("execution", ["eager", "late", "dry", 1, 2])
@pytest.mark.parametrize("fault", [*RACES, *OTHERS])
def test_nothing_is_reported_without_the_fault(fault: Fault, execution: object) -> None:
    on = prepared(execution=execution)
    for _ in range(3):
        fault(on, False)
        on.synchronize()
    assert on.reports == []


@pytest.mark.parametrize("fault", RACES)
def test_a_report_names_both_accesses_and_where_they_came_from(fault: Fault) -> None:
    on = prepared(check="record")
    fault(on, True)
    (report,) = on.reports
    now, earlier = RACES[fault]
    assert report.kind == "race"
    assert f"the {now} is not ordered after the {earlier}" in report.message
    assert str(report.second) == now.partition(" by ")[2]
    assert str(report.first) == earlier.partition(" by ")[2]
    assert report.message.count(f"{HERE}:") >= 2
    assert report.message.count(f" in {fault.__name__}, called from {HERE}:") == 2
    assert on.statistics().num_reports == 1


@pytest.mark.parametrize("fault", OTHERS)
def test_other_reports_say_what_is_wrong(fault: Fault) -> None:
    on = prepared(check="record")
    fault(on, True)
    (report,) = on.reports
    kind, text = OTHERS[fault]
    assert report.kind == kind
    assert text in report.message
    assert f" in {fault.__name__}" in report.message


def test_a_reuse_that_came_too_early_says_what_is_missing() -> None:
    on = prepared(check="record")
    no_record_stream(on, True)
    assert "given out again in between: a record_stream is missing" in on.reports[0].message
    on = prepared(check="record")
    overwrite_while_reading(on, True)
    assert "record_stream" not in on.reports[0].message


def test_reports_read_the_same_at_each_run() -> None:
    def run() -> list[str]:
        on = prepared(check="record")
        for fault in (*RACES, *OTHERS):
            fault(on, True)
        return [report.message for report in on.reports]

    assert run() == run()


def test_raised_errors_carry_the_report_and_leave_the_machine_usable() -> None:
    on = prepared()
    with pytest.raises(SyncError) as caught:
        read_before_the_copy(on, True)
    assert on.reports == [caught.value.report]
    on.synchronize()
    read_before_the_copy(on, False)
    on.allocator.check()


def test_nobody_looks_if_there_is_no_check() -> None:
    on = prepared(check=None)
    for fault in (*RACES, *OTHERS):
        fault(on, True)
    assert on.reports == []
    on.allocator.check()


def test_work_that_is_out_of_order_is_not_done() -> None:
    on = machine()
    done: list[int] = []
    side, block = on.new_stream(), on.allocator.allocate(4096, 0)
    kernel(on, side, writes=(span(block),))
    with pytest.raises(SyncError):
        kernel(on, reads=(span(block),), run=lambda: done.append(1))
    assert done == []


def test_readers_of_several_streams_need_no_order() -> None:
    on = machine()
    streams, block = [0, on.new_stream(), on.new_stream()], on.allocator.allocate(4096, 0)
    for stream in streams:
        kernel(on, stream, reads=(span(block),))
    for stream in streams[1:]:
        on.wait(0, on.record(stream))
    kernel(on, writes=(span(block),))
    assert on.reports == []


def test_order_is_carried_from_stream_to_stream() -> None:
    on = machine()
    one, two = on.new_stream(), on.new_stream()
    block = on.allocator.allocate(4096, 0)
    kernel(on, writes=(span(block),))
    on.wait(one, on.record(0))
    kernel(on, one)
    on.wait(two, on.record(one))
    kernel(on, two, reads=(span(block),))
    assert on.reports == []


def test_parts_of_a_block_are_followed_apart() -> None:
    on = machine(check="record")
    side, slab = on.new_stream(), on.allocator.allocate(8 * MIB, 0)
    for i in range(8):
        copy_in(on, side, writes=(span(slab, i * MIB, MIB),))
    mark = on.record(side)
    copy_in(on, side, writes=(span(slab, 8 * MIB - 1, 1),))
    on.wait(0, mark)
    kernel(on, reads=(span(slab, 0, 8 * MIB - 1),))
    assert on.reports == []
    kernel(on, reads=(span(slab),))
    assert len(on.reports) == 1
    assert f"the bytes lie {8 * MIB - 1} bytes into the block" in on.reports[0].message


def test_the_host_may_not_touch_device_memory_that_is_in_use() -> None:
    on = machine()
    block = on.allocator.allocate(4096, 0)
    kernel(on, writes=(span(block),))
    with pytest.raises(SyncError, match="on the host is not ordered after the write by kernel"):
        on.host_access((span(block),), (), "peek")
    on.synchronize()
    on.host_access((span(block),), (), "peek")
    kernel(on, writes=(span(block),))  # what the host did before comes first


def test_what_the_host_wrote_comes_before_what_it_enqueues_then() -> None:
    on = prepared()
    block = on.allocator.allocate(4096, 0)
    for _ in range(3):
        kernel(on)
        on.host_access((), (HOST_BYTES,), "fill")
        copy_in(on, reads=(HOST_BYTES,), writes=(span(block),))
        on.synchronize()
    assert on.reports == []


def test_memory_that_is_not_pinned_is_not_followed() -> None:
    on = machine()
    block = on.allocator.allocate(4096, 0)
    copy_in(on, reads=(HOST_BYTES,), writes=(span(block),), blocking=True)
    on.host_access((), (HOST_BYTES,), "fill")
    assert on.reports == []


def test_a_segment_that_was_given_back_is_forgotten() -> None:
    on = machine()
    side = on.new_stream()
    block = on.allocator.allocate(20 * MIB, 0)
    kernel(on, side, writes=(span(block),))
    on.allocator.free(block)
    on.allocator.empty_cache()
    again = on.allocator.allocate(20 * MIB, 0)
    assert again.address == block.address
    kernel(on, writes=(span(again),))
    assert on.reports == []
    on.allocator.free(again)
    on.allocator.empty_cache()
    assert on._checker.region(again.address) is None


def test_a_block_that_was_waited_for_has_no_past() -> None:
    on = machine()
    side, block = on.new_stream(), on.allocator.allocate(4096, 0)
    kernel(on, side, writes=(span(block),))
    on.allocator.record_stream(block, side)
    on.allocator.free(block)
    on.charge(1.0)  # the host does not wait, but sees the stream pass when it allocates
    again = on.allocator.allocate(4096, 0)
    assert again.address == block.address
    kernel(on, writes=(span(again),))
    assert on.reports == []


def test_the_wait_for_a_block_is_no_wait_for_anything_else() -> None:
    on = machine()
    side, block, other = on.new_stream(), on.allocator.allocate(4096, 0), on.allocator.allocate(4096, 0)
    kernel(on, side, writes=(span(block), span(other)))
    on.allocator.record_stream(block, side)
    on.allocator.free(block)
    on.charge(1.0)
    assert on.allocator.allocate(4096, 0).address == block.address
    with pytest.raises(SyncError):
        kernel(on, reads=(span(other),))


def test_a_free_address_belongs_to_nothing() -> None:
    on = machine(check="record")
    kernel(on, reads=((on.allocator.address, 16),))
    assert "16 bytes at device offset 0x0: nothing is there" in on.reports[0].message
    kernel(on, reads=((on.allocator.address, 0),))
    assert len(on.reports) == 1


SIZE = 24


class Model:
    """What the shadow says, byte by byte."""

    def __init__(self) -> None:
        self.writer: list[Access | None] = [None] * SIZE
        self.readers: list[dict[int, Access]] = [{} for _ in range(SIZE)]

    def touch(self, low: int, high: int, access: Access, write: bool, clock: dict[int, int]) -> bool:
        """Whether any byte is in conflict."""
        found = False
        for at in range(low, high):
            earlier = [self.writer[at], *(self.readers[at].values() if write else ())]
            found |= any(e is not None and e.actor != access.actor and clock.get(e.actor, 0) < e.tick for e in earlier)
            if write:
                self.writer[at], self.readers[at] = access, {}
            else:
                self.readers[at][access.actor] = access
        return found

    def forget(self, low: int, high: int, clock: dict[int, int]) -> None:
        for at in range(low, high):
            writer = self.writer[at]
            if writer is not None and writer.tick <= clock.get(writer.actor, 0):
                self.writer[at] = None
            self.readers[at] = {a: r for a, r in self.readers[at].items() if r.tick > clock.get(a, 0)}


@pytest.mark.parametrize("seed", range(40))
def test_intervals_say_what_single_bytes_would(seed: int) -> None:
    choose = random.Random(seed)
    shadow, model = Shadow(0, SIZE), Model()
    ticks = [0, 0, 0]
    for _ in range(300):
        low = choose.randrange(SIZE)
        high = min(SIZE, low + choose.choice([1, 1, 2, 4, 8, SIZE]))
        clock = {actor: max(0, tick - choose.choice([0, 0, 0, 0, 1, 3])) for actor, tick in enumerate(ticks)}
        deed = choose.choice(["read", "read", "write", "forget"])
        if deed == "forget":
            shadow.forget(low, high, clock)
            model.forget(low, high, clock)
        else:
            actor = choose.randrange(3)
            ticks[actor] += 1
            access = Access(actor, ticks[actor], deed, (), 0)
            found = shadow.touch(low, high, access, deed == "write", clock)
            assert (found is not None) == model.touch(low, high, access, deed == "write", clock)
        shadow.check()
