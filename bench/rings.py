"""What a record costs between two ends: the native ring, queue.SimpleQueue and asyncio.Queue."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from typing import Final

from bench.contract import Bar, Findings, Timing, Workplace, in_turn, register
from bench.native_ends import consume, produce
from fmstream.core import _native
from fmstream.core.native_ring import ALIGNMENT, Block, NativeRing, ring_bytes
from fmstream.core.ring import Record

CLAIM: Final = (
    "In batches of 32 a record crosses the native ring, in and out, in at most 20 nanoseconds, from Python; one by one "
    "a queue.SimpleQueue is cheaper, which is why two Python ends use that."
)
BARS: Final = {"batch32_ns": Bar(at_most=20.0)}
CAPACITY: Final = 1024
CALLS: Final = 2000
QUICK_RECORDS: Final = 10**6
FULL_RECORDS: Final = 10**8
THREADS: Final = "two native ends, two threads"
PROCESSES: Final = "two native ends, two processes"

Sampler = Callable[[], list[float]]


@register("rings", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """All in one thread, in and out, in turn; then two native ends in two threads."""
    ring = NativeRing(CAPACITY)
    memory = Block(256 * _native.RECORD_BYTES)
    push, push_many, pop_many = _native.push, _native.push_many, _native.pop_many
    address, buffer = ring.address, memory.address

    def batch(size: int) -> Sampler:
        def work() -> None:
            for _ in range(CALLS):
                push_many(address, buffer, size)
                pop_many(address, buffer, size)

        return _sampler(work, size)

    def one() -> None:
        for _ in range(CALLS):
            push(address, 1, 2, 3, 4)
            pop_many(address, buffer, 1)

    def with_records() -> None:
        for _ in range(CALLS):
            ring.push(record)
            ring.pop(0.0)

    simple: queue.SimpleQueue[Record] = queue.SimpleQueue()
    record = Record(1, 2, 3, 4)

    def simple_queue() -> None:
        for _ in range(CALLS):
            simple.put(record)
            simple.get()

    contenders = {
        "batches of 8": batch(8),
        "batches of 32": batch(32),
        "batches of 256": batch(256),
        "one by one": _sampler(one, 1),
        "one by one, with records": _sampler(with_records, 1),
        "queue.SimpleQueue": _sampler(simple_queue, 1),
        "asyncio.Queue": lambda: [asyncio.run(_asyncio_queue(record))],
    }
    times = in_turn(contenders, 5 if place.quick else 25)
    place.say("one thread: measured")
    num_records = QUICK_RECORDS if place.quick else FULL_RECORDS
    ends = {THREADS: _two_threads(num_records), PROCESSES: _two_processes(num_records)}
    times |= in_turn(ends, 3 if place.quick else 1)
    figures = {
        "batch32_ns": _nanoseconds(times["batches of 32"]),
        "push_pop_ns": _nanoseconds(times["one by one"]),
        "simple_queue_ns": _nanoseconds(times["queue.SimpleQueue"]),
        "asyncio_queue_ns": _nanoseconds(times["asyncio.Queue"]),
        "two_threads_ns": _nanoseconds(times[THREADS]),
        "two_processes_ns": _nanoseconds(times[PROCESSES]),
    }
    return Findings(figures, [_row(name, timing) for name, timing in times.items()])


def _nanoseconds(timing: Timing) -> float:
    return timing.median * 1e9


def _row(name: str, timing: Timing) -> dict[str, object]:
    samples = timing.samples
    return {
        "contender": name,
        "ns a record": _nanoseconds(timing),
        "least": min(samples) * 1e9,
        "most": max(samples) * 1e9,
    }


def _sampler(work: Callable[[], None], size: int) -> Sampler:
    """Seconds a record of work that moves ``CALLS * size``, on the core of this thread."""

    def sample() -> list[float]:
        began = time.thread_time()
        work()
        return [(time.thread_time() - began) / (CALLS * size)]

    return sample


async def _asyncio_queue(record: Record) -> float:
    waiting: asyncio.Queue[Record] = asyncio.Queue()
    began = time.thread_time()
    for _ in range(CALLS):
        await waiting.put(record)
        await waiting.get()
    return (time.thread_time() - began) / CALLS


def _two_threads(num_records: int) -> Sampler:
    """Wall seconds a record between a thread that only pushes and one that only pops, both native."""
    out = Block(_native.RECORD_BYTES)

    def sample() -> list[float]:
        ring = NativeRing(CAPACITY)
        found: list[int] = []
        consumer = threading.Thread(target=lambda: found.append(consume(ring.address, out.address, num_records)))
        began = time.perf_counter()
        consumer.start()
        produce(ring.address, num_records)
        consumer.join()
        assert found == [0], "records were lost or changed"
        return [(time.perf_counter() - began) / num_records]

    return sample


def _two_processes(num_records: int) -> Sampler:
    """The same between two processes; the clock starts with the first record that arrives."""
    out = Block(_native.RECORD_BYTES)

    def sample() -> list[float]:
        memory = shared_memory.SharedMemory(create=True, size=ring_bytes(CAPACITY) + ALIGNMENT)
        try:
            ring = NativeRing(CAPACITY, memory.buf)
            start = multiprocessing.get_context("spawn").Process
            other = start(target=_produce_elsewhere, args=(memory.name, num_records), daemon=True)
            other.start()
            while not len(ring):
                time.sleep(0.001)
            began = time.perf_counter()
            wrong = consume(ring.address, out.address, num_records)
            seconds = time.perf_counter() - began
            other.join()
            del ring
        finally:
            memory.close()
            memory.unlink()
        assert wrong == 0, "records were lost or changed"
        return [seconds / num_records]

    return sample


def _produce_elsewhere(name: str, num_records: int) -> None:
    memory = shared_memory.SharedMemory(name)
    ring = NativeRing(CAPACITY, memory.buf)
    produce(ring.address, num_records)
    del ring
    memory.close()
