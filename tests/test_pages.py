from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fmstream.core import pages
from fmstream.core.pages import ABSENT, LOADING, RESIDENT, SPILLING, PageCounts, PageError, PageTable


@pytest.fixture(params=["plain", "compiled"])
def table(request: pytest.FixtureRequest) -> PageTable:
    return PageTable(16, 8, pages.PYTHON if request.param == "plain" else pages.compiled())


def test_life_of_a_run(table: PageTable) -> None:
    table.load(3, 2, 5)
    assert table.state[3:5].tolist() == [LOADING, LOADING]
    assert table.frame[3:5].tolist() == [5, 6]
    assert table.owner[5:7].tolist() == [3, 4]
    table.ready(3, 2)
    assert table.generation[2:6].tolist() == [0, 1, 1, 0]
    assert table.counts() == PageCounts(free=6, loading=0, resident=2, spilling=0)
    table.evict(3, 2)
    assert table.counts() == PageCounts(free=8, loading=0, resident=0, spilling=0)
    assert (table.state == ABSENT).all()
    table.check()


def test_cancel_frees_the_frames_and_counts_no_generation(table: PageTable) -> None:
    table.load(0, 8, 0)
    table.cancel(0, 8)
    table.load(8, 8, 0)
    assert not table.generation.any()
    table.check()


def test_spill_keeps_the_frames_until_spilled(table: PageTable) -> None:
    table.load(0, 2, 0)
    table.ready(0, 2)
    table.dirty[0] = True
    with pytest.raises(PageError, match=r"evict of pages \[0, 2\): page 0 is resident, pinned 0 times, dirty"):
        table.evict(0, 2)
    table.spill(0, 2)
    assert table.counts() == PageCounts(free=6, loading=0, resident=0, spilling=2)
    table.spilled(0, 2)
    assert not table.dirty.any()
    assert table.counts().free == 8
    assert table.generation[:2].tolist() == [1, 1]


def test_pins_nest(table: PageTable) -> None:
    table.load(0, 1, 0)
    table.ready(0, 1)
    table.pin(0, 1)
    table.pin(0, 1)
    table.unpin(0, 1)
    with pytest.raises(PageError, match="page 0 is resident, pinned 1 times"):
        table.evict(0, 1)
    with pytest.raises(PageError, match="spill"):
        table.spill(0, 1)
    table.unpin(0, 1)
    with pytest.raises(PageError, match="unpin"):
        table.unpin(0, 1)
    table.evict(0, 1)


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        ("load", (0, 2, 6), r"load of pages \[0, 2\): page 1 is loading"),
        ("load", (4, 3, 0), r"load of pages \[4, 7\): frame 2 is taken by page 1"),
        ("load", (4, 2, 7), r"frames \[7, 9\) of 8"),
        ("load", (4, 2, -1), r"frames \[-1, 1\) of 8"),
        ("load", (15, 2, 4), r"pages \[15, 17\): the table has 16 pages"),
        ("load", (-1, 2, 4), r"the table has 16 pages"),
        ("load", (4, 0, 4), r"the table has 16 pages"),
        ("ready", (1, 3), r"ready of pages \[1, 4\): page 3 is absent"),
        ("ready", (15, 2), r"the table has 16 pages"),
        ("cancel", (0, 3), r"cancel of pages \[0, 3\): page 0 is absent"),
        ("evict", (1, 2), r"evict of pages \[1, 3\): page 1 is loading"),
        ("spill", (1, 2), r"spill of pages \[1, 3\): page 1 is loading"),
        ("spilled", (1, 2), r"spilled of pages \[1, 3\): page 1 is loading"),
        ("pin", (1, 2), r"pin of pages \[1, 3\): page 1 is loading"),
        ("find_free", (0,), r"0 frames"),
        ("find_free", (1, 0, 9), r"\[0, 9\); the table has 8 frames"),
    ],
)
def test_a_refused_operation_names_the_offender_and_changes_nothing(
    table: PageTable, operation: str, arguments: tuple[int, ...], message: str
) -> None:
    table.load(1, 2, 2)
    before = [table.state.copy(), table.frame.copy(), table.owner.copy(), table.pins.copy(), table.generation.copy()]
    with pytest.raises(PageError, match=message):
        getattr(table, operation)(*arguments)
    after = [table.state, table.frame, table.owner, table.pins, table.generation]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_find_free_is_first_fit_within_the_limits(table: PageTable) -> None:
    table.load(0, 1, 2)
    assert table.find_free(2) == 0
    assert table.find_free(3) == 3
    assert table.find_free(2, 1) == 3
    assert table.find_free(5, 3, 7) == -1
    assert table.find_free(4, 3, 7) == 3
    assert table.find_free(1, 5, 5) == -1


