"""Drafts of a plan: one choice of unit size, window and spacing each, carried out and simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fmstream.core.arena import num_pages
from fmstream.core.plan import Costs, Limits, Plan, Prediction
from fmstream.core.simulate import load_seconds, play, uses_of
from fmstream.core.spread import byte_weights, mixed_weights, spread, time_weights
from fmstream.core.trace import Trace
from fmstream.core.units import Group, as_units, cut, merge, strip

SPACINGS = (byte_weights, time_weights, mixed_weights)
FINEST = 768
"""Units into which a pass is cut at most: finer ones cost planning time and gain nothing."""
TIE = 0.005
"""Drafts whose times differ by less than this share count as equally fast,"""
COMPUTE_TIE = 0.02
"""and so do those that are within this share of computing alone: each byte that they move costs memory bandwidth."""
LARGE_SHARE = 0.9
"""Share of the memory that the largest units may take as residents, so that the window need not hold them,"""
CAP_STEP = 0.8
"""where the next ones are smaller than this share of them,"""
MOST_CAPS = 2
"""so many times."""
SHARES = tuple(8 * 2 ** (step / 3) for step in range(19))
"""Unit sizes to try, as parts of the bytes that could be streamed: from an eighth down, three steps to a half."""


class Choice(NamedTuple):
    """What a draft is made from.

    ``spacing`` is an index into `SPACINGS`; with ``whole_units`` residents are chosen unit by unit, else group by group
    and what is left is then merged into units.
    """

    target_bytes: int
    window_pages: int
    spacing: int = 0
    whole_units: bool = False


class Draft(NamedTuple):
    """A plan in the making; ``groups`` are its units."""

    seconds: float
    resident: frozenset[int]
    groups: list[Group]
    window_pages: int
    across: int | None = None

    @property
    def streamed_bytes(self) -> int:
        """Bytes that cross the link in one pass."""
        return sum(group.num_bytes for group in self.groups)


@dataclass
class Drawing:
    """The table at which a policy draws: a trace cut into groups, and the way in which units are to be issued.

    Raises `MemoryBudgetError` when the memory does not hold the parameters that must be resident and one group.
    """

    trace: Trace
    limits: Limits
    costs: Costs
    lookahead: int | None
    wrap: bool
    keep_small: bool = True
    groups: list[Group] = field(init=False)
    kept: frozenset[int] = field(init=False)
    _chunks: dict[int, list[Group]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        groups, self.kept = cut(self.trace, self.limits, keep_small=self.keep_small)
        self.memory_pages = self.limits.memory_bytes // self.limits.page_bytes
        self.kept_bytes = sum(self.trace.sizes[p] for p in self.kept)
        self.room_pages = self.memory_pages - self.pages(self.kept_bytes)
        """Pages for the window and the residents that may be chosen."""
        self.groups = self._coarser(groups) if len(groups) > FINEST else groups
        self.group_bytes = sum(group.num_bytes for group in self.groups)
        self.most_uses = max(Counter(p for group in self.groups for p in group.params).values(), default=0)

    def _coarser(self, groups: list[Group]) -> list[Group]:
        merged = merge(groups, sum(group.num_bytes for group in groups) // FINEST, self.trace.sizes)
        fits = self.pages(max(group.num_bytes for group in merged)) <= self.room_pages
        return merged if fits else groups

    def pages(self, num_bytes: int) -> int:
        """Whole pages that hold ``num_bytes``."""
        return num_pages(num_bytes, self.limits.page_bytes)

    def targets(self) -> list[int]:
        """Unit sizes that are worth trying: those whose units fit the memory and differ, finest first."""
        wanted = [0, *(int(self.group_bytes / share) for share in SHARES)]
        if self.limits.unit_bytes is not None:
            wanted = [self.limits.unit_bytes]
        fitting = [target for target in wanted if self.largest_pages(target) <= self.room_pages]
        distinct = {tuple(group.last for group in self.chunks(target)): target for target in reversed(fitting)}
        return sorted(distinct.values()) or [0]  # single groups always fit

    def chunks(self, target_bytes: int) -> list[Group]:
        """All groups, merged up to ``target_bytes``."""
        if target_bytes not in self._chunks:
            self._chunks[target_bytes] = merge(self.groups, target_bytes, self.trace.sizes)
        return self._chunks[target_bytes]

    def largest_pages(self, target_bytes: int) -> int:
        """Pages of the largest unit where nothing but the kept parameters is resident."""
        return self.pages(max((group.num_bytes for group in self.chunks(target_bytes)), default=0))

    def caps(self, target_bytes: int) -> list[int]:
        """Pages of units that a window may be made for, largest first; the few that are larger stay resident then.

        Some models have one module that is many times as large as the others, and used once.
        """
        units = sorted((self.pages(group.num_bytes) for group in self.chunks(target_bytes)), reverse=True)
        caps, larger = units[:1], 0
        for before, pages in pairwise(units):
            larger += before
            if larger > LARGE_SHARE * self.room_pages or len(caps) > MOST_CAPS:
                break
            if pages < CAP_STEP * caps[-1]:
                caps.append(pages)
        return caps

    def draw(self, choice: Choice) -> Draft | None:
        """Carry out a choice; None where a unit came out larger than the window.

        What is larger than the window to begin with is resident.
        """
        sizes, trace = self.trace.sizes, self.trace
        page_bytes = self.limits.page_bytes
        source = self.chunks(choice.target_bytes) if choice.whole_units else self.groups
        too_large = frozenset(
            p for group in source if self.pages(group.num_bytes) > choice.window_pages for p in group.params
        )
        source = strip(source, too_large, sizes)
        room = (self.memory_pages - choice.window_pages) * page_bytes - self.kept_bytes
        room -= sum(sizes[p] for p in too_large)
        if room < 0:
            return None
        weights = SPACINGS[choice.spacing](source, trace.seconds, trace.between)
        chosen = too_large | spread(source, sizes, room, weights)
        groups = strip(source, chosen, sizes)
        if not choice.whole_units:
            groups = merge(groups, choice.target_bytes, sizes)
        resident = self.kept | chosen
        # Pages that no resident could fill go to the window.
        window = self.memory_pages - self.pages(self.kept_bytes + sum(sizes[p] for p in chosen))
        return self.settle(resident, groups, window)

    def settle(self, resident: frozenset[int], groups: list[Group], window_pages: int) -> Draft | None:
        """Simulate residents and units; None where a unit is larger than the window."""
        if self.pages(max((group.num_bytes for group in groups), default=0)) > window_pages:
            return None
        return self.across(Draft(0.0, resident, groups, window_pages if groups else 0), None)

    def across(self, draft: Draft, number: int | None) -> Draft:
        """The draft with so many units issued before the pass that they belong to, simulated."""
        num_bytes = np.array([group.num_bytes for group in draft.groups], np.int64)
        starts = np.array([group.start for group in draft.groups], np.float64)
        ends = np.array([group.end for group in draft.groups], np.float64)
        trace, costs = self.trace, self.costs
        seconds = play(
            uses_of(starts, ends, num_bytes, self.limits.page_bytes, costs),
            draft.window_pages,
            trace.seconds,
            trace.between,
            costs.seen_seconds,
            self.lookahead,
            self.wrap,
            number,
        )
        return draft._replace(seconds=seconds, across=number)

    def least_moved(self, window_pages: int) -> int:
        """Bytes that every draft with a window of that size moves in a pass, at least."""
        room = (self.memory_pages - window_pages) * self.limits.page_bytes - self.kept_bytes
        return max(0, self.group_bytes - self.most_uses * room)

    def bound(self, window_pages: int) -> float:
        """Seconds that no draft with a window of that size can go below."""
        link = self.least_moved(window_pages) / self.costs.bytes_per_second
        return max(self.trace.seconds, link - (self.trace.between if self.wrap else 0.0))

    def plan(self, policy: str, draft: Draft) -> Plan:
        """A draft as the plan of ``policy``."""
        return Plan(
            policy=policy,
            resident=draft.resident,
            units=as_units(draft.groups),
            window_bytes=draft.window_pages * self.limits.page_bytes,
            lookahead=self.lookahead,
            wrap=self.wrap,
            predicted=predict(self.trace, draft, self.costs, self.wrap),
            across=draft.across,
        )


def fastest(drafts: Iterable[Draft | None], compute: float) -> Draft:
    """The fastest draft; of those that count as equally fast the one that streams least, then the smallest window.

    ``compute`` is the seconds that computing alone takes.
    """
    drawn = [draft for draft in drafts if draft is not None]
    limit = max(min(draft.seconds for draft in drawn) * (1 + TIE), compute * (1 + COMPUTE_TIE))
    near = [draft for draft in drawn if draft.seconds <= limit]
    return min(near, key=lambda draft: (draft.streamed_bytes, draft.window_pages, draft.seconds))


def predict(trace: Trace, draft: Draft, costs: Costs, wrap: bool) -> Prediction:
    """What to expect of a draft.

    In a steady state every pass brings all of its units over the link.  A plan that wraps may do so from the start of
    one pass to the start of the next, ``between`` seconds more than the pass lasts; any other must do so within the
    pass.  So no pass is shorter than max(compute, link - between), without ``between`` where the plan does not wrap.
    """
    link = sum(load_seconds(group.num_bytes, costs) for group in draft.groups)
    exposed = link - (trace.between if wrap else 0.0)
    regime = "resident" if not draft.groups else "compute-bound" if trace.seconds >= exposed else "link-bound"
    return Prediction(draft.seconds, trace.seconds, link, max(trace.seconds, exposed), regime)


def all_resident(policy: str, trace: Trace, limits: Limits) -> Plan | None:
    """The plan that streams nothing, or None where the memory does not hold every parameter."""
    resident = trace.params | limits.pinned
    if num_pages(sum(trace.sizes[p] for p in resident), limits.page_bytes) * limits.page_bytes > limits.memory_bytes:
        return None
    seconds = trace.seconds
    return Plan(policy, resident, (), 0, None, False, Prediction(seconds, seconds, 0.0, seconds, "resident"))
