from __future__ import annotations

import dataclasses

import pytest

from fmstream import policies
from fmstream.core.arena import choose_page_bytes
from fmstream.core.auto import least_memory
from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.trace import Trace
from fmstream.errors import MemoryBudgetError
from tests.traces import blocks, flat

RATE = 13e9
COSTS = Costs(RATE, 2e-6, 10e-6)
POLICY = policies.get("overlap_async")


def trace_of(compute_to_link: float) -> Trace:
    return blocks(compute_to_link * blocks(1.0, 16).num_bytes / RATE, 16)


def limits_of(trace: Trace, share: float) -> Limits:
    return Limits(int(share * trace.num_bytes), choose_page_bytes(trace.num_bytes))


def step(trace: Trace, memory_bytes: int) -> float:
    limits = dataclasses.replace(limits_of(trace, 1.0), memory_bytes=memory_bytes)
    return POLICY(trace, limits, COSTS).predicted.seconds


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_compute_bound_takes_the_least_that_is_free(ratio: float) -> None:
    trace = trace_of(ratio)
    limits = limits_of(trace, 0.9)
    least = least_memory(trace, limits, COSTS, POLICY)
    assert least % limits.page_bytes == 0
    assert step(trace, least) <= 1.005 * trace.seconds
    assert max(0.0, 1 - ratio) <= least / trace.num_bytes <= max(0.0, 1 - ratio) + 0.15
    less = int(least - 0.05 * trace.num_bytes)
    if ratio < 2:  # beyond that it is the largest module that asks for the memory
        assert step(trace, less) > 1.005 * trace.seconds


def test_link_bound_takes_all() -> None:
    trace = trace_of(0.2)
    limits = limits_of(trace, 0.4)
    assert least_memory(trace, limits, COSTS, POLICY) == limits.memory_bytes


def test_a_wider_tolerance_takes_less() -> None:
    trace = trace_of(0.5)
    limits = limits_of(trace, 0.9)
    assert least_memory(trace, limits, COSTS, POLICY, 0.2) < 0.9 * least_memory(trace, limits, COSTS, POLICY)


def test_time_between_passes_cannot_replace_memory() -> None:
    """What is not there when a pass begins has to come while it lasts, however long the pause before it was."""
    trace = dataclasses.replace(trace_of(0.5), between=1.0)
    assert 0.5 <= least_memory(trace, limits_of(trace, 0.9), COSTS, POLICY) / trace.num_bytes <= 0.65


def test_what_never_is_free_gets_as_near_as_all_the_memory() -> None:
    """On demand every load is waited for: the policy that does so is given all."""
    trace = trace_of(2.0)
    limits = limits_of(trace, 0.5)
    least = least_memory(trace, limits, COSTS, policies.get("sync"))
    full = policies.get("sync")(trace, limits, COSTS).predicted.seconds
    reduced = dataclasses.replace(limits, memory_bytes=least)
    assert policies.get("sync")(trace, reduced, COSTS).predicted.seconds <= full
    assert least >= 0.49 * trace.num_bytes


def test_where_no_plan_fits_it_says_so() -> None:
    with pytest.raises(MemoryBudgetError, match="streaming needs"):
        least_memory(flat([1 << 20] * 3, [1.0] * 3), Limits(1 << 19, 64), COSTS, POLICY)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("off", [0.8, 1.0, 1.3])
def test_what_was_the_least_before_makes_the_search_quick(ratio: float, off: float) -> None:
    trace = trace_of(ratio)
    limits = limits_of(trace, 0.9)
    memories: list[int] = []

    def counted(trace: Trace, limits: Limits, costs: Costs) -> Plan:
        memories.append(limits.memory_bytes)
        return POLICY(trace, limits, costs)

    least = least_memory(trace, limits, COSTS, POLICY)
    near = int(off * least) // limits.page_bytes * limits.page_bytes
    found = least_memory(trace, limits, COSTS, counted, near=near)
    assert found == pytest.approx(least, rel=0.05), "to two percent each, and plans are not quite monotonic"
    if off == 1.0:
        assert memories[1] == least
        assert len(memories) <= 4, "all the memory, the least before, and less than that"
