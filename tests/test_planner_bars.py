"""How near plans come to max(compute, what cannot stay over the link) behind an accelerator's link.

Forty transformer blocks of 3.15 MB each, a link of 13 GB/s, and copies that occupy it for 2 or 0.2 microseconds beyond
their bytes and are seen 10 microseconds later.  Only the hard cases of a larger table: in the others plans are free.
"""

from __future__ import annotations

import random
from functools import lru_cache
from statistics import fmean

import pytest

from fmstream import policies
from fmstream.core.arena import choose_page_bytes, num_pages
from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.simulate import simulate
from fmstream.core.trace import Call, Trace

RATE = 13e9
SEEN = 10e-6
LATENCIES = (2e-6, 0.2e-6)
WIDTH = 256
NORM, QKV, OUT, UP, DOWN = ((n * 4, m * 4) for n, m in (
    (WIDTH, WIDTH), (3 * WIDTH**2, 3 * WIDTH), (WIDTH**2, WIDTH), (4 * WIDTH**2, 4 * WIDTH), (4 * WIDTH**2, WIDTH)
))  # fmt: skip
BLOCK = (NORM, QKV, OUT, NORM, UP, DOWN)
NUM_BLOCKS = 40
HARD = ((0.5, 0.1), (0.5, 0.25), (0.5, 0.5), (0.5, 0.75), (1.0, 0.1), (2.0, 0.1))
"""Compute over the time that all weights take over the link, and memory over weights."""


@lru_cache
def transformer(ratio: float, seed: int | None = None) -> Trace:
    """Equal blocks with compute in proportion to bytes; with a seed, blocks whose bytes and compute vary by half."""
    draw = random.Random(seed)
    sizes: list[int] = []
    shares: list[tuple[tuple[int, int], float]] = []
    for _ in range(NUM_BLOCKS):
        wide, slow = (1.0, 1.0) if seed is None else (draw.uniform(0.5, 1.5), draw.uniform(0.5, 1.5))
        for weight, bias in BLOCK:
            shares.append(((len(sizes), len(sizes) + 1), slow * weight))
            sizes += [-(-int(weight * wide) // 64) * 64, bias]
    per_share = ratio * sum(sizes) / RATE / sum(share for _, share in shares)
    return in_turn(sizes, [(params, share * per_share) for params, share in shares])


def in_turn(sizes: list[int], calls: list[tuple[tuple[int, ...], float]]) -> Trace:
    """Calls one after the other, each with its parameters and seconds."""
    made, clock = [], 0.0
    for site, (params, seconds) in enumerate(calls):
        made.append(Call(site, params, clock, clock + seconds))
        clock += seconds
    return Trace(tuple(made), tuple(sizes), clock)


@lru_cache
def planned(ratio: float, share: float, latency: float, seed: int | None = None) -> Plan:
    """The plan for a share of the weights."""
    trace = transformer(ratio, seed)
    limits = Limits(int(share * trace.num_bytes), choose_page_bytes(trace.num_bytes))
    return policies.get("overlap_async")(trace, limits, Costs(RATE, latency, SEEN))


def seconds(plan: Plan, trace: Trace, costs: Costs) -> float:
    """What a plan takes under costs that need not be those for which it was made."""
    return simulate(
        trace,
        plan.units,
        window_bytes=plan.window_bytes,
        page_bytes=choose_page_bytes(trace.num_bytes),
        costs=costs,
        lookahead=plan.lookahead,
        wrap=plan.wrap,
    )


def gap(plan: Plan, trace: Trace, costs: Costs, share: float) -> float:
    """Time over the bound."""
    moved = trace.num_bytes - int(share * trace.num_bytes)
    return seconds(plan, trace, costs) / max(trace.seconds, moved / costs.bytes_per_second)


def turned_out(trace: Trace, costs: Costs, seed: int) -> tuple[Trace, Costs]:
    """The same pass with every cost up to 15 % off."""
    draw = random.Random(seed)

    def off(value: float) -> float:
        return value * draw.uniform(0.85, 1.15)

    calls = [(call.params, off(call.end - call.start)) for call in trace.calls]
    turned = Costs(off(costs.bytes_per_second), off(costs.latency_seconds), off(costs.seen_seconds))
    return in_turn(list(trace.sizes), calls), turned


@pytest.mark.parametrize("latency", LATENCIES)
def test_the_gap_on_equal_blocks(latency: float) -> None:
    gaps = [
        gap(planned(ratio, share, latency), transformer(ratio), Costs(RATE, latency, SEEN), share)
        for ratio, share in HARD
    ]
    assert max(gaps) <= 1.08
    assert fmean(gaps) <= 1.03


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("latency", LATENCIES)
def test_the_gap_when_costs_turn_out_otherwise(latency: float, seed: int | None) -> None:
    gaps = []
    for ratio, share in HARD:
        trace, plan = transformer(ratio, seed), planned(ratio, share, latency, seed)
        for number in range(10):
            true_trace, true_costs = turned_out(trace, Costs(RATE, latency, SEEN), number)
            gaps.append(gap(plan, true_trace, true_costs, share))
    assert fmean(gaps) <= 1.06
    assert max(gaps) <= 1.12


@pytest.mark.parametrize("latency", LATENCIES)
def test_the_gap_on_uneven_blocks(latency: float) -> None:
    gaps = [
        gap(planned(ratio, share, latency, 1), transformer(ratio, 1), Costs(RATE, latency, SEEN), share)
        for ratio, share in HARD
    ]
    assert max(gaps) <= 1.12
    assert fmean(gaps) <= 1.04


@pytest.mark.parametrize(
    ("ratio", "share", "latency", "milliseconds"),
    [
        (0.5, 0.29, 2e-6, 11.06),
        (1.0, 0.29, 2e-6, 12.35),
        (2.0, 0.29, 2e-6, 19.50),
        (0.5, 0.54, 2e-6, 7.57),
        (1.0, 0.54, 2e-6, 10.07),
        (2.0, 0.54, 2e-6, 19.48),
        (0.5, 0.29, 0.2e-6, 7.50),
    ],
)
def test_faster_than_hand_picked_residents(ratio: float, share: float, latency: float, milliseconds: float) -> None:
    """cache-dit's layerwise offload with 60 and 120 modules kept by hand takes so long, with a little more memory."""
    took = seconds(planned(ratio, share, latency), transformer(ratio), Costs(RATE, latency, SEEN))
    assert 1e3 * took < milliseconds


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_residents_and_window_keep_to_the_memory(share: float) -> None:
    trace, plan = transformer(0.5), planned(0.5, share, 2e-6)
    page = choose_page_bytes(trace.num_bytes)
    resident = num_pages(sum(trace.sizes[p] for p in plan.resident), page) * page
    assert resident + plan.window_bytes <= share * trace.num_bytes


def test_copies_are_few_where_each_is_dear() -> None:
    """Where a load costs as much as 200 KB, as from a disk, units are larger than where it costs 3 KB."""
    trace = transformer(0.5)
    limits = Limits(int(0.25 * trace.num_bytes), choose_page_bytes(trace.num_bytes))
    dear = policies.get("overlap_async")(trace, limits, Costs(RATE, 200e-3 / (RATE / 1e6)))
    assert len(dear.units) < 0.7 * len(planned(0.5, 0.25, 0.2e-6).units)
