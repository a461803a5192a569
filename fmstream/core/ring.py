"""The ring over which actors talk: fixed records, many ends, one way to close."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from fmstream.errors import ClosedError

_SLICE_SECONDS = 0.1
"""Longest single wait: on Windows a lock that blocks cannot be interrupted, so Ctrl-C is seen between slices."""


class Record(NamedTuple):
    """One message: an operation on a page in a frame; ``sequence`` is chosen by the sender and comes back."""

    op: int
    page: int
    frame: int
    sequence: int


class RingClosed(ClosedError):
    """A record was pushed into a ring that is closed."""


class Ring:
    """An unbounded first-in first-out ring of records between Python threads.

    Any thread may call any method.  After `close` the records already in it can still be popped; then `pop` returns
    None at once, whatever its timeout.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        # Makes "check closed, then put" one step.  Reentrant: a finaliser may push while its thread is pushing.
        self._lock = threading.RLock()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __len__(self) -> int:
        """Records waiting, as of some moment during the call."""
        return max(0, self._queue.qsize() - self._closed)

    def push(self, record: Record) -> None:
        """Append a record; raises `RingClosed` after `close`."""
        with self._lock:
            self._raise_if_closed()
            self._queue.put(record)

    def push_many(self, records: Iterable[Record]) -> None:
        """Append records with none of another thread between them; raises `RingClosed` after `close`."""
        with self._lock:
            self._raise_if_closed()
            for record in records:
                self._queue.put(record)

    def pop(self, timeout: float | None = None) -> Record | None:
        """The oldest record; None after ``timeout`` seconds without one (None: wait on), or if closed and empty."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = _SLICE_SECONDS if deadline is None else min(_SLICE_SECONDS, deadline - time.monotonic())
            try:
                record = self._queue.get(timeout=wait) if wait > 0 else self._queue.get_nowait()
            except queue.Empty:
                if wait <= 0:
                    return None
                continue
            if record is None:
                self._queue.put(None)  # the mark goes on to the next consumer
            return record

    def pop_many(self, limit: int) -> list[Record]:
        """Up to ``limit`` records, oldest first, without waiting."""
        records: list[Record] = []
        while len(records) < limit:
            record = self.pop(0.0)
            if record is None:
                break
            records.append(record)
        return records

    def close(self) -> None:
        """Refuse further records and wake every consumer.  Closing twice is the same as once."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)  # behind all records: no push can follow it

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise RingClosed("the ring is closed: its consumer has stopped; open a new handle")
