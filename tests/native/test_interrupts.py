"""An interruption at any line of the host workers loses nothing and leaves nothing behind."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from fmstream.actors.host_workers import HostWorkers
from tests.kit_workers import TIMEOUT, address

FILES = {"host_workers.py", "native.py", "portable.py", "tickets.py"}


class Interruption:
    """Raises KeyboardInterrupt at the ``number``-th line of the workers' files that this thread comes to."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A trace function."""
        if Path(frame.f_code.co_filename).name not in FILES:
            return None
        # The interpreter looks for signals neither between taking a lock and the body nor between that and giving it.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(number: int, workers: HostWorkers, out: np.ndarray[Any, Any]) -> bool:
    """Ask and wait, interrupted at some line; whether there was such a line."""
    before = sys.gettrace()
    interruption = Interruption(number)
    sys.settrace(interruption)
    try:
        workers.wait(workers.fill(address(out), 1, len(out), keep=out), TIMEOUT)
        ticket = workers.fill(address(out), 2, len(out), keep=out)
        workers.cancel(ticket)
        workers.is_done(ticket)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return interruption.left <= 0


def test_interrupted_at_every_line(own: HostWorkers) -> None:
    out, other = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    number = 1
    while interrupted(number, own, out):
        value = number % 250 + 3
        assert own.wait(own.fill(address(other), value, 64), TIMEOUT)
        assert (other == value).all()
        number += 1
    assert number > 60
    # Jobs that were noted, but not posted, when they were interrupted are posted with the next request.
    for sequence, (ticket, _) in list(own._running.items()):
        assert sequence in ticket.parts
    assert own.close(TIMEOUT) == ()
    assert own._running == {}
    assert own._lanes[0].keeps == {}


def test_two_workers_share_a_request_that_was_interrupted() -> None:
    workers = HostWorkers(2)
    out = np.zeros(4 << 20, np.uint8)
    number = 1
    while interrupted(number, workers, out):
        number += 7
    assert workers.wait(workers.fill(address(out), 9, len(out)), TIMEOUT)
    assert workers.close(TIMEOUT) == ()
    assert workers._running == {}


@pytest.mark.parametrize("number", [1, 5])
def test_the_interruption_itself_interrupts(own: HostWorkers, number: int) -> None:
    assert interrupted(number, own, np.zeros(8, np.uint8))
