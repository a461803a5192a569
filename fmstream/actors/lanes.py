"""What a worker of the host looks like to the one who gives it jobs, and how one is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fmstream.core.jobs import Job, Outcome
from fmstream.core.wake import Wake
from fmstream.errors import ConfigError


class Lane(Protocol):
    """One worker: jobs go in, outcomes come back in the same order.

    All but ``stop`` may be called by one thread at a time.  The worker keeps
    its lane alive, and with it ``keeps``: objects by the sequence of the job that needs them, filled and emptied by the
    caller.  A job is posted again if posting it was interrupted; it is carried out once.
    """

    native: bool
    failure: BaseException | None
    keeps: dict[int, object]

    @property
    def alive(self) -> bool:
        """Whether the worker still runs."""
        ...

    def post(self, job: Job) -> bool:
        """Hand a job over; False if there is no room for it now."""
        ...

    def cancel(self, sequence: int) -> None:
        """Let a posted job end as soon as it can."""
        ...

    def peek(self) -> list[Outcome]:
        """Outcomes that have not been released, oldest first."""
        ...

    def release(self, count: int) -> None:
        """Forget the ``count`` oldest outcomes."""
        ...

    def park(self) -> bool:
        """Ask to be signalled at the next outcome; False if there is one already."""
        ...

    def stop(self) -> None:
        """Let the worker end after the step that it is in; jobs that it has not begun are not reported."""
        ...

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the worker's end."""
        ...

    def close(self) -> None:
        """Give back what only a worker that runs needs; it has ended."""
        ...


Starter = Callable[[str, Wake], Lane]
"""Starts a worker of that name, which signals when an outcome comes while its lane is parked."""


def native_starter() -> Starter:
    """What starts native workers.

    Raises:
        ConfigError: they cannot be had here; says why.
    """
    try:
        from fmstream.actors.native import NativeLane
        from fmstream.core.clib import symbols

        symbols()
    except Exception as error:  # numba may be missing, or not know this interpreter or processor: in its own words
        raise ConfigError(f"native workers cannot be had here: {error}; install numba, or give native=False") from error
    return NativeLane
