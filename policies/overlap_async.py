"""The planned overlap: as many spread residents as fit, and a window that is filled as soon as it has room.

Unit size, window and spacing are chosen by simulating the trace, not by a rule: the best rule of one case costs half
as much again in another.  The search tries unit sizes with windows, then other spacings for the best of them, then
changes the best in single places.  It judges by how a draft fares when costs are somewhat off, so that what would work
only to the microsecond is not taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from fmstream.core.climb import GOOD_ENOUGH, improve
from fmstream.core.drafts import COMPUTE_TIE, SPACINGS, TIE, Choice, Draft, Drawing, all_resident
from fmstream.core.outlook import Outlook
from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.policy import register
from fmstream.core.trace import Trace

NAME = "overlap_async"
WINDOW_UNITS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
"""Windows to try, as multiples of the largest unit that they are for."""
WINDOW_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Windows to try, as shares of the memory that the kept parameters leave."""
NEAR = 0.02
"""Drafts of the first round that are within this share of the fastest are judged in all worlds."""
REFINED = 4
"""Choices whose spacing is varied in the second round."""
AMPLE = 2
"""Windows up to so many times one that is enough are tried: others only move more."""
CLIMBED = 2
"""Drafts that are improved in single places in the third."""
TIGHT = 8
"""Below so many times the largest group the memory may be worth more as a window than to keep small tensors in."""


@register(NAME)
def plan(trace: Trace, limits: Limits, costs: Costs) -> Plan:
    """The best plan found; it wraps from the last unit of a pass to the first of the next."""
    if (resident := all_resident(NAME, trace, limits)) is not None:
        return resident
    drawing = Drawing(trace, limits, costs, lookahead=limits.lookahead, wrap=limits.lookahead != 0)
    found = [_search(drawing)]
    is_late = found[0].draft.seconds > (1 + COMPUTE_TIE) * drawing.bound(0)
    if is_late and drawing.kept > limits.pinned and drawing.memory_pages < TIGHT * drawing.largest_pages(0):
        found.append(_search(replace(drawing, keep_small=False)))
    best = min(found, key=lambda each: each.score)
    return best.drawing.plan(NAME, best.draft)


class _Found(NamedTuple):
    score: float
    drawing: Drawing
    draft: Draft


def _search(drawing: Drawing) -> _Found:
    """The best draft of a drawing."""
    outlook = Outlook(drawing)
    drawn = _draw(drawing, _choices(drawing))
    fast = (1 + NEAR) * min(draft.seconds for draft in drawn.values())
    scores = {choice: outlook.draft_score(draft) for choice, draft in drawn.items() if draft.seconds <= fast}
    variants = _draw(drawing, _respaced(sorted(scores, key=lambda choice: (scores[choice], choice))[:REFINED]))
    scores |= {choice: outlook.draft_score(draft) for choice, draft in variants.items()}
    drawn |= variants
    best = [drawn[choice] for choice in sorted(scores, key=lambda choice: (scores[choice], choice))]
    if drawing.limits.unit_bytes is None:
        climbed = [improve(drawing, outlook, draft) for draft in best[:CLIMBED]]
        best = sorted(climbed, key=outlook.draft_score)
    draft = outlook.ending(best[0])
    return _Found(outlook.draft_score(draft, shared=drawing.costs.shared), drawing, draft)


def _choices(drawing: Drawing) -> list[Choice]:
    """Unit sizes with windows, each in the two ways that differ most."""
    return [
        Choice(target, window, spacing, whole_units)
        for target in drawing.targets()
        for window in _windows(drawing, target)
        for spacing, whole_units in ((0, True), (1, False))
    ]


def _windows(drawing: Drawing, target_bytes: int) -> list[int]:
    """Windows in pages to try with units of that size."""
    caps, room = drawing.caps(target_bytes), drawing.room_pages
    wanted = {round(cap * units) for cap in caps for units in WINDOW_UNITS}
    wanted |= {int(room * share) for share in WINDOW_SHARES}
    return sorted(window for window in wanted if min(caps) <= window <= room)


def _respaced(choices: Iterable[Choice]) -> list[Choice]:
    """The choices with every spacing."""
    return [
        choice._replace(spacing=spacing, whole_units=whole_units)
        for choice in choices
        for spacing in range(len(SPACINGS))
        for whole_units in (False, True)
    ]


def _draw(drawing: Drawing, choices: Iterable[Choice]) -> dict[Choice, Draft]:
    """Draw the choices, those with the lowest bound and the smallest window first, while they can still win.

    Once a window is enough for compute alone to set the pace, none above `AMPLE` times that one is drawn.
    """
    drawn, best = dict[Choice, Draft](), float("inf")
    enough, free = drawing.room_pages, drawing.trace.seconds * (1 + GOOD_ENOUGH)
    for choice in sorted(choices, key=lambda choice: (drawing.bound(choice.window_pages), choice.window_pages)):
        if best * (1 + TIE) < drawing.bound(choice.window_pages) or choice.window_pages > AMPLE * enough:
            break
        if (draft := drawing.draw(choice)) is not None:
            drawn[choice] = draft
            best = min(best, draft.seconds)
            if draft.seconds <= free:
                enough = min(enough, choice.window_pages)
    return drawn
