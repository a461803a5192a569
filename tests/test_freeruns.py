"""Free numbers are given out once, in runs, and joined when they come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmstream.core.freeruns import FreeRuns


def test_the_first_run_that_is_long_enough_else_the_longest() -> None:
    free = FreeRuns()
    free.give(0, 2)
    free.give(5, 4)
    free.give(20, 3)
    assert free.take(3) == (5, 3)
    assert free.take(9) == (20, 3)
    assert free.take(9) == (0, 2)
    assert free.take(9) == (8, 1)
    assert free.take(1) is None


@pytest.mark.parametrize(("start", "count"), [(3, 1), (1, 4), (4, 9), (0, 20), (7, 0)])
def test_what_is_free_is_not_given_again(start: int, count: int) -> None:
    free = FreeRuns()
    free.give(2, 4)
    with pytest.raises(AssertionError):
        free.give(start, count)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_it_is_a_set_of_numbers(steps: list[tuple[bool, int]]) -> None:
    free, there, taken = FreeRuns(), set(range(30)), []
    free.give(0, 30)
    for takes, count in steps:
        if takes and there:
            start, got = free.take(count) or (0, 0)
            run = set(range(start, start + got))
            assert run
            assert run <= there
            assert got <= count
            there -= run
            taken.append((start, got))
        elif taken:
            start, got = taken.pop(count % len(taken))
            free.give(start, got)
            there |= set(range(start, start + got))
        assert free.num_free == len(there)
    for start, got in taken:
        free.give(start, got)
    assert free.take(99) == (0, 30)
