from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmstream.core.plan import Limits
from fmstream.core.spread import byte_weights, mixed_weights, spread, time_weights
from fmstream.core.trace import Call, Trace
from fmstream.core.units import as_units, closing_call, cut, merge, small_params, strip
from fmstream.errors import MemoryBudgetError
from tests.traces import blocks, flat, traces

KIB = 1 << 10
LARGE = 100 * KIB


def limits(memory_bytes: int, **others: object) -> Limits:
    return dataclasses.replace(Limits(memory_bytes, 64), **others)


def nested(outer_bytes: int, inner_bytes: int, num_inner: int = 3) -> Trace:
    """One leaf, then a call that binds parameter 1 and holds ``num_inner`` leaves, then one leaf."""
    calls = [Call(0, (0,), 0.0, 1.0), Call(1, (1,), 1.0, 9.0)]
    calls += [Call(2 + i, (2 + i,), 2.0 + i, 3.0 + i, parent=1) for i in range(num_inner)]
    calls.append(Call(9, (2 + num_inner,), 9.0, 10.0))
    sizes = (LARGE, outer_bytes, *[inner_bytes] * num_inner, LARGE)
    return Trace(tuple(calls), sizes, 10.0)


def test_small_tensors_are_resident_up_to_five_per_cent() -> None:
    trace = flat([64, 128, 256, LARGE], [1.0] * 4)
    assert small_params(trace, limits(1 << 20)) == {0, 1, 2}
    assert small_params(trace, limits(64 * 20)) == {0}
    assert small_params(trace, limits(64 * 60)) == {0, 1}
    assert small_params(flat([64 * KIB, 64 * KIB + 64], [1.0] * 2), limits(1 << 30)) == {0}


def test_pinned_parameters_are_resident_and_in_no_group() -> None:
    result = cut(flat([LARGE] * 4, [1.0] * 4), limits(3 * LARGE, pinned=frozenset({2})))
    assert result.resident == {2}
    assert [group.params for group in result.groups] == [(0,), (1,), (3,)]


def test_an_outer_call_that_fits_is_one_group_with_what_is_inside() -> None:
    result = cut(nested(LARGE, LARGE), limits(16 * LARGE))
    assert [(g.first, g.last, g.params) for g in result.groups] == [(0, 0, (0,)), (1, 4, (1, 2, 3, 4)), (5, 5, (5,))]
    assert (result.groups[1].start, result.groups[1].end) == (1.0, 9.0)
    assert not result.resident


def test_an_outer_call_that_binds_little_keeps_it_and_frees_what_is_inside() -> None:
    """A block with a table of its own is streamed module by module."""
    result = cut(nested(LARGE, 20 * LARGE), limits(400 * LARGE))
    assert result.resident == {1}
    assert [group.params for group in result.groups] == [(0,), (2,), (3,), (4,), (5,)]
    assert not cut(nested(2 * LARGE, 20 * LARGE), limits(400 * LARGE)).resident


def test_what_outer_calls_keep_is_five_per_cent_of_the_memory_at_most() -> None:
    calls = []
    for block in range(30):
        calls.append(Call(2 * block, (2 * block,), block, block + 1.0))
        calls.append(Call(2 * block + 1, (2 * block + 1,), block + 0.2, block + 0.8, parent=2 * block))
    result = cut(Trace(tuple(calls), (LARGE, 40 * LARGE) * 30, 30.0), limits(170 * LARGE))
    assert len(result.resident) == 8
    assert [len(group.params) for group in result.groups] == [1] * 8 + [2] * 22


def test_an_outer_call_that_does_not_fit_keeps_its_own_and_frees_what_is_inside() -> None:
    result = cut(nested(LARGE, LARGE), limits(15 * LARGE))
    assert result.resident == {1}
    assert [group.params for group in result.groups] == [(0,), (2,), (3,), (4,), (5,)]


def test_an_outer_call_with_only_small_parameters_does_not_bind_its_inner_calls() -> None:
    result = cut(nested(64, LARGE), limits(16 * LARGE))
    assert [group.params for group in result.groups] == [(0,), (2,), (3,), (4,), (5,)]


def test_a_parameter_kept_by_a_later_outer_call_leaves_earlier_groups() -> None:
    trace = nested(LARGE, LARGE)
    first = dataclasses.replace(trace.calls[0], params=(0, 1))
    result = cut(dataclasses.replace(trace, calls=(first, *trace.calls[1:])), limits(15 * LARGE))
    assert result.groups[0].params == (0,)


def test_too_little_memory_names_what_is_needed() -> None:
    trace = flat([LARGE, 3 * LARGE, LARGE], [1.0] * 3)
    with pytest.raises(MemoryBudgetError, match=f"needs {3 * LARGE} bytes.*memory is {3 * LARGE - 64} bytes"):
        cut(trace, limits(3 * LARGE - 64))
    assert cut(trace, limits(3 * LARGE)).groups[1].num_bytes == 3 * LARGE
    with pytest.raises(MemoryBudgetError, match=f"needs {4 * LARGE} bytes"):
        cut(trace, limits(3 * LARGE, pinned=frozenset({0})))


