"""How long a gather takes from asking to done while the one who asks is busy, in PyTorch or in Python itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from bench.contract import Bar, Findings, Row, Workplace, register
from fmstream.actors.host_workers import HostWorkers, Ticket

CLAIM: Final = (
    "A native worker gathers 1024 rows of 256 bytes within 300 microseconds of being asked, whether the thread that "
    "asks goes on in PyTorch or in a loop of pure Python that never gives up the GIL by itself."
)
BARS: Final = {
    "p50_us_torch": Bar(at_most=300.0),
    "p50_us_python": Bar(at_most=300.0),
    "p99_us": Bar(at_most=5000.0),
}
ROWS: Final = 1024
ROW_BYTES: Final = 256
TABLE_ROWS: Final = 1 << 20
PERIOD_SECONDS: Final = 0.002
"""Time between two requests: each is served alone."""
ROUNDS: Final = 5
PLACES: Final = 8
IDLE_SECONDS: Final = 0.5

Busy = Callable[[], None]


@register("service", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Native workers and Python threads in turn, with each kind of work beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    kinds: dict[str, Busy] = {"torch": _torch_work(), "python": _count}
    native, threads = HostWorkers(1), HostWorkers(1, native=False)
    ours = "native worker" if native.native else "Python thread (no native one here)"
    workers = {ours: native, "Python thread": threads}
    found: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in workers for kind in kinds}
    try:
        desk = _Desk()
        idle = _idle_share(native, desk)
        for kind, work in kinds.items():
            for _ in range(ROUNDS):
                for name, asked in workers.items():
                    found[name, kind] += desk.latencies(asked, work, 40 if place.quick else 200)
            place.say(f"busy in {kind}: measured")
    finally:
        native.close()
        threads.close()
        torch.set_num_threads(before)
    figures = {f"p50_us_{kind}": float(np.percentile(found[ours, kind], 50)) for kind in kinds}
    figures["p99_us"] = max(float(np.percentile(found[ours, kind], 99)) for kind in kinds)
    figures["idle_cpu_share"] = idle
    return Findings(figures, [_row(name, kind, sample) for (name, kind), sample in found.items()])


class _Desk:
    """A table, ids, and places for what is gathered."""

    def __init__(self) -> None:
        self._table = np.arange(TABLE_ROWS * ROW_BYTES // 8).reshape(TABLE_ROWS, -1)
        self._ids = np.random.default_rng(0).integers(0, TABLE_ROWS, (64, ROWS))
        self._out = np.zeros((PLACES, ROWS, ROW_BYTES // 8), np.int64)

    def latencies(self, workers: HostWorkers, work: Busy, count: int) -> list[float]:
        """Microseconds from each call until its last row was there, on the clock of the worker; it works on meanwhile.

        The first tenth does not count.
        """
        asked: list[tuple[int, Ticket]] = []
        due = time.perf_counter()
        while len(asked) < count:
            work()
            if time.perf_counter() >= due:
                began = time.perf_counter_ns()
                asked.append((began, self._ask(workers, len(asked))))
                due = time.perf_counter() + PERIOD_SECONDS
        for number, (_, ticket) in enumerate(asked):
            workers.wait(ticket)
            if number >= count - PLACES:
                assert np.array_equal(self._out[number % PLACES], self._table[self._ids[number % len(self._ids)]])
        return [(ticket.end - began) / 1e3 for began, ticket in asked[count // 10 :]]

    def _ask(self, workers: HostWorkers, number: int) -> Ticket:
        ids, out = self._ids[number % len(self._ids)], self._out[number % PLACES]
        return workers.gather(self._table.ctypes.data, ROW_BYTES, ids.ctypes.data, ROWS, out.ctypes.data, keep=self)


def _idle_share(workers: HostWorkers, desk: _Desk) -> float:
    """Share of a core that this process takes while its workers have nothing to do."""
    desk.latencies(workers, _count, 1)
    began = time.process_time()
    time.sleep(IDLE_SECONDS)
    return (time.process_time() - began) / IDLE_SECONDS


def _torch_work() -> Busy:
    a, b, out = torch.randn(384, 384), torch.randn(384, 384), torch.empty(384, 384)
    return lambda: _multiply(a, b, out)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    with torch.inference_mode():
        torch.mm(a, b, out=out)


def _count() -> None:
    number = 1
    for _ in range(1000):
        number = number * 5 & 0xFFFF


def _row(name: str, kind: str, sample: list[float]) -> Row:
    p50, p90, p99 = np.percentile(sample, (50, 90, 99))
    return {
        "contender": name,
        "busy in": kind,
        "p50_us": float(p50),
        "p90_us": float(p90),
        "p99_us": float(p99),
        "max_us": max(sample),
        "requests": len(sample),
    }
