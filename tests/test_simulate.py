from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmstream.core.plan import Costs, Unit
from fmstream.core.simulate import Uses, compiled, play, play_plainly, simulate
from fmstream.core.trace import Call, Trace
from tests.traces import flat

PAGE = 64
NUM = 20
SIZE = 10 * PAGE


def run(
    compute: float,
    link: float,
    window_units: int,
    lookahead: int | None,
    wrap: bool,
    between: float = 0.0,
    latency: float = 0.0,
    seen: float = 0.0,
) -> float:
    """Steady pass of 20 equal units that compute for ``compute`` and load for ``link`` seconds in all."""
    trace = flat([SIZE] * NUM, [compute / NUM] * NUM, between)
    units = [Unit(i, i, (i,), SIZE) for i in range(NUM)]
    return simulate(
        trace,
        units,
        window_bytes=window_units * SIZE,
        page_bytes=PAGE,
        costs=Costs(SIZE * NUM / link, latency, seen),
        lookahead=lookahead,
        wrap=wrap,
    )


RATIOS = pytest.mark.parametrize(("compute", "link"), [(1.0, 0.5), (1.0, 1.0), (1.0, 2.0), (1.0, 10.0)])


@RATIOS
def test_on_demand_is_the_sum(compute: float, link: float) -> None:
    assert run(compute, link, 1, 0, False) == pytest.approx(compute + link)
    assert run(compute, link, 5, 0, False) == pytest.approx(compute + link), "a larger window changes nothing"
    assert run(compute, link, 5, 0, False, latency=0.01) == pytest.approx(compute + link + NUM * 0.01)


@RATIOS
def test_one_ahead_is_the_sum_of_the_longer_ones(compute: float, link: float) -> None:
    first_load, last_compute = link / NUM, compute / NUM
    expected = first_load + (NUM - 1) * max(compute, link) / NUM + last_compute
    assert run(compute, link, 2, 1, False) == pytest.approx(expected)


@RATIOS
@pytest.mark.parametrize("window_units", [2, 3, 7, 20])
def test_overlap_across_passes_is_the_longer_one(compute: float, link: float, window_units: int) -> None:
    assert run(compute, link, window_units, None, True) == pytest.approx(max(compute, link))


def test_a_load_is_seen_later_while_the_link_goes_on() -> None:
    assert run(1.0, 0.5, 1, 0, False, seen=0.01) == pytest.approx(1.5 + NUM * 0.01), "waited for at every entry"
    assert run(1.0, 0.5, 3, None, True, seen=0.01) == pytest.approx(1.0), "hidden where there is time"
    assert run(0.2, 1.0, 3, None, True, seen=0.01) == pytest.approx(1.0), "and where the link is the slower one"
    # Two places in turn: each is loaded, seen and used before it is loaded again.
    assert run(1.0, 1.0, 2, None, True, seen=0.01) == pytest.approx(NUM / 2 * (0.05 + 0.01 + 0.05))


def test_a_window_fills_over_several_passes() -> None:
    """A link that is hardly faster than compute needs some passes to get ahead; the steady ones are then free."""
    shapes = [(10, 0.02)] * 10 + [(10, 0.08)] * 10
    trace = flat([PAGE * pages for pages, _ in shapes], [seconds for _, seconds in shapes])
    units = [Unit(i, i, (i,), SIZE) for i in range(NUM)]
    args = {"page_bytes": PAGE, "costs": Costs(SIZE * NUM / 0.98), "lookahead": None, "wrap": True}
    assert simulate(trace, units, window_bytes=12 * SIZE, **args) == pytest.approx(1.0)  # type: ignore[arg-type]
    assert simulate(trace, units, window_bytes=3 * SIZE, **args) > 1.2  # type: ignore[arg-type]


def test_a_window_of_one_unit_cannot_overlap() -> None:
    assert run(1.0, 0.5, 1, None, True) == pytest.approx(1.5)


def test_without_wrap_the_first_load_is_waited_for() -> None:
    assert run(1.0, 0.5, 4, None, False) == pytest.approx(1.0 + 0.5 / NUM)


def test_the_window_fills_between_passes() -> None:
    assert run(1.0, 2.0, 8, None, True, between=0.3) == pytest.approx(1.7)
    # Eight units are staged; the first of the other twelve is issued when unit 0 is released, the last one computes.
    assert run(1.0, 2.0, 8, None, True, between=5.0) == pytest.approx(0.05 + 12 * 0.1 + 0.05)
    assert run(1.0, 2.0, 8, None, False, between=5.0) == pytest.approx(2.0 + 1 / NUM)


def test_a_lookahead_limits_what_is_staged() -> None:
    # Two units are staged; the other eighteen are issued from the entry of unit 0 on, the last one computes.
    assert run(1.0, 2.0, 8, 2, True, between=5.0) == pytest.approx(18 * 0.1 + 0.05)


def test_nothing_streamed_takes_the_compute_time() -> None:
    trace = flat([SIZE], [3.0])
    seconds = simulate(trace, [], window_bytes=0, page_bytes=PAGE, costs=Costs(1.0), lookahead=None, wrap=True)
    assert seconds == 3.0


def test_runs_are_contiguous() -> None:
    """Units of 6 pages in a window of 10: a second one has no contiguous room, though 4 pages are free."""
    trace = flat([6 * PAGE] * 4, [1.0] * 4)
    units = [Unit(i, i, (i,), 6 * PAGE) for i in range(4)]
    costs = Costs(6 * PAGE / 1.0)
    args = {"page_bytes": PAGE, "costs": costs, "lookahead": None, "wrap": True}
    assert simulate(trace, units, window_bytes=10 * PAGE, **args) == pytest.approx(8.0)  # type: ignore[arg-type]
    assert simulate(trace, units, window_bytes=12 * PAGE, **args) == pytest.approx(4.0)  # type: ignore[arg-type]


