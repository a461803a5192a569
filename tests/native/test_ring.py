"""The native ring behind its face: against a deque, near the ends of number ranges, between threads and processes."""

from __future__ import annotations

import multiprocessing
import threading
from collections import deque
from multiprocessing import shared_memory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bench.native_ends import consume, produce
from fmstream.core import _native
from fmstream.core.native_ring import ALIGNMENT, Block, NativeRing, ring_bytes
from fmstream.core.ring import Record, RingClosed
from tests.kit_workers import TIMEOUT

NUM_RECORDS = 300_000
WORDS = st.integers(-(2**63), 2**63 - 1)
RECORDS = st.builds(Record, WORDS, WORDS, WORDS, WORDS)
STARTS = [0, 1, 5, 2**31 - 3, 2**32 - 2, 2**62 - 5]


class AgainstADeque(RuleBasedStateMachine):
    @initialize(log=st.integers(0, 4), start=st.sampled_from(STARTS))
    def make(self, log: int, start: int) -> None:
        self.ring = NativeRing(1 << log)
        self.words = self.ring._block.words
        for cursor in (_native.TAIL, _native.SEEN_HEAD, _native.HEAD, _native.SEEN_TAIL):
            self.words[cursor // 8] = start
        self.model: deque[Record] = deque()

    @rule(record=RECORDS)
    def push(self, record: Record) -> None:
        fits = len(self.model) < self.ring.capacity
        assert self.ring.push(record) == fits
        self.model += [record] * fits

    @rule(records=st.lists(RECORDS, max_size=20))
    def push_many(self, records: list[Record]) -> None:
        pushed = self.ring.push_many(records)
        assert pushed == min(len(records), self.ring.capacity - len(self.model))
        self.model += records[:pushed]

    @rule(records=st.lists(RECORDS, min_size=1, max_size=4))
    def push_all(self, records: list[Record]) -> None:
        source = np.array(records, np.int64)
        parked = bool(self.words[_native.PARKED // 8])
        told = _native.push_all(self.ring.address, source.ctypes.data, len(records))
        if len(records) > self.ring.capacity - len(self.model):
            assert told == 0
        else:
            assert told == (2 if parked else 1)
            self.model += records
            assert self.words[_native.PARKED // 8] == 0

    @rule()
    def pop(self) -> None:
        assert self.ring.pop(0.0) == (self.model.popleft() if self.model else None)

    @rule(limit=st.integers(0, 20))
    def pop_many(self, limit: int) -> None:
        assert self.ring.pop_many(limit) == [self.model.popleft() for _ in range(min(limit, len(self.model)))]

    @rule(limit=st.integers(1, 8), keep=st.integers(0, 8))
    def peek_then_release(self, limit: int, keep: int) -> None:
        out = Block(8 * _native.RECORD_BYTES)
        count = _native.peek_many(self.ring.address, out.address, limit)
        assert count == min(limit, len(self.model))
        assert [Record(*row) for row in out.words[: 4 * count].reshape(-1, 4).tolist()] == list(self.model)[:count]
        released = max(0, count - keep)
        _native.release(self.ring.address, released)
        for _ in range(released):
            self.model.popleft()

    @rule()
    def park(self) -> None:
        assert _native.park(self.ring.address) == (not self.model)

    @invariant()
    def same_length(self) -> None:
        if hasattr(self, "ring"):
            assert len(self.ring) == len(self.model)


TestAgainstADeque = AgainstADeque.TestCase
TestAgainstADeque.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def record(number: int) -> Record:
    return Record(1, 2, 3, number)


def test_close_drains_then_gives_none() -> None:
    ring = NativeRing(4)
    ring.push_many([record(0), record(1)])
    ring.close()
    ring.close()
    assert ring.closed
    assert [ring.pop(), ring.pop(), ring.pop(), ring.pop(TIMEOUT)] == [record(0), record(1), None, None]
    with pytest.raises(RingClosed):
        ring.push(record(2))
    with pytest.raises(RingClosed):
        ring.push_many([record(2)])


def test_a_sleeping_consumer_is_woken_by_a_push_and_by_close() -> None:
    ring = NativeRing(4)
    got: list[Record | None] = []
    first = threading.Event()

    def consume_two() -> None:
        got.append(ring.pop())
        first.set()
        got.append(ring.pop())

    consumer = threading.Thread(target=consume_two, daemon=True)
    consumer.start()
    ring.push(record(0))
    assert first.wait(TIMEOUT)
    ring.close()
    consumer.join(TIMEOUT)
    assert got == [record(0), None]


def test_two_native_ends_in_two_threads() -> None:
    ring, out = NativeRing(64), Block(64)
    wrong: list[int] = []
    consumer = threading.Thread(target=lambda: wrong.append(consume(ring.address, out.address, NUM_RECORDS)))
    consumer.start()
    produce(ring.address, NUM_RECORDS)
    consumer.join()
    assert wrong == [0]


def produce_elsewhere(name: str, capacity: int, num_records: int) -> None:
    """The other process: it finds the ring in memory that both see."""
    memory = shared_memory.SharedMemory(name)
    ring = NativeRing(capacity, memory.buf)
    produce(ring.address, num_records)
    del ring
    memory.close()


def test_two_native_ends_in_two_processes() -> None:
    memory = shared_memory.SharedMemory(create=True, size=ring_bytes(64) + ALIGNMENT)
    try:
        ring, out = NativeRing(64, memory.buf), Block(64)
        other = multiprocessing.get_context("spawn").Process(
            target=produce_elsewhere, args=(memory.name, 64, NUM_RECORDS), daemon=True
        )
        other.start()
        assert consume(ring.address, out.address, NUM_RECORDS) == 0
        other.join(TIMEOUT)
        assert other.exitcode == 0
        del ring
    finally:
        memory.close()
        memory.unlink()
