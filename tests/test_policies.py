from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmstream import policies
from fmstream.core.arena import choose_page_bytes, num_pages
from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.policy import register
from fmstream.core.simulate import simulate
from fmstream.core.trace import Trace
from fmstream.errors import ConfigError, MemoryBudgetError
from tests.traces import blocks, flat, traces

RATE = 13e9
MIB = 1 << 20
ALL = ("one_ahead", "overlap_async", "sync")


def plan(policy: str, trace: Trace, share: float, latency: float = 2e-6, **others: object) -> Plan:
    """A plan for ``share`` of the trace's bytes."""
    limits = Limits(int(share * trace.num_bytes), choose_page_bytes(trace.num_bytes))
    return policies.get(policy)(trace, dataclasses.replace(limits, **others), Costs(RATE, latency))


def ideal(trace: Trace, share: float) -> float:
    """What no plan can beat: compute, or the bytes that the memory does not hold over the link."""
    return max(trace.seconds, (1 - share) * trace.num_bytes / RATE)


def equal_blocks(compute_to_link: float) -> Trace:
    probe = blocks(1.0)
    return blocks(compute_to_link * probe.num_bytes / RATE)


def test_names_are_found_lazily() -> None:
    assert policies.names() == ALL
    code = "import sys, fmstream.core.policy, fmstream.core.drafts; sys.exit('fmstream.policies' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_lists_the_names_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'overlap_asink' is not known; did you mean 'overlap_async'"):
        policies.get("overlap_asink")
    with pytest.raises(ConfigError, match=r"'zzz' is not known .*one_ahead, overlap_async, sync"):
        policies.get("zzz")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(AssertionError, match="two policies are named 'sync'"):
        register("sync")(policies.get("sync"))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
@pytest.mark.parametrize(("ratio", "gap"), [(0.5, 1.2), (1.0, 1.10), (2.0, 1.02)])
@pytest.mark.parametrize("latency", [2e-6, 10e-6])
def test_overlap_comes_near_the_bound_on_equal_blocks(share: float, ratio: float, gap: float, latency: float) -> None:
    trace = equal_blocks(ratio)
    made = plan("overlap_async", trace, share, latency)
    assert made.predicted.seconds <= gap * ideal(trace, share)


def test_overlap_beats_one_ahead_and_on_demand() -> None:
    trace = equal_blocks(0.5)
    seconds = {name: plan(name, trace, 0.5).predicted.seconds for name in ALL}
    assert 1.7 * seconds["overlap_async"] < min(seconds["one_ahead"], seconds["sync"])


def test_on_demand_costs_the_sum() -> None:
    trace = equal_blocks(1.0)
    predicted = plan("sync", trace, 0.5).predicted
    assert predicted.seconds == pytest.approx(predicted.compute + predicted.link)


def test_compute_bound_plans_stream_within_the_compute() -> None:
    predicted = plan("overlap_async", equal_blocks(2.0), 0.25).predicted
    assert predicted.regime == "compute-bound"
    assert predicted.bound == predicted.compute
    assert plan("overlap_async", equal_blocks(0.5), 0.25).predicted.regime == "link-bound"


@pytest.mark.parametrize("policy", ["overlap_async", "sync"])
def test_all_fits_means_nothing_is_streamed(policy: str) -> None:
    trace = equal_blocks(1.0)
    made = plan(policy, trace, 1.0)
    assert (made.units, made.window_bytes, made.resident) == ((), 0, trace.params)
    assert made.predicted.regime == "resident"
    assert made.predicted.seconds == made.predicted.bound == trace.seconds
    assert plan(policy, trace, 0.999).units


def test_one_ahead_keeps_nothing_large_and_a_window_of_two_units() -> None:
    trace = equal_blocks(1.0)
    made = plan("one_ahead", trace, 2.0)
    assert not made.resident
    assert {p for unit in made.units for p in unit.params} == trace.params
    page = choose_page_bytes(trace.num_bytes)
    assert made.window_bytes == 2 * page * max(num_pages(unit.num_bytes, page) for unit in made.units)


def test_one_ahead_with_only_small_parameters_streams_nothing() -> None:
    made = policies.get("one_ahead")(flat([64] * 4, [1.0] * 4), Limits(MIB, 64), Costs(RATE))
    assert (made.units, made.window_bytes, made.predicted.regime) == ((), 0, "resident")


def test_pinned_parameters_are_resident_in_every_policy() -> None:
    pinned = frozenset({3, 17})
    for name in ALL:
        made = plan(name, equal_blocks(1.0), 0.3, pinned=pinned)
        assert pinned <= made.resident


def test_a_unit_size_asked_for_is_kept_to() -> None:
    made = plan("overlap_async", equal_blocks(1.0), 0.3, unit_bytes=4 * MIB)
    sizes = [unit.num_bytes for unit in made.units[:-1]]
    assert 2.5 * MIB < sum(sizes) / len(sizes) < 6 * MIB
    assert all(size < 5 * MIB for size in sizes)


