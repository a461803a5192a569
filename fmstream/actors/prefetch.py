"""The prefetch actor: threads that bring master copies to host addresses, in the order in which they were asked for.

A *ticket* is one request: some pieces, read from files or copied from memory.  The workers take it chunk by chunk, all
of them on the earliest ticket that has chunks left.  They know addresses only: no tensor is touched here.

A worker can be stuck in a read for as long as a network drive likes.  Nothing waits for it without a bound: `abandon`
and `close` leave it behind with its *crew*.  It ends after its current chunk; until then it keeps alive what it may
still write to.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from fmstream.actors.chunks import Chunk, MoveChunk, Piece, split
from fmstream.core.ring import Record, Ring
from fmstream.core.telemetry import Span, Telemetry
from fmstream.device.direct import PAGE_BYTES
from fmstream.device.files import Staging
from fmstream.errors import ClosedError, ConfigError, ForkedError

__all__ = ["CANCELLED", "DONE", "FAILED", "Piece", "PrefetchActor", "Request"]

MAX_CHUNK_BYTES: Final = 2 << 20
"""Larger reads are no faster, and leave workers idle at the end of a ticket: one copies while another reads."""
INLINE_BYTES: Final = 256 << 10
"""Copies from memory to memory up to this size are made by the thread that asks for them."""

DONE = 0
"""Operation of a completion record: every byte of the ticket is in place."""
FAILED = 1
"""Operation of a completion record: `PrefetchActor.error` says why; some bytes may be in place."""
CANCELLED = 2
"""Operation of a completion record: the ticket was cancelled and nothing writes for it any more."""


class Request(NamedTuple):
    """Pieces, cut into chunks."""

    chunks: tuple[Chunk, ...]
    pieces: tuple[Piece, ...]


class _Job:
    """A ticket on its way.  Fields that change are guarded by the crew's lock."""

    __slots__ = ("cancelled", "chunks", "error", "keep", "name", "num_running", "ticket")

    def __init__(self, ticket: int, chunks: deque[Chunk], keep: object, name: str) -> None:
        self.ticket = ticket
        self.chunks = chunks
        self.keep = keep
        self.name = name
        self.num_running = 0
        self.cancelled = False
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        return not self.chunks and self.num_running == 0

    def let_go(self) -> None:
        """Keep nothing any more, if finished.  Called without the lock: what it frees may run code of others."""
        if self.finished:
            self.keep = None


