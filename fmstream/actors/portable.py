"""A worker that is a Python thread: for platforms where the native one cannot be had.

Copies, reads and gathers do not hold the GIL, but beginning and ending each does.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import time
from collections import deque
from typing import Final

import numpy as np

from fmstream.core.jobs import BAD_ID, END_OF_FILE, Job, Op, Outcome, Status
from fmstream.core.wake import Wake
from fmstream.device.direct import view_of

STEP_BYTES: Final = 8 << 20
"""Bytes after which a job looks whether it is cancelled."""


class PortableLane:
    """One worker thread, its jobs and its outcomes; see `fmstream.actors.lanes.Lane`."""

    native = False

    def __init__(self, name: str, completions: Wake) -> None:
        self.failure: BaseException | None = None
        self.keeps: dict[int, object] = {}
        self._completions = completions
        self._demand: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._outcomes: deque[Outcome] = deque()
        self._cancelled: set[int] = set()
        # Between this thread and that of the worker: whether the one who waits would see the next outcome.
        self._lock = threading.Lock()
        self._parked = False
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the worker still runs."""
        return self._thread.is_alive()

    def post(self, job: Job) -> bool:
        """Hand a job over; always taken."""
        self._jobs[job.sequence] = job
        self._demand.put(job.sequence)
        return True

    def cancel(self, sequence: int) -> None:
        """Let a job end as soon as it can."""
        self._cancelled.add(sequence)

    def peek(self) -> list[Outcome]:
        """Outcomes that have not been released, oldest first."""
        return list(self._outcomes)

    def release(self, count: int) -> None:
        """Forget the ``count`` oldest outcomes."""
        for _ in range(count):
            self._cancelled.discard(self._outcomes.popleft().sequence)

    def park(self) -> bool:
        """Ask to be signalled at the next outcome; False if there is one already."""
        with self._lock:
            self._parked = not self._outcomes
            return self._parked

    def stop(self) -> None:
        """Let the worker end after the step that it is in.  Takes no lock: it also runs as a finaliser."""
        self._stopping = True
        self._demand.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the worker's end."""
        self._thread.join(timeout)

    def close(self) -> None:
        """Nothing to give back."""

    def _serve(self) -> None:
        last = 0
        try:
            while (sequence := self._demand.get()) is not None and not self._stopping:
                if sequence > last:  # else posted twice, for posting was interrupted
                    last = sequence
                    self._finish(self._carry_out(self._jobs.pop(last)))
        except BaseException as error:  # nobody would hear of it
            self.failure = error

    def _finish(self, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes.append(outcome)
            parked, self._parked = self._parked, False
        if parked:
            self._completions.signal()

    def _carry_out(self, job: Job) -> Outcome:
        start = time.perf_counter_ns()
        steps = {Op.GATHER: self._gather, Op.COPY: self._copy, Op.READ: self._read, Op.FILL: self._fill}[job.op]
        status, detail, place = steps(job)
        return Outcome(status, detail, place, job.sequence, start, time.perf_counter_ns())

    def _dropped(self, job: Job) -> bool:
        return self._stopping or job.sequence in self._cancelled

    def _gather(self, job: Job) -> _End:
        count, table, row_bytes, ids, destination, num_rows = job.words
        indices = np.frombuffer(view_of(ids, 8 * count, writable=False), np.int64)
        if num_rows:
            bad = np.flatnonzero((indices < 0) | (indices >= num_rows))
            if len(bad):
                return Status.FAILED, BAD_ID, int(bad[0])
        table_bytes = row_bytes * (int(indices.max()) + 1)
        rows = np.frombuffer(view_of(table, table_bytes, writable=False), np.uint8).reshape(-1, row_bytes)
        target = np.frombuffer(view_of(destination, row_bytes * count), np.uint8).reshape(-1, row_bytes)
        step = max(1, STEP_BYTES // row_bytes)
        for first in range(0, count, step):
            if self._dropped(job):
                return _CANCELLED
            part = slice(first, first + step)
            np.take(rows, indices[part], axis=0, out=target[part], mode="clip")
        return _DONE

    def _copy(self, job: Job) -> _End:
        num_bytes, source, destination = job.words
        for done in range(0, num_bytes, STEP_BYTES):
            if self._dropped(job):
                return _CANCELLED
            ctypes.memmove(destination + done, source + done, min(STEP_BYTES, num_bytes - done))
        return _DONE

    def _fill(self, job: Job) -> _End:
        num_bytes, destination, value = job.words
        for done in range(0, num_bytes, STEP_BYTES):
            if self._dropped(job):
                return _CANCELLED
            ctypes.memset(destination + done, value, min(STEP_BYTES, num_bytes - done))
        return _DONE

    def _read(self, job: Job) -> _End:
        num_bytes, fd, offset, destination = job.words
        done = 0
        while done < num_bytes:
            if self._dropped(job):
                return _CANCELLED
            try:
                got = read_at(fd, destination + done, offset + done, min(STEP_BYTES, num_bytes - done))
            except OSError as error:
                return Status.FAILED, error.errno or 0, offset + done
            if got == 0:
                return Status.FAILED, END_OF_FILE, offset + done
            done += got
        return _DONE


_End = tuple[Status, int, int]
_DONE: Final[_End] = (Status.DONE, 0, 0)
_CANCELLED: Final[_End] = (Status.CANCELLED, 0, 0)

if sys.platform == "win32":
    _seeking = threading.Lock()

    def read_at(fd: int, address: int, offset: int, num_bytes: int) -> int:
        """Read at an offset of a file to a host address; returns the bytes read, 0 at the file's end."""
        with _seeking:  # there are no positional reads
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, num_bytes)
        ctypes.memmove(address, data, len(data))
        return len(data)

else:

    def read_at(fd: int, address: int, offset: int, num_bytes: int) -> int:
        """Read at an offset of a file to a host address; returns the bytes read, 0 at the file's end."""
        return os.preadv(fd, [view_of(address, num_bytes)], offset)
