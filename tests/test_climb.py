from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmstream.core.arena import choose_page_bytes, num_pages
from fmstream.core.climb import Climb, improve
from fmstream.core.drafts import Choice, Draft, Drawing
from fmstream.core.outlook import FACTORS, Outlook
from fmstream.core.plan import Costs, Limits
from fmstream.core.trace import Trace
from fmstream.errors import MemoryBudgetError
from tests.traces import blocks, flat, traces

RATE = 13e9
MIB = 1 << 20


def drawing_of(trace: Trace, share: float, latency: float = 2e-6) -> Drawing:
    limits = Limits(int(share * trace.num_bytes), choose_page_bytes(trace.num_bytes))
    return Drawing(trace, limits, Costs(RATE, latency, 10e-6), lookahead=None, wrap=True)


def draft_of(drawing: Drawing, target_bytes: int, window_units: float) -> Draft:
    draft = drawing.draw(Choice(target_bytes, round(window_units * drawing.largest_pages(target_bytes)), 1))
    assert draft is not None
    return draft


def test_the_first_world_is_as_measured() -> None:
    drawing = drawing_of(blocks(0.005), 0.5)
    outlook = Outlook(drawing)
    measured, *others = outlook.worlds
    assert measured.costs == drawing.costs
    assert measured.seconds == pytest.approx(0.005)
    assert measured.bound == pytest.approx(drawing.bound(0))
    assert sum(world.weight for world in outlook.worlds) == pytest.approx(1.0)
    assert [world.costs.bytes_per_second / RATE for world in others] == pytest.approx([f for f, _ in FACTORS[1:]])
    assert all(0.97 < world.seconds / 0.005 < 1.03 for world in others), "calls are off each by itself"


def test_a_pass_that_is_free_everywhere_scores_its_drag() -> None:
    drawing = drawing_of(blocks(0.05), 0.5)
    draft = draft_of(drawing, MIB, 4.0)
    outlook = Outlook(drawing)
    assert outlook.draft_score(draft) == pytest.approx(1.0 + outlook.drag(draft.streamed_bytes))
    assert 0 < outlook.drag(draft.streamed_bytes) < 0.02


def test_a_window_at_the_edge_scores_worse_than_one_with_room() -> None:
    """Free to the microsecond as measured, but where a call is a little longer the tight one makes the link wait."""
    trace = flat([MIB] * 40, [MIB / RATE + 2e-6] * 40)
    limits = Limits(30 * MIB, 4096)
    drawing = Drawing(trace, limits, Costs(RATE, 2e-6), lookahead=None, wrap=True)
    tight = drawing.settle(frozenset(), drawing.groups, 2 * 256)
    roomy = drawing.settle(frozenset(), drawing.groups, 12 * 256)
    assert tight is not None
    assert roomy is not None
    assert tight.seconds == pytest.approx(roomy.seconds) == pytest.approx(trace.seconds)
    outlook = Outlook(drawing)
    assert outlook.draft_score(tight) > outlook.draft_score(roomy) + 1e-3


def test_pieces_are_what_the_draft_was() -> None:
    drawing = drawing_of(blocks(0.005), 0.5)
    draft, outlook = draft_of(drawing, MIB, 3.0), Outlook(drawing)
    climb = Climb(drawing, outlook, draft)
    assert climb.best == pytest.approx(outlook.draft_score(draft))
    assert climb.draft() == draft


def test_a_poor_draft_is_improved() -> None:
    """Residents at the front, units of one module: the link idles first, then each copy costs its own."""
    drawing = drawing_of(blocks(0.005), 0.5, 20e-6)
    outlook = Outlook(drawing)
    groups = drawing.groups
    resident = frozenset(p for group in groups[: int(0.45 * len(groups))] for p in group.params)
    window = drawing.memory_pages - drawing.pages(sum(drawing.trace.sizes[p] for p in resident))
    poor = drawing.settle(resident, groups[int(0.45 * len(groups)) :], window)
    assert poor is not None
    better = improve(drawing, outlook, poor)
    assert outlook.draft_score(better) < 0.97 * outlook.draft_score(poor)
    assert len(better.groups) < len(poor.groups)
    assert better == improve(drawing, outlook, poor), "a climb is deterministic"


def test_what_is_good_enough_is_left_alone() -> None:
    drawing = drawing_of(blocks(0.05), 0.5)
    draft = draft_of(drawing, MIB, 4.0)
    assert improve(drawing, Outlook(drawing), draft) is draft


@settings(max_examples=60, deadline=None)
@given(traces(), st.floats(0.2, 0.95), st.sampled_from([0, 100_000]))
def test_a_climb_never_makes_it_worse_and_stays_sound(trace: Trace, share: float, target: int) -> None:
    limits = Limits(int(share * trace.num_bytes), 1024)
    try:
        drawing = Drawing(trace, limits, Costs(1e6, 1e-2), lookahead=None, wrap=True)
    except MemoryBudgetError:
        return
    if drawing.largest_pages(target) > drawing.room_pages:
        return
    draft = drawing.draw(Choice(target, drawing.largest_pages(target)))
    if draft is None:
        return
    outlook = Outlook(drawing)
    better = improve(drawing, outlook, draft)
    assert outlook.draft_score(better) <= outlook.draft_score(draft)
    assert drawing.kept <= better.resident
    resident = num_pages(sum(trace.sizes[p] for p in better.resident), limits.page_bytes)
    assert resident + better.window_pages <= drawing.memory_pages
    for index, call in enumerate(trace.calls):
        covering = [group.params for group in better.groups if group.first <= index <= group.last]
        assert set(call.params) <= better.resident.union(*covering)
    assert dataclasses.astuple(drawing.plan("x", better).predicted)[0] == better.seconds
    assert np.isfinite(better.seconds)