class _Crew:
    """Worker threads and their queue.  A crew that is dismissed never reports again."""

    def __init__(
        self, num_workers: int, chunk_bytes: int, telemetry: Telemetry, done: Ring, errors: dict[int, Exception]
    ) -> None:
        self._telemetry = telemetry
        self._completions = done
        self._errors = errors
        self._lock = threading.Lock()
        # One token for each chunk.  A SimpleQueue, for `release` may run as a finaliser in the midst of any call.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._stopping = False
        self._dismissed = False
        self.failure: BaseException | None = None
        self._num_busy = 0
        self._counted_until = 0.0
        self._threads = [
            threading.Thread(
                target=self._work,
                # The second takes the unaligned ends of reads that go straight to their destination.
                args=(f"copy {index}", Staging(chunk_bytes), Staging(PAGE_BYTES)),
                name=f"fmstream copy {index}",
                daemon=True,
            )
            for index in range(num_workers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.release()
            raise

    def submit(self, job: _Job) -> None:
        num_chunks = len(job.chunks)
        with self._lock:
            assert job.ticket not in self._jobs, f"ticket {job.ticket} is on its way already"
            # Tokens first: whatever interrupts this, no job waits in the queue without its tokens.
            for _ in range(num_chunks):
                self._wake.put(None)
            self._jobs[job.ticket] = job
            self._queue.append(job)
            self._retire_if_finished(job)
        job.let_go()

    def cancel(self, tickets: Iterable[int]) -> None:
        with self._lock:
            jobs = [self._jobs[ticket] for ticket in dict.fromkeys(tickets) if ticket in self._jobs]
            for job in jobs:
                job.cancelled = True
                job.chunks.clear()
                self._retire_if_finished(job)
        for job in jobs:
            job.let_go()

    def release(self) -> None:
        """Let the threads end after their current chunk.  Takes no lock: it also runs as a finaliser."""
        self._stopping = True
        for _ in self._threads:
            self._wake.put(None)

    def dismiss(self, timeout: float) -> tuple[int, ...]:
        """Cancel everything and stop; the tickets that a worker still writes for are returned, not reported."""
        self.release()
        with self._lock:
            outstanding = tuple(self._jobs)
        self.cancel(outstanding)
        self.join(timeout)
        with self._lock:
            self._dismissed = True
            orphans = tuple(self._jobs)
            self._jobs.clear()
        return orphans

    def join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, lane: str, extent: Staging, staging: Staging) -> None:
        try:
            while True:
                self._wake.get()
                if self._stopping:
                    return
                self._work_once(lane, extent, staging)
        except BaseException as error:  # not a read's failure, which is its ticket's: nobody would hear of this one
            self.failure = error
        finally:
            extent.close()
            staging.close()

    def _work_once(self, lane: str, extent: Staging, staging: Staging) -> None:
        """Carry out the next chunk, if one is left."""
        with self._lock:
            while self._queue and not self._queue[0].chunks:
                self._queue.popleft()
            if not self._queue:
                return
            job = self._queue[0]
            chunk = job.chunks.popleft()
            job.num_running += 1
            start = time.perf_counter()
            if self._num_busy == 0:
                self._counted_until = start
            self._num_busy += 1
        error = _carry_out(chunk, extent, staging)
        with self._lock:
            self._num_busy -= 1
            job.num_running -= 1
            if not self._dismissed:
                self._count(Span(lane, job.name, start, time.perf_counter(), 0 if error else chunk.num_bytes))
                if error is not None:
                    job.error = job.error or error
                    job.chunks.clear()
                self._retire_if_finished(job)
        job.let_go()

    def _count(self, span: Span) -> None:
        # The busy time of the workers is that of their union: it goes on from where the last chunk ended.
        self._telemetry.link_seconds += span.end - self._counted_until
        self._counted_until = span.end
        self._telemetry.link_bytes += span.num_bytes
        self._telemetry.spans.append(span)

    def _retire_if_finished(self, job: _Job) -> None:
        if not job.finished:
            return
        del self._jobs[job.ticket]
        op = DONE
        if job.cancelled:
            op = CANCELLED
        elif job.error is not None:
            op = FAILED
            self._errors[job.ticket] = job.error
        self._completions.push(Record(op, 0, 0, job.ticket))


def _carry_out(chunk: Chunk, extent: Staging, staging: Staging) -> Exception | None:
    try:
        chunk.carry_out(extent, staging)
    except Exception as error:  # whatever went wrong is this ticket's failure, and goes to the one who asked
        return error
    return None


class PrefetchActor:
    """Brings pieces of homes to host addresses, in threads that start with the first request.

    Its methods may be called from any thread but its own workers.

    Attributes:
        completions: one record for each ticket when nothing writes for it any more; ``sequence`` is the ticket and
            ``op`` one of `DONE`, `FAILED`, `CANCELLED`.
    """

    def __init__(self, num_workers: int = 2, staging_bytes: int = 8 << 20, telemetry: Telemetry | None = None) -> None:
        """Prepare; no thread is started yet.

        Args:
            num_workers: threads that read and copy.
            staging_bytes: memory of all workers together for bytes whose place in the file is not aligned.
            telemetry: takes spans, busy time and bytes.

        Raises:
            ConfigError: there are no workers, or less than two pages of staging for each.
        """
        if num_workers < 1:
            raise ConfigError(f"{num_workers} prefetch workers: at least 1 is needed")
        num_pages = staging_bytes // num_workers // PAGE_BYTES
        if num_pages < 2:
            raise ConfigError(
                f"{staging_bytes} staging bytes for {num_workers} prefetch workers: "
                f"give at least {2 * PAGE_BYTES * num_workers}"
            )
        self.completions = Ring()
        self._num_workers = num_workers
        self._chunk_bytes = min((num_pages - 1) * PAGE_BYTES, MAX_CHUNK_BYTES)
        self._telemetry = Telemetry() if telemetry is None else telemetry
        self._errors: dict[int, Exception] = {}
        self._crew: _Crew | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    def prepare(self, pieces: Sequence[Piece]) -> Request:
        """Cut pieces into chunks; what comes back may be submitted as often as they are wanted at the same place."""
        return Request(tuple(split(pieces, self._chunk_bytes)), tuple(pieces))

    def submit(self, ticket: int, pieces: Sequence[Piece] | Request, keep: object, name: str) -> None:
        """Ask for pieces; returns at once.

        A small copy from memory to memory is made here and now: to hand it over would take longer.

        Args:
            ticket: a number that no other request on its way has.
            pieces: what to bring where; destinations must not overlap.
            keep: what keeps the destinations alive; let go once nothing writes to them.
            name: what the timeline shows.

        Raises:
            ClosedError: the actor is closed.
            ForkedError: this process is a child of the one that made the actor.
        """
        request = pieces if isinstance(pieces, Request) else self.prepare(pieces)
        if os.getpid() != self._pid:
            raise ForkedError(f"{name!r} is asked for in a forked child: open a new handle there")
        if self._closed:
            raise ClosedError(f"{name!r} is asked for after the prefetch actor was closed")
        if len(request.chunks) == 1 and isinstance(request.chunks[0], MoveChunk):
            chunk = request.chunks[0]
            if chunk.num_bytes <= INLINE_BYTES:
                self._carry_out_here(ticket, chunk, name)
                return
        job = _Job(ticket, deque(request.chunks), (keep, request.pieces), name)
        with self._lock:
            if self._crew is None:
                self._start_crew()
            assert self._crew is not None
            self._crew.submit(job)

    def _carry_out_here(self, ticket: int, chunk: MoveChunk, name: str) -> None:
        start = time.perf_counter()
        for part in chunk.parts:
            ctypes.memmove(part.dst, part.source, part.num_bytes)
        end = time.perf_counter()
        telemetry = self._telemetry
        telemetry.link_seconds += end - start
        telemetry.link_bytes += chunk.num_bytes
        telemetry.spans.append(Span("copy 0", name, start, end, chunk.num_bytes))
        self.completions.push(Record(DONE, 0, 0, ticket))

    def cancel(self, tickets: Iterable[int]) -> None:
        """Drop what has not begun; each ticket is reported as cancelled when none of its chunks is running.

        Tickets that have been reported, or were never given, are passed over.
        """
        crew = self._crew
        if crew is not None and os.getpid() == self._pid:
            crew.cancel(tickets)

    def error(self, ticket: int) -> Exception | None:
        """Why a ticket failed, or None if it has not."""
        return self._errors.get(ticket)

    @property
    def failure(self) -> BaseException | None:
        """What a worker died of, None while all live."""
        crew = self._crew
        return None if crew is None else crew.failure

    def abandon(self) -> tuple[int, ...]:
        """Leave the workers to end on their own; the next request starts new ones.

        Every ticket on its way is cancelled.  Those for which a worker is still writing are returned, and no record
        comes for them: their memory is kept until the worker is done with it.
        """
        return self._dismiss(timeout=0.0)

    def close(self, timeout: float = 1.0) -> tuple[int, ...]:
        """Stop, and close ``completions`` behind the last record.  May be called again.

        Waits up to ``timeout`` seconds for running chunks, then leaves them behind and returns their tickets, as
        `abandon` does.
        """
        self._closed = True
        orphans = self._dismiss(timeout)
        if os.getpid() == self._pid:
            self.completions.close()
        return orphans

    def _start_crew(self) -> None:
        self._crew = _Crew(self._num_workers, self._chunk_bytes, self._telemetry, self.completions, self._errors)
        # For an actor that is dropped without being closed, and at exit.
        self._release = weakref.finalize(self, self._crew.release)

    def _dismiss(self, timeout: float) -> tuple[int, ...]:
        # A forked child has no workers, and a lock may be held there for ever by a thread that it does not have.
        if os.getpid() != self._pid:
            return ()
        with self._lock:
            crew, self._crew = self._crew, None
        if crew is None:
            return ()
        self._release.detach()
        return crew.dismiss(timeout)