@pytest.mark.parametrize(("lookahead", "wrap"), [(None, True), (2, True), (0, False)])
def test_a_lookahead_asked_for_is_in_the_plan(lookahead: int | None, wrap: bool) -> None:
    made = plan("overlap_async", equal_blocks(1.0), 0.3, lookahead=lookahead)
    assert (made.lookahead, made.wrap) == (lookahead, wrap)


@pytest.mark.parametrize("policy", ALL)
def test_too_little_memory_is_refused_with_the_need(policy: str) -> None:
    trace = flat([64, 10 * MIB, 64], [1.0] * 3)
    limits = Limits(10 * MIB - 64, 64)
    with pytest.raises(MemoryBudgetError, match=rf"needs {10 * MIB} bytes.*memory is {10 * MIB - 64} bytes"):
        policies.get(policy)(trace, limits, Costs(RATE))


def test_time_between_passes_counts_for_plans_that_wrap() -> None:
    base = equal_blocks(0.5)
    trace = dataclasses.replace(base, between=0.2 * base.seconds)
    predicted = plan("overlap_async", trace, 0.25).predicted
    assert predicted.bound == pytest.approx(predicted.link - trace.between)
    assert predicted.seconds >= predicted.bound * (1 - 1e-9)
    one_ahead = plan("one_ahead", trace, 0.25).predicted
    assert one_ahead.bound == one_ahead.link


def test_a_thousand_uneven_calls() -> None:
    """Large weights where the compute is short, and the reverse: the shape of a U-Net."""
    sizes = [64 * (1 + (i * 7919) % 4096) * (1 + abs(500 - i) // 100) for i in range(1000)]
    sizes.reverse()
    durations = [1e-5 * (1 + (i * 104729) % 10) * (1 + abs(500 - i) / 100) for i in range(1000)]
    trace = flat(sizes, durations)
    made = plan("overlap_async", trace, 0.5, latency=5e-6)
    assert len(made.units) <= 384
    assert made.predicted.seconds <= 1.3 * ideal(trace, 0.5)


@settings(max_examples=150, deadline=None)
@given(
    trace=traces(),
    share=st.floats(0.05, 1.1),
    page_bytes=st.sampled_from([64, 1024, 16384]),
    policy=st.sampled_from(ALL),
    unit_bytes=st.sampled_from([None, 1, 50_000, 1 << 30]),
    lookahead=st.sampled_from([None, 0, 1, 5]),
    pin=st.booleans(),
)
def test_every_plan_is_sound(
    trace: Trace,
    share: float,
    page_bytes: int,
    policy: str,
    unit_bytes: int | None,
    lookahead: int | None,
    pin: bool,
) -> None:
    pinned = frozenset([min(trace.params)]) if pin else frozenset[int]()
    limits = Limits(int(share * trace.num_bytes), page_bytes, pinned, lookahead, unit_bytes)
    costs = Costs(1e6, 1e-4)
    try:
        made = policies.get(policy)(trace, limits, costs)
    except MemoryBudgetError:
        assert share < 1.0 or page_bytes > 64
        return
    sizes = trace.sizes
    resident_bytes = sum(sizes[p] for p in made.resident)

    assert made.window_bytes % page_bytes == 0
    assert num_pages(resident_bytes, page_bytes) * page_bytes + made.window_bytes <= limits.memory_bytes
    assert pinned <= made.resident
    assert bool(made.window_bytes) == bool(made.units)

    for unit in made.units:
        assert num_pages(unit.num_bytes, page_bytes) * page_bytes <= made.window_bytes
        assert unit.num_bytes == sum(sizes[p] for p in unit.params)
        assert len(set(unit.params)) == len(unit.params) > 0
        assert made.resident.isdisjoint(unit.params)
        assert 0 <= unit.first <= unit.last < len(trace.calls)
    assert all(a.last < b.first for a, b in pairwise(made.units))
    for index, call in enumerate(trace.calls):
        covering = [unit.params for unit in made.units if unit.first <= index <= unit.last]
        assert set(call.params) <= made.resident.union(*covering)

    assert made.streamed_bytes + resident_bytes >= trace.num_bytes
    again = simulate(
        trace,
        made.units,
        window_bytes=made.window_bytes,
        page_bytes=page_bytes,
        costs=costs,
        lookahead=made.lookahead,
        wrap=made.wrap,
    )
    assert again == pytest.approx(made.predicted.seconds)
    assert made == policies.get(policy)(trace, limits, costs), "a policy is a pure function"


@pytest.mark.parametrize("share", [0.3, 0.5, 0.75])
def test_a_module_much_larger_than_the_others_stays_where_the_link_bounds(share: float) -> None:
    """Language models begin and end with one: a window that holds it would be lost to residents."""
    layers = [MIB] * 60
    sizes = [10 * MIB, *layers, 10 * MIB]
    seconds = 0.05 * sum(sizes) / RATE
    trace = flat(sizes, [seconds * size / sum(sizes) for size in sizes])
    made = plan("overlap_async", trace, share)
    assert {0, len(sizes) - 1} <= made.resident
    assert made.window_bytes <= 5 * MIB
    assert made.predicted.seconds <= ideal(trace, share) + 4 * MIB / RATE
