"""Threads that call stages on the host: Python code of the user's, beside the thread that computes.

Jobs begin in the order in which they were submitted.  With one thread each ends before the next begins, so a stage that
remembers what it saw sees it in that order; a failure stops those behind it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from fmstream.errors import ForkedError

SLICE_SECONDS: Final = 0.1
"""Longest single wait, between which Ctrl-C and cancellation are seen."""
CLOSE_SECONDS: Final = 1.0
"""How long closing waits for a stage that is running."""


class Job:
    """One piece of work.

    Attributes:
        done: whether nothing works on it any more.
        carried_out: whether it ended without an error.
        error: what it raised.
    """

    __slots__ = ("_wake", "carried_out", "done", "error", "number", "work")

    def __init__(self, work: Callable[[str], object]) -> None:
        self.work = work
        self.number = 0
        self.done = False
        self.carried_out = False
        self.error: BaseException | None = None
        # Not a `threading.Event`: an interrupt in the midst of its waiting leaves its lock in the wrong state.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def finish(self) -> None:
        """Note that nothing works on it any more."""
        self.done = True
        self._wake.put(None)

    def wait(self, timeout: float) -> bool:
        """Wait until it is done, in one thread; whether it is."""
        if not self.done:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=timeout)
        return self.done


class StagePool:
    """Daemon threads that do jobs; they start with the first one.

    A pool that was released does what it has begun and nothing else.

    Args:
        num_threads: how many there are.
        settle: called by each thread when it ends, before it lets go of its last job.
        last: called when no thread is at work any more: by the last one to end, or by whoever releases a pool without
            threads.
    """

    def __init__(self, num_threads: int, settle: Callable[[], None], last: Callable[[], None]) -> None:
        self._num_threads = num_threads
        self._settle = settle
        self._last = last
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Reentrant: `release` also runs as a finaliser, in the midst of any call.
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._alive: set[threading.Lock] = set()
        """The claims of threads that have begun, or are about to: whoever takes a claim first, the thread or the one
        that was interrupted while it started it, says whether it runs."""
        self._left: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._released = False
        self._is_over = False
        self._num_submitted = 0
        self._failed_at: int | None = None
        """Number of the first job that failed; later ones are not begun any more."""
        self._pid = os.getpid()

    def submit(self, job: Job) -> None:
        """Do a job after those before it.

        Raises:
            ForkedError: this process is a child of the one that made the pool.
        """
        if os.getpid() != self._pid:
            raise ForkedError("a host stage is asked for in a forked child: begin another run there")
        job.number = self._num_submitted
        self._num_submitted += 1
        self._queue.put(job)
        while len(self._threads) < self._num_threads and not self._released:
            self._start(f"host {len(self._threads)}")

    def _start(self, lane: str) -> None:
        claim = threading.Lock()
        thread = threading.Thread(target=self._work, args=(lane, claim), name=f"fmstream {lane}", daemon=True)
        try:
            self._alive.add(claim)
            thread.start()
        except BaseException:
            if claim.acquire(blocking=False):
                self._leave(claim)
            raise
        self._threads.append(thread)

    def release(self) -> None:
        """Let the threads end after what they are doing.  Takes no lock that is held for long; may be repeated."""
        if os.getpid() != self._pid:
            return
        self._released = True
        for _ in range(self._num_threads + 1):
            self._queue.put(None)
        self._end_if_last()

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Release, and wait for the threads; whether all have ended."""
        if os.getpid() != self._pid:
            return True
        self.release()
        deadline = time.monotonic() + timeout
        while self._alive and (seconds := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._left.get(timeout=seconds)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self._alive

    def _work(self, lane: str, claim: threading.Lock) -> None:
        if not claim.acquire(blocking=False):
            return
        job: Job | None = None
        try:
            while not self._released:
                job = None  # an idle thread keeps no tensor alive
                job = self._queue.get()
                if job is None or self._released:
                    return
                if self._failed_at is None or job.number < self._failed_at:
                    self._carry_out(job, lane)
                job.finish()
        finally:
            self._settle()  # whoever waited for the job may have given up, and copies to its memory are under way
            del job
            self._leave(claim)

    def _carry_out(self, job: Job, lane: str) -> None:
        try:
            job.work(lane)
            job.carried_out = True
        except BaseException as error:  # whatever the stage raised is told where its result is waited for
            job.error = error
            with self._lock:
                if self._failed_at is None or job.number < self._failed_at:
                    self._failed_at = job.number

    def _leave(self, claim: threading.Lock) -> None:
        self._alive.discard(claim)
        try:
            self._end_if_last()
        finally:
            self._left.put(None)

    def _end_if_last(self) -> None:
        with self._lock:
            is_last = self._released and not self._alive and not self._is_over
            self._is_over = self._is_over or is_last
        if is_last:
            self._last()
