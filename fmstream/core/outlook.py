"""How a way of streaming fares if link and compute turn out other than measured: plans at an edge lose here."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fmstream.core.drafts import Draft, Drawing
from fmstream.core.plan import Costs
from fmstream.core.simulate import play, uses_of

SPREAD = 0.15
"""Share by which a call's compute time may be off."""
FACTORS = ((1.0, 1.0), (0.87, 1.15), (0.95, 0.85), (1.05, 1.1), (1.15, 0.9))
"""Factors of the link's rate and of its latency in each world; in the first one all is as measured."""
MEASURED_WEIGHT = 0.5
"""Weight of the first world; the others share the rest."""
DRAG = 0.02
"""Share of the link's busy time that counts as lost: what moves takes memory bandwidth from compute."""
SEED = 7
ACROSS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Units that may be issued before their pass, where fewer than all that fit are tried;"""
ACROSS_GAIN = 1e-4
"""fewer are taken if they lower the score by more than this."""


class World(NamedTuple):
    """One way in which costs may turn out.

    ``clock`` is the measured compute clock at the outlook's knots, as it goes in this world; ``seconds`` is the
    compute time of a pass; ``bound`` is what no plan can go below: what the memory cannot hold when a pass begins has
    to come before it ends.
    """

    weight: float
    costs: Costs
    clock: NDArray[np.float64]
    seconds: float
    bound: float


class Outlook:
    """The worlds in which drafts of a drawing are judged; the same for the same drawing."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        trace = drawing.trace
        starts = [group.start for group in drawing.groups]
        self._knots = np.array([0.0, *starts, max(trace.seconds, *starts, 0.0)], np.float64)
        self.worlds = self._worlds()

    def _worlds(self) -> list[World]:
        drawing, costs = self.drawing, self.drawing.costs
        stretches, moved = np.diff(self._knots), drawing.least_moved(0)
        random = np.random.default_rng(SEED)
        worlds: list[World] = []
        for rate, latency in FACTORS:
            factors = random.uniform(1 - SPREAD, 1 + SPREAD, len(stretches)) if worlds else np.ones(len(stretches))
            clock = np.concatenate(([0.0], np.cumsum(stretches * factors)))
            turned = replace(
                costs,
                bytes_per_second=costs.bytes_per_second * rate,
                latency_seconds=costs.latency_seconds * latency,
            )
            weight = (1 - MEASURED_WEIGHT) / (len(FACTORS) - 1) if worlds else MEASURED_WEIGHT
            seconds = float(clock[-1])
            bound = max(seconds, moved / turned.bytes_per_second)
            worlds.append(World(weight, turned, clock, seconds, bound or 1.0))
        return worlds

    def times(self, measured: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Times on the measured compute clock as they are on that of each world."""
        return [np.interp(measured, self._knots, world.clock) for world in self.worlds]

    def draft_score(self, draft: Draft, *, shared: bool = False) -> float:
        """The score of a draft; ``shared``: as if what the user copies before a pass waited for the link."""
        starts = self.times(np.array([group.start for group in draft.groups], np.float64))
        ends = self.times(np.array([group.end for group in draft.groups], np.float64))
        num_bytes = np.array([group.num_bytes for group in draft.groups], np.int64)
        return self.score(starts, ends, num_bytes, draft.window_pages, draft.across, shared)

    def ending(self, draft: Draft) -> Draft:
        """The draft, with only so many units issued before their pass that what the user copies then waits little."""
        drawing, groups = self.drawing, draft.groups
        if not (drawing.costs.shared and drawing.wrap and groups):
            return draft
        fitting = draft.window_pages // max(1, drawing.pages(min(group.num_bytes for group in groups)))
        best, least = draft, self.draft_score(draft, shared=True)
        for number in reversed(ACROSS):
            if number >= min(len(groups), fitting):
                continue
            other = drawing.across(draft, number)
            score = self.draft_score(other, shared=True)
            if score < least - ACROSS_GAIN:
                best, least = other, score
        return best

    def score(
        self,
        starts: list[NDArray[np.float64]],
        ends: list[NDArray[np.float64]],
        num_bytes: NDArray[np.int64],
        window_pages: int,
        across: int | None = None,
        shared: bool = False,
    ) -> float:
        """Weighted mean over the worlds of a pass's time over its bound, and the drag of what moves; less is better.

        Args:
            starts, ends: for each world, when each unit is in use.
            num_bytes: bytes of each unit.
            window_pages: size of the window.
            across: units that are issued before their pass, None: all that fit.
            shared: whether a pass begins with a copy of the user's behind what was issued.
        """
        drawing, score = self.drawing, 0.0
        for world, begins, leaves in zip(self.worlds, starts, ends, strict=True):
            uses = uses_of(begins, leaves, num_bytes, drawing.limits.page_bytes, world.costs)
            between, seen = drawing.trace.between, world.costs.seen_seconds
            way = (drawing.lookahead, drawing.wrap, across, shared)
            seconds = play(uses, window_pages, world.seconds, between, seen, *way)
            score += world.weight * seconds / world.bound
        return score + self.drag(int(num_bytes.sum()))

    def drag(self, num_bytes: int) -> float:
        """What moving so many bytes in a pass adds to the score."""
        return DRAG * num_bytes / self.drawing.costs.bytes_per_second / self.worlds[0].bound
