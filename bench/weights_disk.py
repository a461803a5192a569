"""Weights that are streamed from a file, against computing alone, reading alone, and the ways that do not overlap."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import fmstream
from bench.confined import Killed, memory_group, stream_in_child
from bench.contract import (
    Bar,
    BenchError,
    Findings,
    Row,
    Timing,
    Workplace,
    in_turn,
    num_cores,
    register,
    seconds_of,
)
from bench.disk import RawReads, Shape, best_reads, build, drop_cached, num_bytes_of, tokens, write
from bench.streamer import Case

FULL: Final = Shape(width=2048, hidden=8192, num_blocks=24)
QUICK: Final = Shape(width=1024, hidden=4608, num_blocks=24)
MEMORY: Final = "25%"
ROUNDS: Final = 5
WARM_PASSES: Final = 6
"""Passes before measuring: one to learn the order, and those after which plans are made anew."""
QUIET_SECONDS: Final = 0.2
"""Pause after a streamed pass, in which what it reads ahead arrives and disturbs nobody."""
NEAR: Final = (0.9, 1.1)
"""Compute over reads at which the search for the number of tokens ends."""
BALANCED: Final = (0.8, 1.25)
"""Compute over reads within which the figures mean what they say."""

BARS: Final = {
    "gap": Bar(at_most=1.15),
    "vs_sync": Bar(at_least=1.5),
    "vs_accelerate": Bar(at_least=1.8),
    "sync_over_sum": Bar(at_most=1.05),
    "predicted_error": Bar(at_most=0.15),
    "rss_ratio": Bar(at_most=1.15),
}
CLAIM: Final = (
    "A model four times as large as its memory, read from disk while it computes, takes about as long as the slower "
    "of the two, and its outputs are those of the resident model."
)


@dataclass(slots=True)
class Ground:
    """The model in RAM, its file, and what is the same for all contenders."""

    shape: Shape
    path: Path
    resident: nn.Sequential
    reads: RawReads
    weights_bytes: int
    streamed_bytes: int
    x: torch.Tensor
    expected: torch.Tensor

    def compute_seconds(self) -> float:
        """One pass of the resident model."""
        return seconds_of(lambda: self.resident(self.x))

    def read_seconds(self) -> float:
        """Reading what cannot stay in memory."""
        return self.reads.seconds(self.streamed_bytes)


class Streamed:
    """A model of its own that streams from the file."""

    def __init__(self, ground: Ground, policy: str, passes_at_once: int, settle: bool) -> None:
        self._ground = ground
        self._passes = passes_at_once
        self._settle = settle
        self.model = fmstream.load(lambda: build(ground.shape), ground.path)
        self.handle = fmstream.stream(self.model, policy=policy, memory=MEMORY)
        self.output = ground.x
        for _ in range(WARM_PASSES):
            self._one()

    def _one(self) -> float:
        return seconds_of(self._call)

    def _call(self) -> None:
        self.output = self.model(self._ground.x)

    def measure(self) -> list[float]:
        """Steady passes.  A policy that reads ahead begins with one that does not count: its window is full."""
        if self._settle:
            self._one()
        seconds = [self._one() for _ in range(self._passes)]
        time.sleep(QUIET_SECONDS)
        assert torch.equal(self.output, self._ground.expected), "a streamed pass gave another result"
        return seconds


class Accelerated:
    """accelerate's disk offload of the same model, from its own folder, never from the page cache."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        from accelerate import disk_offload  # type: ignore[import-untyped]

        self._ground = ground
        self._folder = folder
        self._model = disk_offload(copy.deepcopy(ground.resident), str(folder), torch.device("cpu"))
        self.equal = True
        self.measure()  # the first pass is much slower than the others

    def measure(self) -> list[float]:
        """One pass."""
        drop_cached(self._folder.iterdir())
        began = time.perf_counter()
        output = self._model(self._ground.x)
        seconds = time.perf_counter() - began
        self.equal = self.equal and torch.equal(output, self._ground.expected)
        return [seconds]


