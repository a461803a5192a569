"""Load on demand: the naive baseline, with the same residents and units as the planned overlap."""

from __future__ import annotations

from fmstream.core.drafts import Choice, Drawing, all_resident, fastest
from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.policy import register
from fmstream.core.trace import Trace


@register("sync")
def plan(trace: Trace, limits: Limits, costs: Costs) -> Plan:
    """Each unit is loaded when it is entered, and waited for; the window holds one unit, residents take the rest."""
    if (resident := all_resident("sync", trace, limits)) is not None:
        return resident
    drawing = Drawing(trace, limits, costs, lookahead=0, wrap=False)
    choices = (Choice(t, drawing.largest_pages(t), whole_units=w) for t in drawing.targets() for w in (False, True))
    return drawing.plan("sync", fastest(map(drawing.draw, choices), trace.seconds))
