"""What the hooks cost the host: where all fits, and for each module while weights stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

import fmstream
from bench.contract import Bar, Findings, Row, Timing, Workplace, register

CLAIM: Final = (
    "Where all weights fit, a forward pass takes as long as without the runtime; while they stream, the host spends a "
    "few microseconds more on each module that owns parameters."
)
BARS: Final = {"us_per_module": Bar(at_most=15.0), "fits_overhead": Bar(at_most=1.02)}
WARM_PASSES: Final = 8
"""Passes before measuring: one to learn the order, and those after which plans are made anew."""


@dataclass(frozen=True, slots=True)
class Size:
    """Tiny layers: ``width`` x ``width`` float32 each, called with ``num_tokens`` rows."""

    num_layers: int = 200
    width: int = 64
    num_tokens: int = 64
    rounds: int = 20
    passes: int = 25
    """Passes of either side in a round."""


def build(size: Size) -> nn.Sequential:
    """The layers in RAM."""
    return nn.Sequential(*(nn.Linear(size.width, size.width) for _ in range(size.num_layers))).eval()


@register("hooks", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Measure with one thread: these operators are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(Size(rounds=8) if place.quick else Size())
    finally:
        torch.set_num_threads(before)


def measure(size: Size) -> Findings:
    """Compare plain passes with passes of the same objects in which all fits, and in which half is streamed.

    Weights stream from RAM, and are so few that the copies take a small part of the pass: what is left is the host's
    time for following the calls, showing the weights and hiding them again, and what the copying threads take from it.
    """
    cases: dict[str, Mapping[str, Any]] = {
        "everything fits": {"memory": None},
        "half is streamed": {"memory": "50%"},
        "half is streamed, each module alone": {"memory": "50%", "unit": 1},
    }
    rows: list[Row] = []
    found: dict[str, tuple[Passes, Passes]] = {}
    with torch.inference_mode():
        for name, options in cases.items():
            plain, streamed = found[name] = _compare(size, options)
            rows += [plain.row(f"plain, beside: {name}"), streamed.row(name)]
    plain, fits = found["everything fits"]
    half, alone = found["half is streamed"], found["half is streamed, each module alone"]
    figures = {
        "us_per_module": _added_us(half[0].wall, half[1].wall, size),
        "fits_overhead": fits.wall.median / plain.wall.median,
        "us_per_module_on_cpu": _added_us(half[0].on_cpu, half[1].on_cpu, size),
        "us_per_module_alone": _added_us(alone[0].wall, alone[1].wall, size),
        "plain_ms": plain.wall.median * 1e3,
    }
    return Findings(figures, rows)


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of some passes: on the clock, and of the calling thread on its core, which others disturb less."""

    wall: Timing
    on_cpu: Timing

    def row(self, name: str) -> Row:
        """A row of the table."""
        return self.wall.row(name, median_on_cpu_s=self.on_cpu.median)


def _compare(size: Size, options: Mapping[str, Any]) -> tuple[Passes, Passes]:
    """Passes of one model without and with a handle, in turn: the same objects at the same addresses."""
    model, x = build(size), torch.randn(size.num_tokens, size.width)
    expected = model(x)
    plain: list[tuple[float, float]] = []
    streamed: list[tuple[float, float]] = []
    for _ in range(size.rounds):
        plain += _run_passes(model, x, size.passes)
        with fmstream.stream(model, **options):
            for _ in range(WARM_PASSES):
                output = model(x)
            assert torch.equal(output, expected), "a streamed pass gave another result"
            streamed += _run_passes(model, x, size.passes)
    return _collected(plain), _collected(streamed)


def _run_passes(model: nn.Module, x: torch.Tensor, count: int) -> list[tuple[float, float]]:
    """Seconds on the clock and on the core, for each of ``count`` passes after one that does not count."""
    model(x)
    seconds = []
    for _ in range(count):
        began, began_on_cpu = time.perf_counter(), time.thread_time()
        model(x)
        seconds.append((time.perf_counter() - began, time.thread_time() - began_on_cpu))
    return seconds


def _collected(seconds: Sequence[tuple[float, float]]) -> Passes:
    wall, on_cpu = zip(*seconds, strict=True)
    return Passes(Timing(wall), Timing(on_cpu))


def _added_us(plain: Timing, streamed: Timing, size: Size) -> float:
    """Microseconds that streaming adds for each module that owns parameters."""
    return (streamed.median - plain.median) / size.num_layers * 1e6
