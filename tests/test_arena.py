from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fmstream.core.arena import Arena, Window, choose_page_bytes, num_pages, pack


def taken(window: Window, count: int) -> int:
    position = window.reserve(count)
    assert position is not None
    return position


def test_runs_are_contiguous_and_skip_the_end() -> None:
    window = Window(10, first_frame=100)
    first, second = taken(window, 4), taken(window, 4)
    assert (window.frame_of(first), window.frame_of(second)) == (100, 104)
    assert window.reserve(3) is None, "two frames at the end do not hold three, and the start is taken"
    window.release(first)
    third = taken(window, 3)
    assert (third, window.frame_of(third)) == (10, 100)
    assert window.free_frames == 1, "the two skipped frames are not free"
    window.check()


def test_an_empty_window_holds_its_full_length_wherever_the_cursor_stands() -> None:
    window = Window(10)
    window.release(taken(window, 3))
    position = taken(window, 10)
    assert position == 10
    assert window.free_frames == 0
    window.release(position)
    assert window.free_frames == 10


def test_release_is_in_order() -> None:
    window = Window(10)
    taken(window, 2)
    second = taken(window, 2)
    with pytest.raises(AssertionError, match="release of the run at 2, but the oldest is at 0"):
        window.release(second)
    with pytest.raises(AssertionError, match="the oldest is at None"):
        Window(10).release(0)


def test_cancel_gives_back_the_newest_and_what_it_skipped() -> None:
    window = Window(10)
    first, second = taken(window, 4), taken(window, 4)
    window.release(first)
    third = taken(window, 4)
    with pytest.raises(AssertionError, match="the newest is at 10"):
        window.cancel_newest(second)
    window.cancel_newest(third)
    window.check()
    assert window.free_frames == 6
    window.cancel_newest(second)
    assert (window.num_runs, window.free_frames) == (0, 10)


def test_reset_frees_all_and_positions_go_on() -> None:
    window = Window(10)
    taken(window, 6)
    window.reset()
    assert (window.num_runs, window.free_frames) == (0, 10)
    assert taken(window, 4) == 6


@pytest.mark.parametrize("count", [0, 11])
def test_a_run_must_fit_the_window(count: int) -> None:
    with pytest.raises(AssertionError, match=f"a run of {count} frames in a window of 10"):
        Window(10).reserve(count)


class AgainstAList(RuleBasedStateMachine):
    """The window against a list of occupied frames, with cursors beyond any machine word's half."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(13, first_frame=7)
        self.window._head = self.window._tail = (1 << 62) - 20
        self.runs: list[tuple[int, int]] = []

    def frames(self, run: tuple[int, int]) -> range:
        start = self.window.frame_of(run[0])
        return range(start, start + run[1])

    @rule(count=st.integers(1, 13))
    def reserve(self, count: int) -> None:
        position = self.window.reserve(count)
        if position is None:
            assert self.runs, "an empty window refuses nothing"
        else:
            self.runs.append((position, count))

    @precondition(lambda self: self.runs)
    @rule()
    def release(self) -> None:
        self.window.release(self.runs.pop(0)[0])

    @precondition(lambda self: self.runs)
    @rule()
    def cancel(self) -> None:
        self.window.cancel_newest(self.runs.pop()[0])

    @invariant()
    def runs_are_disjoint_and_inside(self) -> None:
        self.window.check()
        held = [frame for run in self.runs for frame in self.frames(run)]
        assert len(set(held)) == len(held)
        assert all(7 <= frame < 20 for frame in held)
        assert len(held) + self.window.free_frames <= 13
        assert self.window.num_runs == len(self.runs)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_arena_splits_into_residents_and_window() -> None:
    arena = Arena(1000, 64)
    assert (arena.num_frames, arena.num_bytes, arena.resident_frames) == (15, 960, 15)
    window = arena.split(130)
    assert (window.first_frame, window.num_frames, arena.resident_frames) == (12, 3, 12)
    assert arena.offset_of(window.frame_of(taken(window, 3))) == 768
    with pytest.raises(AssertionError, match="holds 1 runs"):
        arena.split(0)
    window.reset()
    with pytest.raises(AssertionError, match="a window of 16 frames in an arena of 15"):
        arena.split(961)


@pytest.mark.parametrize("page_bytes", [32, 96])
def test_arena_refuses_odd_pages(page_bytes: int) -> None:
    with pytest.raises(AssertionError, match=f"a page of {page_bytes} bytes"):
        Arena(1 << 20, page_bytes)


@pytest.mark.parametrize(
    ("total", "page"),
    [(0, 64), (64 << 12, 64), (128 << 12, 128), ((256 << 12) - 1, 128), (1 << 28, 65536), (1 << 40, 65536)],
)
def test_choose_page_bytes(total: int, page: int) -> None:
    assert choose_page_bytes(total) == page


@pytest.mark.parametrize(("num_bytes", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_num_pages(num_bytes: int, pages: int) -> None:
    assert num_pages(num_bytes, 64) == pages


@given(st.lists(st.integers(1, 1000)))
def test_pack_is_aligned_tight_and_in_order(sizes: list[int]) -> None:
    offsets = pack(sizes)
    assert len(offsets) == len(sizes)
    end = 0
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset % 64 == 0
        assert 0 <= offset - end < 64
        end = offset + size
