"""The lock-free ring with a face for Python: one end may be native code, or another process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fmstream.core import _native
from fmstream.core.ring import Record, RingClosed
from fmstream.core.wake import Wake, open_wake, wait

ALIGNMENT: Final = 128
"""Two cache lines: processors fetch lines in pairs."""
_SLICE_SECONDS: Final = 0.1
_BATCH: Final = 64


class Block:
    """Zeroed int64 words at an address that is a multiple of 128, in memory of its own or in a given buffer.

    Attributes:
        address: where the words begin.
        words: the words, as an array.
    """

    def __init__(self, num_bytes: int, buffer: Any = None) -> None:
        self._memory = np.zeros(num_bytes + ALIGNMENT, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
        start = -int(self._memory.ctypes.data) % ALIGNMENT
        assert start + num_bytes <= len(self._memory), "the buffer is too small"
        self.words: NDArray[np.int64] = self._memory[start : start + num_bytes].view(np.int64)
        self.address = int(self.words.ctypes.data)


def ring_bytes(capacity: int) -> int:
    """Bytes of a ring for ``capacity`` records, a power of two."""
    assert capacity > 0
    assert capacity & (capacity - 1) == 0, f"{capacity} is no power of two"
    return _native.SLOTS + capacity * _native.RECORD_BYTES


class NativeRing:
    """A bounded first-in first-out ring of records with one producer and one consumer, as `Ring` without locks.

    One thread may push and one may pop, in this process or, with ``buffer``, in two.  Pushing never waits.

    Attributes:
        address: where the ring lies, for native code.
        capacity: how many records fit.
    """

    def __init__(self, capacity: int, buffer: Any = None, wake: Wake | None = None) -> None:
        """Make a ring, or look at one that another process made in the same buffer.

        Args:
            capacity: a power of two.
            buffer: ``ring_bytes(capacity)`` bytes and `ALIGNMENT` more, zeroed at first, that both processes see; None
                for memory of its own.
            wake: what to signal when the consumer sleeps; None for a new one.  Two processes have none in common: their
                consumer must not wait.
        """
        self._block = Block(ring_bytes(capacity), buffer)
        self._block.words[_native.MASK // 8] = capacity - 1
        self.address = self._block.address
        self.capacity = capacity
        self._wake = open_wake() if wake is None else wake
        self._out = Block(_BATCH * _native.RECORD_BYTES)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __len__(self) -> int:
        """Records waiting, as of some moment during the call."""
        words = self._block.words
        head = int(words[_native.HEAD // 8])  # first: tail never falls behind it
        return int(words[_native.TAIL // 8]) - head

    def push(self, record: Record) -> bool:
        """Append a record; False if the ring is full; raises `RingClosed` after `close`."""
        self._raise_if_closed()
        pushed = bool(_native.push(self.address, *record))
        if pushed and _native.must_wake(self.address):
            self._wake.signal()
        return pushed

    def push_many(self, records: Iterable[Record]) -> int:
        """Append as many records as fit, all at once; returns how many."""
        self._raise_if_closed()
        source = np.array(list(records), np.int64)
        pushed = int(_native.push_many(self.address, source.ctypes.data, len(source)))
        if pushed and _native.must_wake(self.address):
            self._wake.signal()
        return pushed

    def pop(self, timeout: float | None = None) -> Record | None:
        """The oldest record; None after ``timeout`` seconds without one (None: wait on), or if closed and empty."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not _native.pop_many(self.address, self._out.address, 1):
            left = _SLICE_SECONDS if deadline is None else min(_SLICE_SECONDS, deadline - time.monotonic())
            if left <= 0 or (self._closed and not len(self)):
                return None
            if not self._closed and _native.park(self.address):
                wait(self._wake, left)
        return Record(*self._out.words[:4].tolist())

    def pop_many(self, limit: int) -> list[Record]:
        """Up to ``limit`` records, oldest first, without waiting."""
        records: list[Record] = []
        while len(records) < limit:
            count = _native.pop_many(self.address, self._out.address, min(_BATCH, limit - len(records)))
            if not count:
                break
            records += _records(self._out.words[: 4 * count])
        return records

    def close(self) -> None:
        """Refuse further records from this end and wake the consumer.  Closing twice is the same as once."""
        self._closed = True
        self._wake.signal()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise RingClosed("the ring is closed: its consumer has stopped; open a new handle")


def _records(words: NDArray[np.int64]) -> Sequence[Record]:
    return [Record(*row) for row in words.reshape(-1, 4).tolist()]
