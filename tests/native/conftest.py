"""Workers of both kinds, which keep to one contract."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from fmstream.actors.host_workers import HostWorkers
from tests.kit_workers import Gate

KINDS = [pytest.param(True, id="native"), pytest.param(False, id="portable")]
if sys.platform == "win32":
    KINDS = KINDS[1:]


@pytest.fixture(scope="module", params=KINDS)
def workers(request: pytest.FixtureRequest) -> Iterator[HostWorkers]:
    """Two workers of a kind, for all tests that leave them as they were."""
    made = HostWorkers(2, native=request.param)
    yield made
    assert made.close() == ()


@pytest.fixture(params=KINDS)
def own(request: pytest.FixtureRequest) -> Iterator[HostWorkers]:
    """One worker of a kind, for one test."""
    made = HostWorkers(1, native=request.param)
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A read that waits; it is let go at the end at the latest."""
    made = Gate()
    yield made
    made.opened.set()
