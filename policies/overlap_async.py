"""The planned overlap: as many spread residents as fit, and a window that is filled as soon as it has room.

Unit size, window and spacing are chosen by simulating the trace, not by a rule: the best rule of one case costs half
as much again in another.  The search first tries unit sizes with windows, the most promising first, then other
spacings for the best of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from fmstream.core.drafts import SPACINGS, TIE, Choice, Draft, Drawing, all_resident, fastest
from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.policy import register
from fmstream.core.trace import Trace

NAME = "overlap_async"
WINDOW_UNITS = (2.0, 3.0, 4.0, 6.0, 8.0)
"""Windows to try, as multiples of the largest unit."""
TIGHT_UNITS = (1.0, 1.5)
"""More to try where two units would take over a quarter of the memory: elsewhere they save little, forgive little."""
WINDOW_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Windows to try, as shares of the memory that the kept parameters leave."""
REFINED = 3
"""Choices of the first round whose spacing is varied in the second."""


@register(NAME)
def plan(trace: Trace, limits: Limits, costs: Costs) -> Plan:
    """The fastest plan found; it wraps from the last unit of a pass to the first of the next."""
    if (resident := all_resident(NAME, trace, limits)) is not None:
        return resident
    drawing = Drawing(trace, limits, costs, lookahead=limits.lookahead, wrap=limits.lookahead != 0)
    first = [Choice(target, window) for target in drawing.targets() for window in _windows(drawing, target)]
    drawn = _search(drawing, first, {})
    best = sorted((draft.seconds, choice) for choice, draft in drawn.items())[:REFINED]
    variants = [
        choice._replace(spacing=spacing, whole_units=whole_units)
        for _, choice in best
        for spacing in range(len(SPACINGS))
        for whole_units in (False, True)
    ]
    drawn = _search(drawing, variants, drawn)
    return drawing.plan(NAME, fastest(drawn.values(), trace.seconds))


def _windows(drawing: Drawing, target_bytes: int) -> list[int]:
    """Windows in pages to try with units of that size."""
    largest, room = drawing.largest_pages(target_bytes), drawing.room_pages
    multiples = WINDOW_UNITS if 8 * largest <= room else TIGHT_UNITS + WINDOW_UNITS
    wanted = {round(largest * units) for units in multiples} | {int(room * share) for share in WINDOW_SHARES}
    return sorted(window for window in wanted if largest <= window <= room)


def _search(drawing: Drawing, choices: Iterable[Choice], known: dict[Choice, Draft]) -> dict[Choice, Draft]:
    """Draw the choices, those with the lowest bound and the smallest window first, while they can still win."""
    drawn = dict(known)
    best = min((draft.seconds for draft in drawn.values()), default=float("inf"))
    for choice in sorted(choices, key=lambda choice: (drawing.bound(choice.window_pages), choice.window_pages)):
        if best <= drawing.bound(choice.window_pages) * (1 + TIE):
            break
        if choice not in drawn and (draft := drawing.draw(choice)) is not None:
            drawn[choice] = draft
            best = min(best, draft.seconds)
    return drawn
