"""Workers that gather, copy, read and fill host memory by raw address, beside the thread that asks for it.

Each worker is one native loop that never needs the GIL, or a Python thread where that cannot be had; the face is the
same.  A request becomes a *ticket* at once, and is split among the workers where it is large.

There is no order between tickets, even with one worker: what depends on another ticket is asked for when that one has
ended.  Addresses are host addresses; whoever asks says with ``keep`` what must stay alive until the ticket has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

from fmstream.actors.lanes import Lane, Starter, native_starter
from fmstream.actors.portable import PortableLane
from fmstream.actors.tickets import Ticket
from fmstream.core.jobs import Job, Op, Outcome, num_bytes_of
from fmstream.core.wake import open_wake, wait
from fmstream.errors import ClosedError, ConfigError, ForkedError, StreamError

__all__ = ["HostWorkers", "Ticket"]

SLICE_SECONDS: Final = 0.1
"""Longest single wait, so that Ctrl-C, a dead worker and the end of a timeout are seen."""
BLIND_SLICE_SECONDS: Final = 0.001
"""The same on event loops that cannot watch a descriptor."""
EXIT_SECONDS: Final = 1.0
"""How long the end of the interpreter waits for steps that are running."""
SPLIT_BYTES: Final = 512 << 10
"""The least that is worth a worker of its own."""
CUT_BYTES: Final = 64 << 10
"""Parts of a copy or read begin at multiples of this, so that direct reads stay aligned."""


class HostWorkers:
    """A few workers.  Any thread may call any method, but none may be called in a forked child.

    Attributes:
        why_portable: why the workers are Python threads although native ones were welcome, else "".
    """

    why_portable = ""

    def __init__(self, num_workers: int = 1, native: bool | Literal["auto"] = "auto") -> None:
        """Start the workers; they sleep until there is something to do.

        Args:
            num_workers: how many.
            native: True for native loops, False for Python threads, "auto" for native ones where they can be had.

        Raises:
            ConfigError: there are no workers, or native ones are asked for and cannot be had; says why.
        """
        if num_workers < 1:
            raise ConfigError(f"{num_workers} host workers: at least 1 is needed")
        self._pid = os.getpid()
        self._completions = open_wake()
        # Reentrant: a finaliser may cancel while its thread is in here.  Entered itself, not through the condition,
        # whose Python code could be interrupted with the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._running: dict[int, tuple[Ticket, Lane]] = {}
        self._backlog: dict[Lane, deque[Job]] = {}
        self._load: dict[Lane, int] = {}
        self._sequence = 0
        self._somebody_sleeps = False
        self._num_awaiting = 0
        self._readers: dict[asyncio.AbstractEventLoop, int] = {}
        self._blind: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._closed = False
        self._lanes: list[Lane] = []
        self._release = weakref.finalize(self, _release, self._lanes, self._pid)
        self._release.atexit = False  # `_close_all` does more
        start = self._choose(native)
        for index in range(num_workers):
            lane = start(f"fmstream host {index}", self._completions)
            self._backlog[lane] = deque()
            self._load[lane] = 0
            self._lanes.append(lane)
        _open_workers.add(self)

    def _choose(self, native: bool | Literal["auto"]) -> Starter:
        if native is False:
            return PortableLane
        try:
            return native_starter()
        except ConfigError as error:
            if native is True:
                raise
            self.why_portable = str(error)
            return PortableLane

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self._lanes)

    @property
    def native(self) -> bool:
        """Whether the workers are native loops."""
        return all(lane.native for lane in self._lanes)

    # Asking

    def gather(
        self,
        table: int,
        row_bytes: int,
        ids: int,
        count: int,
        destination: int,
        *,
        num_rows: int | None = None,
        keep: object = None,
        name: str = "gather",
    ) -> Ticket:
        """Copy rows of a table, side by side, to ``destination``.

        Args:
            table: address of row 0.
            row_bytes: bytes of a row, any number from 1.
            ids: address of ``count`` int64 indices of rows; they must not change meanwhile.
            count: how many rows.
            destination: address of ``count * row_bytes`` bytes; a multiple of 64 is fastest.
            num_rows: rows of the table: an id that is not one fails the ticket.  None if ids are known to be good.
            keep: what keeps all this memory alive.
            name: for messages and timelines.
        """
        assert row_bytes > 0
        assert num_rows is None or num_rows > 0
        share = max(1, -(-SPLIT_BYTES // row_bytes))
        words = [
            (last - first, table, row_bytes, ids + 8 * first, destination + row_bytes * first, num_rows or 0)
            for first, last in self._shares(count, share, 1)
        ]
        return self._ask(Op.GATHER, words, keep, name)

    def copy(self, source: int, destination: int, num_bytes: int, *, keep: object = None, name: str = "copy") -> Ticket:
        """Copy bytes from address to address; the two must not overlap."""
        words = [
            (last - first, source + first, destination + first)
            for first, last in self._shares(num_bytes, SPLIT_BYTES, CUT_BYTES)
        ]
        return self._ask(Op.COPY, words, keep, name)

    def read(
        self, fd: int, offset: int, destination: int, num_bytes: int, *, keep: object = None, name: str = "read"
    ) -> Ticket:
        """Read bytes of an open file at an offset; ``keep`` is also what keeps the descriptor open."""
        words = [
            (last - first, fd, offset + first, destination + first)
            for first, last in self._shares(num_bytes, SPLIT_BYTES, CUT_BYTES)
        ]
        return self._ask(Op.READ, words, keep, name)

    def fill(self, destination: int, value: int, num_bytes: int, *, keep: object = None, name: str = "fill") -> Ticket:
        """Set bytes to ``value``, 0 to 255."""
        assert 0 <= value <= 255
        words = [
            (last - first, destination + first, value)
            for first, last in self._shares(num_bytes, SPLIT_BYTES, CUT_BYTES)
        ]
        return self._ask(Op.FILL, words, keep, name)

    def _shares(self, total: int, least: int, multiple: int) -> list[tuple[int, int]]:
        """Ranges that together make ``total``: one for each worker, but none smaller than ``least``."""
        assert total >= 0
        num = max(1, min(len(self._lanes), total // least))
        step = -(-total // num)
        step += -step % multiple
        return [(first, min(first + step, total)) for first in range(0, total, max(1, step))]

    def _ask(self, op: Op, parts: Sequence[tuple[int, ...]], keep: object, name: str) -> Ticket:
        self._check_open(name)
        ticket = Ticket(self, name)
        if not parts:
            ticket.end_empty()
        with self._lock:
            jobs = [Job(op, self._sequence + number, words) for number, words in enumerate(parts, start=1)]
            if op is Op.GATHER:
                jobs = [job._replace(first=(job.words[3] - parts[0][3]) // 8) for job in jobs]
            ticket.parts.update((job.sequence, job) for job in jobs)
            for job in jobs:
                self._hand_over(job, ticket, keep)
            self._collect()
        return ticket

    def _hand_over(self, job: Job, ticket: Ticket, keep: object) -> None:
        lane = min(self._lanes, key=self._load.__getitem__)
        self._sequence = job.sequence
        self._load[lane] += num_bytes_of(job)
        self._running[job.sequence] = (ticket, lane)
        lane.keeps[job.sequence] = keep
        self._backlog[lane].append(job)
        self._flush(lane)

    def _flush(self, lane: Lane) -> None:
        backlog = self._backlog[lane]
        while backlog and lane.post(backlog[0]):
            backlog.popleft()

    # Hearing of the end

    def is_done(self, ticket: Ticket) -> bool:
        """Whether a ticket has ended, in whichever way; never waits."""
        if ticket.status is None and os.getpid() == self._pid:
            with self._lock:
                self._collect()
        return ticket.status is not None

    def wait(self, ticket: Ticket, timeout: float | None = None) -> bool:
        """Wait until a ticket has ended.

        Returns:
            False if ``timeout`` seconds went by first (None: wait on).  No single wait is longer than 0.1 s.

        Raises:
            OSError, IndexError, CancelledRun: as `Ticket.raise_failure`.
            StreamError: a worker has died.
            ForkedError: this process is a child of the one that made the workers.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_done(ticket):
            left = SLICE_SECONDS if deadline is None else min(SLICE_SECONDS, deadline - time.monotonic())
            if left <= 0:
                return False
            self._check_alive(ticket)
            self._sleep(ticket, left)
        ticket.raise_failure()
        return True

    def _sleep(self, ticket: Ticket, seconds: float) -> None:
        """Sleep until something may have ended.  One thread watches the descriptor, the others watch that thread."""
        with self._lock:
            if self._somebody_sleeps:
                self._changed.wait(seconds)
                return
            if not self._park():
                return
            self._somebody_sleeps = True
        try:
            wait(self._completions, seconds)
        finally:
            with self._lock:
                self._somebody_sleeps = False
                self._collect()
                self._changed.notify_all()

    async def completed(self, ticket: Ticket) -> None:
        """Wait until a ticket has ended, without blocking the running event loop; raises as `wait`."""
        if self.is_done(ticket):
            ticket.raise_failure()
            return
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        seconds = SLICE_SECONDS if self._watch(loop) else BLIND_SLICE_SECONDS
        try:
            with self._lock:
                ticket.when_done(lambda: _tell(loop, ended))
            while not self.is_done(ticket):
                self._check_alive(ticket)
                await asyncio.wait([ended], timeout=seconds)
        finally:
            self._unwatch(loop)
        ticket.raise_failure()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Let an event loop collect what ends; whether it can."""
        with self._lock:
            self._num_awaiting += 1
            num = self._readers[loop] = self._readers.get(loop, 0) + 1
        if num > 1:
            return loop not in self._blind
        try:
            loop.add_reader(self._completions.fd, self._on_signal)
        except NotImplementedError:  # Windows
            self._blind.add(loop)
            return False
        return True

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._num_awaiting -= 1
            self._readers[loop] -= 1
            if self._readers[loop]:
                return
            del self._readers[loop]
        if loop not in self._blind:
            loop.remove_reader(self._completions.fd)

    def _on_signal(self) -> None:
        self._completions.drain()
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        """Note all that has ended.  While tasks wait, the next end will be signalled."""
        while True:
            for lane in self._lanes:
                outcomes = lane.peek()
                for outcome in outcomes:
                    self._settle(outcome.sequence, outcome)
                # Only now: should this be interrupted, they are seen again.
                lane.release(len(outcomes))
                self._flush(lane)
            if not self._num_awaiting or self._park():
                return

    def _settle(self, sequence: int, outcome: Outcome | None) -> None:
        """Note how a job ended; None if it was dropped before it began."""
        found = self._running.get(sequence)
        if found is None:
            return
        ticket, lane = found
        job = ticket.parts.get(sequence)
        if job is not None:
            self._load[lane] -= num_bytes_of(job)
            ticket.take(job, outcome)
        lane.keeps.pop(sequence, None)
        del self._running[sequence]

    def _park(self) -> bool:
        return all(lane.park() for lane in self._lanes)

    # Ending

    def cancel(self, ticket: Ticket) -> None:
        """Drop what has not begun and end soon what has; the ticket ends when nothing writes for it any more."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._cancel(list(ticket.parts))
            self._collect()

    def _cancel(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            found = self._running.get(sequence)
            if found is None:
                continue
            lane = found[1]
            waiting = [job for job in self._backlog[lane] if job.sequence == sequence]
            for job in waiting:
                self._backlog[lane].remove(job)
                self._settle(sequence, None)
            if not waiting:
                lane.cancel(sequence)

    def close(self, timeout: float = EXIT_SECONDS) -> tuple[Ticket, ...]:
        """Cancel everything and stop.  May be called again.

        Waits up to ``timeout`` seconds for steps that are running.  The tickets that are returned were not ended by
        then: a worker that is stuck in a read may still write for them, and keeps alive what they said until it ends.
        """
        self._closed = True
        if os.getpid() != self._pid:
            return ()
        with self._lock:
            self._cancel(list(self._running))
        _release(self._lanes, self._pid)
        deadline = time.monotonic() + timeout
        for lane in self._lanes:
            lane.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._collect()
            for sequence, (_, lane) in list(self._running.items()):
                if not lane.alive:
                    self._settle(sequence, None)
            self._changed.notify_all()
            orphans = dict.fromkeys(ticket for ticket, _ in self._running.values())
            self._close_descriptors()
        _open_workers.discard(self)
        return tuple(orphans)

    def _close_descriptors(self) -> None:
        # One that is in use stays: its number may be another file's a moment later.
        for lane in self._lanes:
            if not lane.alive:
                lane.close()
        if not self._readers and not self._somebody_sleeps and not any(lane.alive for lane in self._lanes):
            self._completions.close()

    def _check_open(self, name: str) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(f"{name!r} is asked for in a forked child: open a new handle there")
        if self._closed:
            raise ClosedError(f"{name!r} is asked for after the host workers were closed: open a new handle")

    def _check_alive(self, ticket: Ticket) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(f"{ticket.name!r} is waited for in a forked child: open a new handle there")
        for lane in self._lanes:
            if lane.failure is not None:
                raise StreamError(f"a host worker died: {lane.failure!r}; close this handle") from lane.failure
        if self._closed and not any(lane.alive for lane in self._lanes):
            raise ClosedError(f"{ticket.name!r} is waited for after the host workers were closed")


def _tell(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    """Resolve a future of another thread's event loop."""

    def resolve() -> None:
        if not ended.done():
            ended.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(resolve)


_open_workers: weakref.WeakSet[HostWorkers] = weakref.WeakSet()


def _release(lanes: Sequence[Lane], pid: int) -> None:
    """Let workers end.  Takes no lock: it also runs as a finaliser."""
    if os.getpid() == pid:
        for lane in lanes:
            lane.stop()


def _close_all() -> None:
    # Memory that a step still writes to may be given back at exit, so steps get a moment to end.
    for workers in list(_open_workers):
        workers.close()


atexit.register(_close_all)
