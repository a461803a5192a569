from __future__ import annotations

import _thread
import threading
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fmstream.core.ring import Record, Ring, RingClosed
from fmstream.errors import ClosedError


def record(sequence: int) -> Record:
    return Record(op=1, page=2, frame=3, sequence=sequence)


def test_records_come_out_in_order() -> None:
    ring = Ring()
    ring.push(record(0))
    ring.push_many([record(1), record(2), record(3)])
    assert len(ring) == 4
    assert ring.pop() == record(0)
    assert ring.pop_many(2) == [record(1), record(2)]
    assert ring.pop_many(9) == [record(3)]
    assert ring.pop_many(9) == []


@pytest.mark.parametrize("timeout", [0.0, 0.01, -1.0])
def test_pop_of_an_empty_ring_gives_none(timeout: float) -> None:
    assert Ring().pop(timeout) is None


def test_close_drains_then_gives_none_for_ever() -> None:
    ring = Ring()
    ring.push_many([record(0), record(1)])
    ring.close()
    ring.close()
    assert ring.closed
    assert len(ring) == 2
    assert [ring.pop(), ring.pop(), ring.pop(), ring.pop(5.0)] == [record(0), record(1), None, None]
    assert ring.pop_many(3) == []
    assert len(ring) == 0


def test_push_after_close_is_refused() -> None:
    ring = Ring()
    ring.close()
    with pytest.raises(RingClosed, match="the ring is closed"):
        ring.push(record(0))
    with pytest.raises(ClosedError):
        ring.push_many([record(0)])
    assert ring.pop() is None


def test_close_wakes_every_blocked_consumer() -> None:
    ring = Ring()
    results: list[Record | None] = []
    consumers = [threading.Thread(target=lambda: results.append(ring.pop()), daemon=True) for _ in range(8)]
    for consumer in consumers:
        consumer.start()
    ring.close()
    for consumer in consumers:
        consumer.join(20)
    assert results == [None] * 8


def test_a_blocked_pop_in_the_main_thread_can_be_interrupted() -> None:
    ring = Ring()
    thread = threading.Thread(target=_thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the signal may arrive at either line
        thread.start()
        ring.pop(30.0)
    thread.join()


def test_nothing_is_lost_or_doubled_between_threads() -> None:
    ring = Ring()
    num_producers, num_each = 4, 500
    accepted: list[list[int]] = [[] for _ in range(num_producers)]
    popped: list[list[int]] = [[] for _ in range(3)]
    half = threading.Event()

    def produce(number: int) -> None:
        try:
            for i in range(num_each):
                ring.push(record(number * num_each + i))
                accepted[number].append(number * num_each + i)
                if number == 0 and i == num_each // 2:
                    half.set()
        except RingClosed:
            return

    def consume(number: int) -> None:
        while (got := ring.pop()) is not None:
            popped[number].append(got.sequence)

    threads = [threading.Thread(target=produce, args=(i,), daemon=True) for i in range(num_producers)]
    threads += [threading.Thread(target=consume, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    assert half.wait(20)
    ring.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    # A consumer may leave while another one still holds the last record, so look only when all have left.
    assert sorted(s for part in popped for s in part) == sorted(s for part in accepted for s in part)
    for part in popped:
        for producer in range(num_producers):
            mine = [s for s in part if s // num_each == producer]
            assert mine == sorted(mine)


class AgainstADeque(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring()
        self.model: deque[Record] = deque()
        self.sequence = 1 << 40

    def fresh(self) -> Record:
        self.sequence += 1
        return record(self.sequence)

    @precondition(lambda self: not self.ring.closed)
    @rule(count=st.integers(0, 4))
    def push(self, count: int) -> None:
        records = [self.fresh() for _ in range(count)]
        self.ring.push_many(records)
        self.model.extend(records)

    @rule()
    def pop(self) -> None:
        expected = self.model.popleft() if self.model else None
        assert self.ring.pop(0.0) == expected

    @rule(limit=st.integers(0, 5))
    def pop_many(self, limit: int) -> None:
        expected = [self.model.popleft() for _ in range(min(limit, len(self.model)))]
        assert self.ring.pop_many(limit) == expected

    @rule()
    def close(self) -> None:
        self.ring.close()

    @invariant()
    def same_length(self) -> None:
        assert len(self.ring) == len(self.model)


TestAgainstADeque = AgainstADeque.TestCase
TestAgainstADeque.settings = settings(max_examples=50, deadline=None)
