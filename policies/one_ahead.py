"""One unit ahead, in lockstep: what offloading groups of modules on a second stream does."""

from __future__ import annotations

from fmstream.core.drafts import Drawing, fastest
from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.policy import register
from fmstream.core.trace import Trace


@register("one_ahead")
def plan(trace: Trace, limits: Limits, costs: Costs) -> Plan:
    """While a unit is in use the next one is loaded; nothing is resident but small and pinned parameters."""
    drawing = Drawing(trace, limits, costs, lookahead=1, wrap=False)
    drafts = [
        drawing.settle(drawing.kept, drawing.chunks(target), min(2 * drawing.largest_pages(target), drawing.room_pages))
        for target in drawing.targets()
    ]
    return drawing.plan("one_ahead", fastest(drafts, trace.seconds))
