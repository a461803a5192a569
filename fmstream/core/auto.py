"""How much fast memory a pass can use: no more than keeps it at its compute time, or all where the link is slower."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.policy import Policy
from fmstream.core.trace import Trace
from fmstream.errors import MemoryBudgetError

TOLERANCE = 0.005
"""Share of its compute time by which a pass may last longer."""
PRECISION = 0.02
"""Share of itself to which the least memory is found."""


def least_memory(
    trace: Trace,
    limits: Limits,
    costs: Costs,
    policy: Policy,
    tolerance: float = TOLERANCE,
    near: int | None = None,
) -> int:
    """Bytes of fast memory that a pass can make use of, at most ``limits.memory_bytes``.

    Compute-bound: the least, in whole pages and to two percent, with which the policy's plan is
    predicted to last no longer than compute alone by more than ``tolerance`` (or than with all the memory, if that
    lasts longer).  Link-bound: all of it, for every byte that stays is one less to move.  The search is quick where
    the answer is ``near`` bytes, which an earlier one found.

    Raises `MemoryBudgetError` where not even all the memory suffices for a plan.
    """
    full = policy(trace, limits, costs).predicted
    allowed = trace.seconds * (1 + tolerance)
    if full.seconds > allowed and full.regime == "link-bound":
        return limits.memory_bytes
    allowed = max(allowed, full.seconds)
    low = _too_few_pages(trace, limits, costs, allowed)
    high = limits.memory_bytes // limits.page_bytes
    guess = before = -1 if near is None else near // limits.page_bytes
    while high - low > _step(high):
        middle = guess if low < guess < high else max(low + 1, isqrt(low * high))
        made = _plan(trace, replace(limits, memory_bytes=middle * limits.page_bytes), costs, policy)
        if made is not None and made.predicted.seconds <= allowed:
            high, guess = middle, middle - _step(middle) if middle == before else -1
        else:
            low, guess = middle, -1
    return high * limits.page_bytes


def _step(pages: int) -> int:
    """Pages to which the least is found."""
    return max(1, int(PRECISION * pages))


def _too_few_pages(trace: Trace, limits: Limits, costs: Costs, allowed: float) -> int:
    """Pages that do not hold the largest parameter, or with which what is not there would take longer than allowed."""
    moved = allowed * costs.bytes_per_second
    largest = max((trace.sizes[param] for param in trace.params), default=0)
    return max(0, int(max(trace.num_bytes - moved, largest) / limits.page_bytes) - 1)


def _plan(trace: Trace, limits: Limits, costs: Costs, policy: Policy) -> Plan | None:
    try:
        return policy(trace, limits, costs)
    except MemoryBudgetError:
        return None
