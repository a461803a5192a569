"""Gathering rows of a large table into a window of host memory, against PyTorch, numpy and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.contract import Bar, Findings, Row, Timing, Workplace, in_turn, register, seconds_of
from fmstream.actors.host_workers import HostWorkers

CLAIM: Final = (
    "One native worker gathers rows of a table at least 1.2 times as fast as torch.index_select with one thread, at "
    "every size of a row, and large rows nearly as fast as a copy of the same bytes that lie side by side."
)
BARS: Final = {"min_vs_index_select": Bar(at_least=1.2), "large_rows_vs_copy": Bar(at_least=0.85)}
TABLE_BYTES: Final = 1 << 30
WINDOW_BYTES: Final = 512 << 20
"""A circular window, larger than caches: whoever stages rows ahead writes where it has not written for a while."""
STRIDE_BYTES: Final = 32 << 20
"""What one gather fills."""
ROW_BYTES: Final = (128, 256, 512, 1024, 4096, 16 << 10, 64 << 10)
LARGE_BYTES: Final = 16 << 10
Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ground:
    """The table, the places in the window in their order, and the workers."""

    table: Words
    places: Iterator[Words]
    one: HostWorkers
    two: HostWorkers


@register("gather", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Measure every size of a row, all contenders in turn, each round with other ids."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    one, two = HostWorkers(1), HostWorkers(2)
    try:
        table = _words(TABLE_BYTES)
        table[:] = np.arange(len(table))
        window = _words(WINDOW_BYTES)
        window[:] = 0
        places = cycle(np.split(window, WINDOW_BYTES // STRIDE_BYTES))
        place.say(f"workers are {'native' if one.native else f'Python threads: {one.why_portable}'}")
        ground = Ground(table, places, one, two)
        found = {size: _measure(ground, size, 7 if place.quick else 21, place.say) for size in ROW_BYTES}
    finally:
        one.close()
        two.close()
        torch.set_num_threads(before)
    gains = {size: times["index_select"].median / times["1 worker"].median for size, times in found.items()}
    large = [found[size]["copy"].median / found[size]["1 worker"].median for size in ROW_BYTES if size >= LARGE_BYTES]
    figures = {"min_vs_index_select": min(gains.values()), "large_rows_vs_copy": min(large)}
    return Findings(figures, [_row(size, times) for size, times in found.items()])


def _words(num_bytes: int) -> Words:
    memory = np.empty(num_bytes // 8 + 8, np.int64)
    start = -memory.ctypes.data % 64 // 8
    return memory[start : start + num_bytes // 8]


def _measure(ground: Ground, row_bytes: int, rounds: int, say: Callable[[str], None]) -> dict[str, Timing]:
    table = ground.table.reshape(-1, row_bytes // 8)
    count = STRIDE_BYTES // row_bytes
    rng = np.random.default_rng(row_bytes)

    def timed(work: Callable[[Words, Words], Any], gathers: bool = True) -> Callable[[], list[float]]:
        def measure() -> list[float]:
            ids = rng.integers(0, len(table), count)
            target = next(ground.places).reshape(-1, row_bytes // 8)
            seconds = seconds_of(lambda: work(target, ids))
            assert not gathers or np.array_equal(target[:, -1], table[ids, -1]), "other rows were gathered"
            return [seconds]

        return measure

    def copy(target: Words, ids: Words) -> None:
        first = int(ids[0]) % (len(table) - count)
        np.copyto(target, table[first : first + count])

    def select(target: Words, ids: Words) -> None:
        # PyTorch moves elements of any type alike; these are what embeddings mostly are.
        rows, out = (torch.from_numpy(words).view(torch.bfloat16) for words in (table, target))
        torch.index_select(rows, 0, torch.from_numpy(ids), out=out)

    contenders = {
        "index_select": timed(select),
        "take": timed(lambda target, ids: np.take(table, ids, axis=0, out=target, mode="clip")),
        "1 worker": timed(lambda target, ids: _gather(ground.one, table, target, ids)),
        "2 workers": timed(lambda target, ids: _gather(ground.two, table, target, ids)),
        "copy": timed(copy, gathers=False),
    }
    in_turn(contenders, 1)  # the caches of the code
    times = in_turn(contenders, rounds)
    ours, theirs = _rate(times["1 worker"]), _rate(times["index_select"])
    say(f"{row_bytes} bytes a row: {ours:.1f} GB/s, index_select {theirs:.1f}")
    return times


def _gather(workers: HostWorkers, table: Words, target: Words, ids: Words) -> None:
    addresses = table.ctypes.data, table.itemsize * table.shape[1], ids.ctypes.data, len(ids), target.ctypes.data
    workers.wait(workers.gather(*addresses, num_rows=len(table), keep=(table, target, ids)))


def _rate(timing: Timing) -> float:
    return STRIDE_BYTES / timing.median / 1e9


def _row(row_bytes: int, times: dict[str, Timing]) -> Row:
    rates = {f"{name} GB/s": round(_rate(timing), 2) for name, timing in times.items()}
    ours = times["1 worker"].median
    ratios = {"vs index_select": times["index_select"].median / ours, "vs copy": times["copy"].median / ours}
    return {"row bytes": row_bytes, **rates, **{name: round(value, 2) for name, value in ratios.items()}}