@pytest.mark.parametrize(
    ("array", "index", "value", "law"),
    [
        ("frame", 1, 7, "owner"),
        ("frame", 1, -1, "has no frame"),
        ("owner", 0, 1, "adds up"),
        ("state", 1, RESIDENT + 0, None),
        ("state", 0, SPILLING, "adds up"),
        ("pins", 1, -1, "negative"),
        ("pins", 1, 1, "only a resident page is pinned"),
        ("dirty", 9, True, "dirty"),
    ],
)
def test_check_finds_each_broken_law(array: str, index: int, value: int, law: str | None) -> None:
    table = PageTable(16, 8)
    table.load(1, 1, 3)
    getattr(table, array)[index] = value
    if law is None:  # another state with a frame breaks no law
        table.check()
    else:
        with pytest.raises(PageError, match=law):
            table.check()


def test_importing_pages_does_not_import_numba() -> None:
    code = "import sys, fmstream.core.pages; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_compiles_without_a_writable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    real = numba.njit

    def refuse_cache(signature: object, *, cache: bool = False, nogil: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(signature, nogil=nogil)

    monkeypatch.setattr(numba, "njit", refuse_cache)
    table = PageTable(4, 4, pages.compiled.__wrapped__())
    table.load(0, 4, 0)
    assert table.counts().loading == 4


class Twins(RuleBasedStateMachine):
    """The compiled operations against the plain ones: the same outcome and the same arrays, and never a broken law."""

    starts = st.integers(-1, 12)
    counts = st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.tables = (PageTable(12, 9), PageTable(12, 9, pages.PYTHON))

    def both(self, operation: str, *arguments: int) -> None:
        outcomes = []
        for table in self.tables:
            try:
                outcomes.append(getattr(table, operation)(*arguments))
            except PageError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]

    @rule(start=starts, count=counts, frame=st.integers(-1, 9))
    def load(self, start: int, count: int, frame: int) -> None:
        self.both("load", start, count, frame)

    @rule(count=st.integers(1, 4), start=st.integers(0, 8))
    def load_first_fit(self, start: int, count: int) -> None:
        frame = self.tables[0].find_free(count)
        if frame >= 0:
            self.both("load", start, count, frame)

    @rule(
        operation=st.sampled_from(["ready", "cancel", "evict", "spill", "spilled", "pin", "unpin"]),
        start=starts,
        count=counts,
    )
    def turn(self, operation: str, start: int, count: int) -> None:
        self.both(operation, start, count)

    @rule(page=st.integers(0, 11))
    def write(self, page: int) -> None:
        for table in self.tables:
            if table.state[page] == RESIDENT:
                table.dirty[page] = True

    @rule(count=st.integers(1, 9), low=st.integers(0, 9), high=st.integers(0, 9))
    def find_free(self, count: int, low: int, high: int) -> None:
        self.both("find_free", count, low, high)

    @invariant()
    def lawful_and_alike(self) -> None:
        first, second = self.tables
        for table in self.tables:
            table.check()
        for name in ("state", "frame", "pins", "dirty", "generation", "owner"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_table_grows_and_keeps_what_it_knows() -> None:
    table = PageTable(2, 3)
    table.load(0, 2, 1)
    table.ready(0, 2)
    table.dirty[1], table.home[0] = True, 7
    table.grow(5)
    table.grow(4)
    assert table.num_pages == 5
    assert table.state.tolist() == [2, 2, 0, 0, 0]
    assert table.home.tolist() == [7, -1, -1, -1, -1]
    assert table.dirty.tolist() == [False, True, False, False, False]
    table.load(2, 1, 0)
    table.check()


def test_frames_are_added_and_free_ones_taken_away() -> None:
    table = PageTable(4, 3)
    table.load(0, 2, 1)
    with pytest.raises(PageError, match="resize to 2 frames: a page lies in one of those that would go"):
        table.resize(2)
    table.resize(6)
    table.load(2, 2, 4)
    table.check()
    table.cancel(2, 2)
    table.resize(3)
    assert table.num_frames == 3
    table.check()
