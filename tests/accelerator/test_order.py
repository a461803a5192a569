"""Nothing is read before it came and nothing overwritten while in use; without any one fence the checker says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.breakers import BREAKERS, OURS, PLAIN, Breaker
from bench.scenarios import SCENARIOS, edited_passes, reports_of
from fmstream.emulator.backlog import Execution

ORDERS: tuple[Execution, ...] = ("eager", "late", 1, 2, 3)


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_checker_finds_nothing(scenario: Callable[[], None], execution: Execution) -> None:
    assert not reports_of(scenario, execution=execution)


@pytest.mark.parametrize("breaker", BREAKERS, ids=lambda breaker: breaker.name)
def test_each_fence_that_is_taken_away_is_missed(breaker: Breaker) -> None:
    without = reports_of(breaker.scenario, breaker.broken)
    assert len(without) > len(reports_of(breaker.scenario))
    assert all(report.kind == "race" for report in without)


def test_fences_are_many() -> None:
    assert len(OURS) >= 9
    assert len(PLAIN) >= 5
    assert len({breaker.name for breaker in BREAKERS}) == len(BREAKERS)


def test_weights_that_are_written_are_not_being_copied() -> None:
    assert not reports_of(edited_passes)