def test_a_unit_takes_whole_pages() -> None:
    trace = flat([PAGE + 1] * 4, [1.0] * 4)
    units = [Unit(i, i, (i,), PAGE + 1) for i in range(4)]
    seconds = simulate(
        trace, units, window_bytes=3 * PAGE, page_bytes=PAGE, costs=Costs(PAGE + 1.0), lookahead=None, wrap=True
    )
    assert seconds == pytest.approx(8.0), "two pages each: the window of three holds one"


def test_a_unit_of_an_outer_call_ends_with_that_call() -> None:
    """The outer call computes on after its inner call: only then may the next unit take its place."""
    calls = (Call(0, (0,), 0.0, 4.0), Call(1, (1,), 1.0, 2.0, parent=0), Call(2, (2,), 4.0, 5.0))
    trace = Trace(calls, (PAGE, PAGE, 2 * PAGE), 5.0)
    units = [Unit(0, 1, (0, 1), 2 * PAGE), Unit(2, 2, (2,), 2 * PAGE)]
    seconds = simulate(
        trace, units, window_bytes=2 * PAGE, page_bytes=PAGE, costs=Costs(2.0 * PAGE), lookahead=None, wrap=True
    )
    assert seconds == pytest.approx(7.0), "each load of one second follows the end of the other unit"


def test_a_unit_larger_than_the_window_is_a_fault_of_the_planner() -> None:
    with pytest.raises(AssertionError, match="a unit of 10 pages in a window of 9"):
        simulate(
            flat([SIZE], [1.0]),
            [Unit(0, 0, (0,), SIZE)],
            window_bytes=9 * PAGE,
            page_bytes=PAGE,
            costs=Costs(1.0),
            lookahead=None,
            wrap=True,
        )


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 2.0)), min_size=1, max_size=30),
    st.integers(0, 100),
    st.sampled_from([None, 0, 1, 3]),
    st.booleans(),
    st.floats(0.0, 3.0),
)
def test_a_pass_is_never_shorter_than_its_compute_nor_longer_than_on_demand(
    shapes: list[tuple[int, float]], spare: int, lookahead: int | None, wrap: bool, between: float
) -> None:
    trace = flat([PAGE * pages for pages, _ in shapes], [seconds for _, seconds in shapes], between)
    units = [Unit(i, i, (i,), PAGE * pages) for i, (pages, _) in enumerate(shapes)]
    costs = Costs(PAGE * 20.0, 0.01)
    window = PAGE * (max(pages for pages, _ in shapes) + spare)
    seconds = simulate(trace, units, window_bytes=window, page_bytes=PAGE, costs=costs, lookahead=lookahead, wrap=wrap)
    link = sum(0.01 + pages / 20.0 for pages, _ in shapes)
    assert seconds >= trace.seconds - 1e-9
    assert seconds <= trace.seconds + link + 1e-9
    if not wrap:
        assert seconds >= link - 1e-9


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.0, 2.0), st.floats(0.0, 1.0)), min_size=1, max_size=12),
    st.integers(0, 30),
    st.integers(0, 11),
    st.booleans(),
    st.integers(-1, 12),
    st.booleans(),
)
def test_the_compiled_player_is_the_plain_one(
    shapes: list[tuple[int, float, float]], spare: int, ahead: int, wrap: bool, across: int, shared: bool
) -> None:
    pages = np.array([pages for pages, _, _ in shapes], np.int64)
    ends = np.cumsum([seconds for _, seconds, _ in shapes])
    starts = np.concatenate(([0.0], ends[:-1]))
    loads = np.array([seconds for _, _, seconds in shapes])
    uses = (starts, ends, pages, loads)
    args = (*uses, int(pages.max()) + spare, float(ends[-1]), 0.5, 0.1, ahead, wrap, across, shared)
    assert compiled()(*args) == pytest.approx(play_plainly(*args), abs=1e-12)


def test_what_the_user_copies_waits_for_units_issued_before_their_pass() -> None:
    # Four units of 1 s compute and 0.5 s link each, room for three: the last copy begins when the pass ends.
    starts, ends = np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])
    uses = Uses(starts, ends, np.full(4, 1, np.int64), np.full(4, 0.5))
    args = (3, 4.0, 0.0, 0.0, None, True)
    assert play(uses, *args) == pytest.approx(4.0)
    assert play(uses, *args, across=None, shared=True) == pytest.approx(4.5)
    # The second is issued when the next pass begins, and comes in time for its use.
    assert play(uses, *args, across=1, shared=True) == pytest.approx(4.0)
    assert play(uses, *args, across=0, shared=True) == pytest.approx(4.5)


def test_none_across_is_not_to_wrap_but_for_the_beginning_of_a_pass() -> None:
    starts, ends = np.array([1.0, 2.0]), np.array([2.0, 3.0])
    uses = Uses(starts, ends, np.full(2, 1, np.int64), np.full(2, 1.0))
    # Without wrap the first unit is asked for at its entry, a second into the pass.
    assert play(uses, 2, 3.0, 0.0, 0.0, None, False) == pytest.approx(4.0)
    assert play(uses, 2, 3.0, 0.0, 0.0, None, True, across=0) == pytest.approx(3.0)