@register("weights_disk", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Measure all contenders in turn, then memory in processes of their own."""
    shape = QUICK if place.quick else FULL
    threads = max(1, num_cores() - 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), ExitStack() as stack:
            ground = _set_up(place, shape)
            stack.callback(ground.reads.close)
            _choose_tokens(ground, place.say)
            figures, rows = _race(ground, place, stack)
        found, more = _memory(ground, place, threads)
    finally:
        torch.set_num_threads(before)
    return Findings({**figures, **found, "torch_threads": threads}, rows + more)


def _set_up(place: Workplace, shape: Shape) -> Ground:
    torch.manual_seed(1)
    resident = build(shape)
    weights_bytes = num_bytes_of(resident)
    place.need(int(2.2 * weights_bytes))
    path = place.folder / "model.safetensors"
    write(resident, path)
    reads = best_reads(path, weights_bytes // 4)
    rate = f"{reads.chunk_bytes >> 20} MiB chunks, {reads.num_threads} threads"
    place.say(f"{weights_bytes / 1e9:.2f} GB in {shape.num_blocks} blocks; best direct reads: {rate}")
    x = tokens(32, shape.width)
    streamed_bytes = weights_bytes - weights_bytes // 4
    return Ground(shape, path, resident, reads, weights_bytes, streamed_bytes, x, x)


def _choose_tokens(ground: Ground, say: Callable[[str], None]) -> None:
    """Choose the size of the input so that computing takes about as long as reading."""
    for _ in range(8):
        ground.compute_seconds()
        times = in_turn({"c": lambda: [ground.compute_seconds()], "r": lambda: [ground.read_seconds()]}, rounds=3)
        ratio = times["c"].median / times["r"].median
        say(f"{len(ground.x)} tokens: compute / reads = {ratio:.2f}")
        if NEAR[0] <= ratio <= NEAR[1]:
            break
        ground.x = tokens(max(1, round(len(ground.x) / ratio)), ground.shape.width)
    ground.expected = ground.resident(ground.x)


def _race(ground: Ground, place: Workplace, stack: ExitStack) -> tuple[dict[str, float], list[Row]]:
    """All contenders in turn."""
    sync = Streamed(ground, "sync", 1, settle=False)
    stack.callback(sync.handle.close)
    overlap = Streamed(ground, "overlap_async", 1 if place.quick else 2, settle=True)
    stack.callback(overlap.handle.close)
    contenders: dict[str, Callable[[], list[float]]] = {
        "compute": lambda: [ground.compute_seconds()],
        "reads": lambda: [ground.read_seconds()],
        "sync": sync.measure,
        "overlap": overlap.measure,
    }
    accelerated, missing = _accelerated(ground, place)
    if accelerated is not None:
        contenders["accelerate"] = accelerated.measure
    place.say("measuring in turn: " + ", ".join(contenders))
    times = in_turn(contenders, ROUNDS)
    compute, reads = times["compute"].median, times["reads"].median
    row = overlap.handle.report.roots[0]
    figures = {
        "gap": times["overlap"].median / max(compute, reads),
        "vs_sync": times["sync"].median / times["overlap"].median,
        "sync_over_sum": times["sync"].median / (compute + reads),
        "compute_s": compute,
        "reads_s": reads,
        "compute_over_reads": compute / reads,
        "reads_gb_per_s": ground.streamed_bytes / reads / 1e9,
        "tokens": len(ground.x),
        "weights_gb": ground.weights_bytes / 1e9,
        "streamed_share": row.streamed_bytes / ground.streamed_bytes,
    }
    if row.predicted_seconds is not None:
        measured = times["overlap"].median
        figures["predicted_error"] = abs(row.predicted_seconds - measured) / measured
    if accelerated is not None:
        figures["vs_accelerate"] = times["accelerate"].median / times["overlap"].median
    return figures, _rows(times, missing, accelerated, figures["compute_over_reads"])


def _accelerated(ground: Ground, place: Workplace) -> tuple[Accelerated | None, list[Row]]:
    folder = place.folder / "accelerate"
    folder.mkdir()
    try:
        return Accelerated(ground, folder), []
    except ImportError:
        return None, [{"contender": "accelerate", "note": "skipped: accelerate is not installed"}]


def _rows(times: dict[str, Timing], missing: list[Row], accelerated: Accelerated | None, ratio: float) -> list[Row]:
    notes = {"sync": "outputs equal", "overlap": "outputs equal"}
    if accelerated is not None:
        notes["accelerate"] = "outputs equal" if accelerated.equal else "outputs differ"
    if not BALANCED[0] <= ratio <= BALANCED[1]:
        notes["compute"] = f"compute / reads = {ratio:.2f} is out of balance: the machine changed; run it again"
    return [timing.row(name, note=notes.get(name, "")) for name, timing in times.items()] + missing


def _memory(ground: Ground, place: Workplace, threads: int) -> tuple[dict[str, float], list[Row]]:
    """The peak of a process that only streams, and the same within a limit that does not hold the model."""
    expected = place.folder / "expected.pt"
    torch.save(ground.expected, expected)
    shape = ground.shape
    case = Case(
        checkpoint=str(ground.path),
        expected=str(expected),
        width=shape.width,
        hidden=shape.hidden,
        num_blocks=shape.num_blocks,
        num_tokens=len(ground.x),
        memory=MEMORY,
        threads=threads,
    )
    alone = stream_in_child(case)
    assert alone["equal"], "a streamed pass gave another result in a process of its own"
    before, during = alone["before"], alone["during"]
    allowed = before["rss"] + ground.weights_bytes // 4 + fmstream.StreamConfig().staging_bytes
    figures = {"rss_ratio": during["peak"] / allowed, "rss_peak_gb": during["peak"] / 1e9}
    note = (
        f"resident {_mb(before['rss'])} before, {_mb(during['peak'])} at most, {_mb(allowed)} allowed; "
        f"file pages {_mb(before['file'])} before, {_mb(during['file'])} after"
    )
    rows = [_child_row("in a process of its own", alone, note)]
    # Program text that is mapped already is not charged to the group: what the process owns is, and half the weights.
    limit = before["anonymous"] + ground.weights_bytes // 2
    rows.append(_within_limit(case, limit, ground.weights_bytes, place.say))
    return figures, rows


def _within_limit(case: Case, limit: int, weights_bytes: int, say: Callable[[str], None]) -> Row:
    name = "within a memory limit"
    try:
        with memory_group(limit) as group:
            found = stream_in_child(case, group)
            peak = group.peak_bytes()
    except BenchError as error:
        say(f"{name}: skipped, {error}")
        return {"contender": name, "note": f"skipped: {error}"}
    except Killed:
        return {"contender": name, "note": f"killed: it needs more than {_mb(limit)}"}
    assert found["equal"], "a streamed pass gave another result within a memory limit"
    used = "unknown" if peak is None else _mb(peak)
    return _child_row(name, found, f"limit {_mb(limit)}, weights {_mb(weights_bytes)}, used at most {used}")


def _child_row(name: str, found: dict[str, Any], note: str) -> Row:
    steady = found["seconds"][len(found["seconds"]) // 2 :]
    return Timing(tuple(steady)).row(name, note=note)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
