"""What stays in frames and what leaves first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmstream.core.pages import ABSENT, LOADING, RESIDENT, PageTable
from fmstream.payloads.kv.blocks import BlockTable
from fmstream.payloads.kv.residency import AHEAD_BYTES, Kind, in_order_of_leaving, kept_columns, leaving


def layer(sequences: int, columns: int, first: int = 0) -> BlockTable:
    """A block table of pages by number."""
    block = BlockTable()
    pages = np.arange(first, first + sequences * columns, dtype=np.int32)
    block.extend(pages.reshape(sequences, columns))
    return block


@given(
    st.integers(1, 400), st.integers(1, 12), st.integers(1, 4), st.integers(1, 40), st.sampled_from([1 << 10, 4 << 20])
)
def test_what_stays_leaves_room_for_what_passes(
    frames: int, layers: int, sequences: int, columns: int, page_bytes: int
) -> None:
    in_layer = sequences * columns
    kept = kept_columns(frames, layers, layer(sequences, columns), page_bytes)
    assert 0 <= kept <= columns
    if frames >= in_layer * layers:
        assert kept == columns
    elif kept:
        stays = kept * sequences * layers
        assert stays < frames
        passing = in_layer - kept * sequences
        assert frames - stays >= min(passing // 4, passing * 3 // 20 + AHEAD_BYTES // page_bytes)
    assert kept_columns(frames + 1, layers, layer(sequences, columns), page_bytes) >= kept


def test_more_stays_of_long_layers_than_a_layer_and_a_quarter_for_what_passes_would_leave() -> None:
    long = layer(1, 1000)
    assert kept_columns(4000, 32, long, 1 << 10) == (4000 - 1250 - 1) // 30.75
    assert kept_columns(4000, 32, long, 1 << 20) > 110


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_layer_leaves_once_and_the_next_one_last(count: int) -> None:
    for current in range(count):
        order = in_order_of_leaving(count, current)
        assert sorted(order) == list(range(count))
        if count > 2:
            assert order[0] == (current - 1) % count
            assert order[1] == current
            assert order[-1] == (current + 1) % count


def test_what_passes_leaves_before_what_stays_and_that_before_what_comes() -> None:
    layers = [layer(1, 4, 4 * number) for number in range(3)]
    table = PageTable(12, 12)
    table.load(0, 12, 0)
    table.ready(0, 11)  # the last page of the last layer is on its way
    table.pin(4, 1)
    pages: list[int] = []
    for group, kind in leaving(table, layers, 1, lambda _: 2, 100):
        assert (kind is Kind.LOADING) == (11 in group)
        for page in group.tolist():
            pages.append(page)
            if kind is not Kind.LOADING:
                table.evict(page, 1)
    assert pages[:3] == [2, 6, 10]
    assert sorted(pages[3:-1]) == [0, 1, 3, 5, 7, 8, 9]
    assert pages[-1] == 11
    assert table.state.tolist() == [ABSENT] * 4 + [RESIDENT] + [ABSENT] * 6 + [LOADING]


def test_no_more_of_what_stays_leaves_than_is_wanted() -> None:
    layers = [layer(1, 4, 4 * number) for number in range(3)]
    table = PageTable(12, 12)
    table.load(0, 12, 0)
    table.ready(0, 12)
    assert sum(len(pages) for pages, _ in leaving(table, layers, 0, lambda _: 4, 2)) == 2