def test_small_tensors_are_given_up_where_the_largest_module_needs_their_room() -> None:
    trace = flat([64, LARGE], [1.0] * 2)
    assert cut(trace, limits(LARGE)).resident == frozenset()
    assert cut(trace, limits(LARGE + 64)).resident == {0}


def test_merge_reaches_the_target_and_counts_a_shared_parameter_once() -> None:
    sizes = (64, 64, 64, 640)
    calls = tuple(Call(i, params, i, i + 1.0) for i, params in enumerate([(0,), (1, 0), (2,), (3,), (0,)]))
    groups = cut(Trace(calls, sizes, 5.0), limits(640)).groups
    merged = merge(groups, 192, sizes)
    assert [(g.first, g.last, g.params, g.num_bytes) for g in merged] == [
        (0, 2, (0, 1, 2), 192),
        (3, 3, (3,), 640),
        (4, 4, (0,), 64),
    ]
    assert (merged[0].start, merged[0].end) == (0.0, 3.0)
    assert merge(groups, 0, sizes) == groups


def test_strip_leaves_out_residents_and_empty_groups() -> None:
    sizes = (64, 64, 64)
    groups = cut(flat(sizes, [1.0] * 3), limits(128)).groups
    merged = merge(groups[:2], 128, sizes) + groups[2:]
    stripped = strip(merged, frozenset({1, 2}), sizes)
    assert [(g.params, g.num_bytes, g.first, g.last) for g in stripped] == [((0,), 64, 0, 1)]


def test_the_closing_call_of_an_outer_call_is_itself() -> None:
    trace = nested(LARGE, LARGE)
    units = as_units(cut(trace, limits(16 * LARGE)).groups)
    assert [closing_call(trace, unit) for unit in units] == [0, 1, 5]
    merged = as_units(merge(cut(trace, limits(16 * LARGE)).groups, 1 << 40, trace.sizes))
    assert [(unit.first, unit.last, closing_call(trace, unit)) for unit in merged] == [(0, 5, 5)]


@given(traces(), st.integers(1, 1 << 21), st.integers(0, 1 << 20))
def test_groups_cover_the_pass(trace: Trace, memory_bytes: int, target: int) -> None:
    try:
        result = cut(trace, limits(memory_bytes))
    except MemoryBudgetError:
        return
    groups = merge(result.groups, target, trace.sizes)
    for before, after in pairwise(groups):
        assert before.last < after.first
        assert before.end <= after.start
    for index, call in enumerate(trace.calls):
        covering = [g.params for g in groups if g.first <= index <= g.last]
        assert set(call.params) <= result.resident.union(*covering)
    for group in groups:
        assert len(set(group.params)) == len(group.params)
        assert group.num_bytes == sum(trace.sizes[p] for p in group.params)
        assert result.resident.isdisjoint(group.params)
        assert group.end == trace.calls[closing_call(trace, as_units([group])[0])].end


def test_residents_are_spread_evenly() -> None:
    trace = blocks(1.0, leaf_bytes=[1 << 20])
    groups = cut(trace, limits(10 << 20)).groups
    for weights in (byte_weights, time_weights, mixed_weights):
        chosen = sorted(spread(groups, trace.sizes, 10 << 20, weights(groups, 1.0, 0.0)))
        assert len(chosen) == 10
        assert {after - before for before, after in pairwise(chosen)} == {4}


def test_residents_by_time_lie_where_the_compute_is_short() -> None:
    trace = flat([1 << 20] * 20, [0.01] * 10 + [1.0] * 10)
    groups = cut(trace, limits(8 << 20)).groups
    by_time = spread(groups, trace.sizes, 8 << 20, time_weights(groups, trace.seconds, 0.0))
    assert by_time <= set(range(11))
    by_bytes = spread(groups, trace.sizes, 8 << 20, byte_weights(groups, trace.seconds, 0.0))
    assert len([p for p in by_bytes if p < 10]) == 4


def test_parameters_used_more_often_are_resident_first() -> None:
    calls = tuple(Call(i, (p,), i, i + 1.0) for i, p in enumerate([0, 1, 2, 3, 2, 4, 2, 3]))
    trace = Trace(calls, (LARGE,) * 5, 8.0)
    groups = cut(trace, limits(3 * LARGE)).groups
    weights = byte_weights(groups, 8.0, 0.0)
    assert spread(groups, trace.sizes, LARGE, weights) == {2}
    assert spread(groups, trace.sizes, 2 * LARGE, weights) == {2, 3}


@given(traces(), st.integers(0, 1 << 20), st.sampled_from([byte_weights, time_weights, mixed_weights]))
def test_spread_keeps_to_the_room_and_leaves_none_that_would_fit(trace: Trace, room: int, weights: object) -> None:
    groups = cut(trace, limits(1 << 30)).groups
    chosen = spread(groups, trace.sizes, room, weights(groups, trace.seconds, trace.between))  # type: ignore[operator]
    left = room - sum(trace.sizes[p] for p in chosen)
    assert left >= 0
    streamed = {p for group in groups for p in group.params} - chosen
    assert all(trace.sizes[p] > left for p in streamed)
