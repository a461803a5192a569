"""Pinned host memory: what is pinned, and how much that counts against the cap."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from threading import RLock
from typing import Literal, Protocol

from fmstream.errors import ConfigError, FmstreamError

PinnedRounding = Literal["exact", "power2"]


class PinError(FmstreamError, RuntimeError):
    """Host memory cannot be pinned or unpinned."""


class Watch(Protocol):
    """What pinned memory tells the machine."""

    def pinned(self, address: int, num_bytes: int) -> None:
        """A range is followed from now on."""

    def unpinning(self, address: int, num_bytes: int) -> None:
        """A range is about to be unpinned by hand: nothing may be using it."""

    def unpinned(self, address: int) -> None:
        """A range is followed no more."""


class Pinned:
    """The pinned ranges of host memory.

    ``cap`` bytes may be pinned, None for no limit.  With rounding "power2" a range counts as the power of two that
    holds it, as in PyTorch's caching host allocator; with "exact" as what it is.
    """

    def __init__(self, watch: Watch, lock: RLock, cap: int | None, rounding: PinnedRounding) -> None:
        if rounding not in ("exact", "power2"):
            raise ConfigError(f"pinned_rounding={rounding!r} is neither 'exact' nor 'power2'")
        self.cap = cap
        self.peak_bytes = 0
        self._watch = watch
        self._lock = lock
        self._rounding = rounding
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, int]] = {}
        """Bytes and charge by address."""
        self._charged = 0
        self._dead: deque[int] = deque()

    @property
    def charged_bytes(self) -> int:
        """What counts against the cap."""
        self._tidy()
        return self._charged

    def register(self, address: int, nbytes: int, *, exact: bool = False) -> None:
        """Pin a range; ``exact`` whatever the rounding, as ``cudaHostRegister`` does.

        Raises PinError if it passes the cap, or overlaps a range that is pinned.
        """
        with self._lock:
            self._reap()
            charge = nbytes if exact or self._rounding == "exact" else 1 << max(0, nbytes - 1).bit_length()
            if nbytes < 1:
                raise PinError(f"{nbytes} bytes of host memory cannot be pinned: there must be at least 1")
            if self.cap is not None and self._charged + charge > self.cap:
                raise PinError(
                    f"{charge} bytes more cannot be pinned: {self._charged} are, of at most {self.cap}; pin less, or "
                    f"give the machine a greater pinned_cap"
                )
            index = bisect_right(self._starts, address + nbytes - 1)
            if index and self._end(self._starts[index - 1]) > address:
                raise PinError(f"{nbytes} bytes cannot be pinned: some of them are already; unregister those first")
            insort(self._starts, address)
            self._ranges[address] = nbytes, charge
            self._charged += charge
            self.peak_bytes = max(self.peak_bytes, self._charged)
            self._watch.pinned(address, nbytes)

    def unregister(self, address: int) -> None:
        """Unpin the range that begins at ``address``; it is reported if a copy may still be using it.

        Raises PinError if none begins there.
        """
        with self._lock:
            self._reap()
            if address not in self._ranges:
                raise PinError("no pinned range begins at the address given; unregister takes what was registered")
            self._watch.unpinning(address, self._ranges[address][0])
            self._drop(address)

    def release(self, address: int) -> None:
        """Note the end of a pinned allocation, at any moment: copies from and to it may still be on their way."""
        self._dead.append(address)
        self._tidy()

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether all of a range is pinned."""
        self._tidy()
        end = address + max(nbytes, 1)
        index = bisect_right(self._starts, address)
        while index and self._end(self._starts[index - 1]) > address:
            address = self._end(self._starts[index - 1])
            if address >= end:
                return True
            index += 1
            if index > len(self._starts) or self._starts[index - 1] != address:
                return False
        return False

    def reset_peak(self) -> None:
        """Let the peak begin at what is pinned now."""
        self.peak_bytes = self.charged_bytes

    def _tidy(self) -> None:
        if self._dead and not self._lock._is_owned():  # type: ignore[attr-defined]
            with self._lock:
                self._reap()

    def _reap(self) -> None:
        while self._dead:
            address = self._dead.popleft()
            if address in self._ranges:
                self._drop(address)

    def _drop(self, address: int) -> None:
        self._charged -= self._ranges.pop(address)[1]
        self._starts.remove(address)
        self._watch.unpinned(address)

    def _end(self, start: int) -> int:
        return start + self._ranges[start][0]
