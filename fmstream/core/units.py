"""From a trace to groups that cannot be divided, and from groups to units of a useful size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fmstream.core.arena import num_pages
from fmstream.core.plan import Limits, Unit
from fmstream.core.trace import Trace
from fmstream.errors import MemoryBudgetError

SMALL_BYTES = 64 << 10
"""A tensor up to this size may stay resident as small: a copy of its own would cost more than its bytes."""
SMALL_SHARE = 0.05
"""Share of the memory that small tensors may take."""
ATOMIC_SHARE = 0.25
"""Share of the memory up to which a call and the calls inside it are streamed as one."""

OUTER_SHARE = 1 / 32
"""What a call binds itself is little if it is at most this share of what it and the calls inside it bind."""


class Group(NamedTuple):
    """A run of calls that arrives as a whole: streamed parameters in order of use, and when they are in use.

    ``first`` and ``last`` are indices of calls; ``start`` and ``end`` are seconds on the compute clock.
    """

    first: int
    last: int
    params: tuple[int, ...]
    num_bytes: int
    start: float
    end: float


class Cut(NamedTuple):
    """A trace cut as finely as it can be: groups in call order, and the parameters that are resident in any plan."""

    groups: list[Group]
    resident: frozenset[int]


def small_params(trace: Trace, limits: Limits) -> frozenset[int]:
    """The smallest parameters of the pass, each up to 64 KiB, together up to 5 % of the memory."""
    left = int(SMALL_SHARE * limits.memory_bytes)
    small = set()
    for param in sorted(trace.params, key=lambda p: (trace.sizes[p], p)):
        left -= trace.sizes[param]
        if trace.sizes[param] > SMALL_BYTES or left < 0:
            break
        small.add(param)
    return frozenset(small)


def cut(trace: Trace, limits: Limits, *, keep_small: bool = True) -> Cut:
    """Cut a trace into groups.

    Small parameters (with ``keep_small``) and pinned ones are resident.  A call with calls inside is one group with
    them if their parameters fit a quarter of the memory.  Else, or where it binds little itself beside them (a block
    with a table of its own), that is resident and its inner calls are cut on their own.

    Raises:
        MemoryBudgetError: the residents and the largest group do not fit, even with no small tensor resident.
    """
    needed = 0
    for small in [small_params(trace, limits)] * keep_small + [frozenset[int]()]:
        result = _cut(trace, limits, small | limits.pinned)
        pages = [num_pages(group.num_bytes, limits.page_bytes) for group in result.groups]
        needed = num_pages(sum(trace.sizes[p] for p in result.resident), limits.page_bytes) + max(pages, default=0)
        if needed <= limits.memory_bytes // limits.page_bytes:
            return result
    raise MemoryBudgetError(
        f"streaming needs {needed * limits.page_bytes} bytes of fast memory (residents and the largest module), "
        f"memory is {limits.memory_bytes} bytes: give at least that much"
    )


def _cut(trace: Trace, limits: Limits, resident: frozenset[int]) -> Cut:
    last_inside = _last_inside(trace)
    kept = set(resident)
    most_kept = sum(trace.sizes[p] for p in resident) + int(SMALL_SHARE * limits.memory_bytes)
    while True:
        before = len(kept)
        groups = _walk(trace, last_inside, kept, int(ATOMIC_SHARE * limits.memory_bytes), most_kept)
        if len(kept) == before:  # no parameter of a group already made was kept later on
            return Cut(groups, frozenset(kept))


def _last_inside(trace: Trace) -> list[int]:
    """For each call the last call inside it, or itself."""
    last = list(range(len(trace.calls)))
    for index in range(len(last) - 1, -1, -1):
        parent = trace.calls[index].parent
        if parent >= 0:
            last[parent] = max(last[parent], last[index])
    return last


def _walk(trace: Trace, last_inside: Sequence[int], kept: set[int], atomic_bytes: int, most_kept: int) -> list[Group]:
    """One walk over the calls; adds to ``kept`` what an outer call binds and does not stream with its inner calls.

    What is little is kept for as long as no more than ``most_kept`` bytes are.
    """
    calls, sizes = trace.calls, trace.sizes
    kept_bytes = sum(sizes[p] for p in kept)
    groups = []
    index = 0
    while index < len(calls):
        call, last = calls[index], last_inside[index]
        own = dict.fromkeys(p for p in call.params if p not in kept)
        if own and last > index:
            inside = dict.fromkeys(p for c in calls[index : last + 1] for p in c.params if p not in kept)
            num_bytes, own_bytes = sum(sizes[p] for p in inside), sum(sizes[p] for p in own)
            is_little = own_bytes <= OUTER_SHARE * num_bytes and kept_bytes + own_bytes <= most_kept
            if num_bytes > atomic_bytes or is_little:
                kept.update(own)
                kept_bytes += own_bytes
                index += 1
                continue
            own = inside
        else:
            last = index
        if own:
            groups.append(Group(index, last, tuple(own), sum(sizes[p] for p in own), call.start, call.end))
        index = last + 1
    return groups


def strip(groups: Iterable[Group], resident: frozenset[int], sizes: Sequence[int]) -> list[Group]:
    """The groups without the parameters in ``resident``; groups that stream nothing are left out."""
    stripped = []
    for group in groups:
        if resident.isdisjoint(group.params):
            stripped.append(group)
            continue
        params = tuple(p for p in group.params if p not in resident)
        if params:
            stripped.append(group._replace(params=params, num_bytes=sum(sizes[p] for p in params)))
    return stripped


def merge(groups: Sequence[Group], target_bytes: int, sizes: Sequence[int]) -> list[Group]:
    """Join consecutive groups until each has ``target_bytes``; a parameter counts once in a merged group."""
    if target_bytes <= 0:
        return list(groups)
    merged = []
    first = 0
    while first < len(groups):
        last, num_bytes = first, groups[first].num_bytes
        params = groups[first].params
        if num_bytes < target_bytes and last + 1 < len(groups):
            distinct = dict.fromkeys(params)
            while num_bytes < target_bytes and last + 1 < len(groups):
                last += 1
                for param in groups[last].params:
                    if param not in distinct:
                        distinct[param] = None
                        num_bytes += sizes[param]
            params = tuple(distinct)
        head, tail = groups[first], groups[last]
        merged.append(Group(head.first, tail.last, params, num_bytes, head.start, tail.end))
        first = last + 1
    return merged


def join(groups: Sequence[Group], sizes: Sequence[int]) -> Group:
    """Consecutive groups as one; a parameter counts once."""
    params = tuple(dict.fromkeys(param for group in groups for param in group.params))
    head, tail = groups[0], groups[-1]
    return Group(head.first, tail.last, params, sum(sizes[p] for p in params), head.start, tail.end)


def as_units(groups: Iterable[Group]) -> tuple[Unit, ...]:
    """Groups as the units of a plan."""
    return tuple(Unit(g.first, g.last, g.params, g.num_bytes) for g in groups)


def closing_call(trace: Trace, unit: Unit) -> int:
    """Index of the call whose end is the end of the unit: of those that bind its parameters, the one that ends last.

    It is not always ``unit.last``: an outer call ends after the calls inside it.
    """
    params = set(unit.params)
    closing = unit.last
    while params.isdisjoint(trace.calls[closing].params):
        closing -= 1
    # Calls nest: only those around the last one that began can end after it.
    around = trace.calls[closing].parent
    while around >= unit.first:
        if not params.isdisjoint(trace.calls[around].params):
            closing = around
        around = trace.calls[around].parent
    return closing
