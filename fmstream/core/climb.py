"""Local improvement of a draft: units are joined and divided, residents exchanged, for as long as its score falls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fmstream.core.drafts import Draft, Drawing
from fmstream.core.outlook import Outlook
from fmstream.core.units import join, strip

MOST_TRIALS = 1200
"""Changes that are tried at most."""
LEAST_GAIN = 1e-6
"""A change is kept if it lowers the score by more than this,"""
SWEEP_GAIN = 1e-4
"""and another sweep is made if the last one lowered it by more than this."""
GOOD_ENOUGH = 0.002
"""A draft whose passes last no longer than their bounds by more than this share is left as it is."""

Change = tuple[int, tuple[int, ...]]
"""A cut to make or to undo (-1: none), and the groups that exchange fast memory for the link, or the reverse."""


class Climb:
    """A draft in pieces: which parameters are resident, and before which groups a unit begins.

    A group moves as a whole, and only if no other one uses its parameters.
    """

    def __init__(self, drawing: Drawing, outlook: Outlook, draft: Draft) -> None:
        self.drawing = drawing
        self.outlook = outlook
        groups, sizes = drawing.groups, drawing.trace.sizes
        used = Counter(param for group in groups for param in group.params)
        self._sizes = np.array(sizes, np.int64)
        self._flat = np.array([param for group in groups for param in group.params], np.int64)
        self._offsets = np.cumsum([0, *(len(group.params) for group in groups[:-1])])
        self._own = [all(used[param] == 1 for param in group.params) for group in groups]
        self._params = [list(group.params) for group in groups]
        self._starts = outlook.times(np.array([group.start for group in groups], np.float64))
        self._ends = outlook.times(np.array([group.end for group in groups], np.float64))
        self.resident = np.zeros(len(sizes), np.bool_)
        self.resident[sorted(draft.resident)] = True
        heads = {group.first for group in draft.groups}
        self.cuts = np.array([group.first in heads for group in groups], np.bool_)
        self.trials = 0
        self.best = self.score()

    def score(self) -> float:
        """The outlook's score of the present pieces; infinite where they do not fit the memory."""
        streamed = self._streamed()
        used = np.flatnonzero(streamed)
        heads = np.flatnonzero(np.diff(np.cumsum(self.cuts)[used], prepend=-1))
        num_bytes = np.add.reduceat(streamed[used], heads) if len(heads) else streamed[:0]
        drawing = self.drawing
        window = drawing.memory_pages - drawing.pages(int(self._sizes[self.resident].sum()))
        if drawing.pages(int(num_bytes.max(initial=0))) > window:
            return float("inf")
        firsts, lasts = used[heads], used[np.append(heads[1:], len(used))[: len(heads)] - 1]
        return self.outlook.score(
            [times[firsts] for times in self._starts], [times[lasts] for times in self._ends], num_bytes, window
        )

    def _streamed(self) -> NDArray[np.int64]:
        """Bytes that each group streams."""
        return np.add.reduceat(np.where(self.resident[self._flat], 0, self._sizes[self._flat]), self._offsets)

    def sweep(self) -> float:
        """Try every change once; how much the score fell."""
        before = self.best
        for change in self._changes():
            if self.trials >= MOST_TRIALS:
                break
            self._try(change)
        return before - self.best

    def _try(self, change: Change) -> None:
        self.trials += 1
        self._apply(change)
        score = self.score()
        if score < self.best - LEAST_GAIN:
            self.best = score
        else:
            self._apply(change)

    def _apply(self, change: Change) -> None:
        """Make a change, or undo the one just made."""
        cut, exchanged = change
        if cut >= 0:
            self.cuts[cut] ^= True
        for group in exchanged:
            self.resident[self._params[group]] ^= True

    def _changes(self) -> Iterator[Change]:
        """Cuts first, then residents: each with its streamed neighbours, and alone."""
        for group in np.flatnonzero(self._streamed())[1:]:
            yield int(group), ()
        for group in range(len(self._own)):
            if self._is_resident(group):
                yield from ((-1, (group, other)) for other in self._neighbours(group))
            if self._is_resident(group) or self._is_streamed(group):
                yield -1, (group,)

    def _is_resident(self, group: int) -> bool:
        return self._own[group] and bool(self.resident[self._params[group]].all())

    def _is_streamed(self, group: int) -> bool:
        return self._own[group] and not self.resident[self._params[group]].any()

    def _neighbours(self, group: int) -> list[int]:
        """The nearest groups before and behind that stream all they use, and share none of it."""
        behind, before = range(group + 1, len(self._own)), range(group - 1, -1, -1)
        nearest = (next(filter(self._is_streamed, side), -1) for side in (before, behind))
        return [other for other in nearest if other >= 0]

    def draft(self) -> Draft | None:
        """The present pieces as a draft."""
        drawing, sizes = self.drawing, self.drawing.trace.sizes
        resident = frozenset(np.flatnonzero(self.resident).tolist())
        pieces = np.split(np.arange(len(self.cuts)), np.flatnonzero(self.cuts))
        stripped = (strip([drawing.groups[i] for i in piece], resident, sizes) for piece in pieces)
        groups = [join(unit, sizes) for unit in stripped if unit]
        window = drawing.memory_pages - drawing.pages(sum(sizes[p] for p in resident))
        return drawing.settle(resident, groups, window)


def improve(drawing: Drawing, outlook: Outlook, draft: Draft) -> Draft:
    """The best draft that a climb from ``draft`` finds, or itself."""
    late = outlook.draft_score(draft) - outlook.drag(draft.streamed_bytes) - 1
    if not draft.groups or late < GOOD_ENOUGH:
        return draft
    climb = Climb(drawing, outlook, draft)
    while climb.sweep() > SWEEP_GAIN and climb.trials < MOST_TRIALS:
        pass
    better = climb.draft()
    return draft if better is None or outlook.draft_score(better) >= outlook.draft_score(draft) else better
