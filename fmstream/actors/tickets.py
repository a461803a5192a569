"""What stands for a request to the workers of the host while it is carried out, and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

from fmstream.core.jobs import Job, Outcome, Status, failure
from fmstream.errors import CancelledRun


class _Waiter(Protocol):
    async def completed(self, ticket: Ticket) -> None: ...


class Ticket:
    """One request.  Await it, or hand it to `HostWorkers.wait`.

    Attributes:
        name: what was asked for, for messages and timelines.
        status: None while something may still write for it, then how it ended.
        error: why it failed, else None.
        start, end: ``time.perf_counter()`` nanoseconds of the first beginning and the last end of its parts, as taken
            by the workers; 0 while it has none.
    """

    __slots__ = ("_callbacks", "_cancelled", "_workers", "end", "error", "name", "parts", "start", "status")

    def __init__(self, workers: _Waiter, name: str) -> None:
        self.name = name
        self.status: Status | None = None
        self.error: Exception | None = None
        self.start = 0
        self.end = 0
        self.parts: dict[int, Job] = {}
        """Jobs without an outcome, by sequence.  Guarded by the workers' lock, as are all changes."""
        self._workers = workers
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    def __await__(self) -> Generator[Any, None, None]:
        """Wait until it has ended; raises as `raise_failure`.  A cancelled task does not cancel the ticket."""
        return self._workers.completed(self).__await__()

    def __repr__(self) -> str:
        return f"<{self.name}: {'running' if self.status is None else self.status.name.lower()}>"

    @property
    def seconds(self) -> float:
        """Time from the first beginning of its parts to the last end."""
        return (self.end - self.start) / 1e9

    def raise_failure(self) -> None:
        """Raise why it was not carried out, if it ended so.

        Raises:
            OSError: a read failed; names errno and offset, or where the file ends.
            IndexError: an id is not a row of the table.
            CancelledRun: it was cancelled, or its workers were closed.
        """
        if self.error is not None:
            raise self.error
        if self.status is Status.CANCELLED:
            raise CancelledRun(f"{self.name} was cancelled, or its workers were closed")

    def take(self, job: Job, outcome: Outcome | None) -> None:
        """Note how one of its parts ended; None if it was dropped before it began.

        With the last one the ticket ends.  Noting it again, after an interruption, completes what was begun.
        """
        if outcome is None or outcome.status is Status.CANCELLED:
            self._cancelled = True
        elif outcome.status is Status.FAILED and self.error is None:
            self.error = failure(job, outcome)
        if outcome is not None:
            self.start = min(self.start or outcome.start, outcome.start)
            self.end = max(self.end, outcome.end)
        if len(self.parts) == 1:
            self._end(Status.FAILED if self.error else Status.CANCELLED if self._cancelled else Status.DONE)
        del self.parts[job.sequence]

    def end_empty(self) -> None:
        """End a request that has no parts."""
        self._end(Status.DONE)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call when it ends, from whichever thread sees that; at once if it has ended."""
        if self.status is None:
            self._callbacks.append(call)
        else:
            call()

    def _end(self, status: Status) -> None:
        self.status = status
        while self._callbacks:
            self._callbacks[-1]()
            self._callbacks.pop()
