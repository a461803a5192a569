"""Pinned host memory through which bytes that lie elsewhere go to an accelerator."""

from __future__ import annotations

from collections import deque
from typing import Final

import torch

from fmstream.core.arena import Window, num_pages
from fmstream.device.accelerator import Accelerator, Mark
from fmstream.device.pinned import PinnedBlock

PAGE_BYTES: Final = 4096
"""Stretches begin at such addresses, as reads that bypass the page cache want it."""


class StagingRing:
    """Stretches of pinned memory that are taken and given back in one order.

    A stretch that was left is free once the device has passed the mark it was left with.  Not thread-safe.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._block: PinnedBlock | None = None
        self._window = Window(0)
        self._taken: deque[int] = deque()
        self._left: dict[int, Mark | None] = {}

    @property
    def block(self) -> PinnedBlock:
        """The memory, which there is once something was taken."""
        assert self._block is not None
        return self._block

    @property
    def is_used(self) -> bool:
        """Whether a stretch is taken."""
        return bool(self._taken)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self._block.num_bytes if self._block is not None else 0

    def take(self, num_bytes: int, wanted: int) -> int | None:
        """Take a stretch; None while there is no room.  ``wanted`` is how large the whole should be."""
        self._reclaim()
        count = num_pages(num_bytes, PAGE_BYTES)
        if not self._taken and self.num_bytes < wanted:
            self.drop()
            self._block = self._device.pins.allocate(max(wanted, count * PAGE_BYTES))
            self._window = Window(self._block.num_bytes // PAGE_BYTES)
        if count > self._window.num_frames:
            return None
        place = self._window.reserve(count)
        if place is not None:
            self._taken.append(place)
        return place

    def address(self, place: int) -> int:
        """Where a stretch begins."""
        return self.block.address + self._window.frame_of(place) * PAGE_BYTES

    def bytes(self, place: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of a stretch."""
        offset = self._window.frame_of(place) * PAGE_BYTES
        return self.block.tensor[offset : offset + num_bytes]

    def leave(self, place: int, mark: Mark | None) -> None:
        """Give a stretch back; the device reads it until ``mark``, or not at all."""
        self._left[place] = mark

    def wait(self) -> None:
        """Wait on the host until the device has read the oldest stretch, which was left."""
        mark = self._left[self._taken[0]]
        if mark is not None:
            mark.event.synchronize()

    def _reclaim(self) -> None:
        """Free what was left and is not being read, from the oldest on."""
        while self._taken and self._taken[0] in self._left:
            mark = self._left[self._taken[0]]
            if mark is not None and not mark.event.query():
                return
            place = self._taken.popleft()
            del self._left[place]
            self._window.release(place)

    def is_whole(self, num_held: int) -> bool:
        """Whether every stretch that is taken is known: it was left, or is one of those that the caller holds."""
        return self._window.num_runs == len(self._taken) == len(self._left) + num_held

    def drop(self) -> None:
        """Give the memory up, once the device has read what it is to read there.

        A read from a file that still goes on keeps the memory, but not its registration.
        """
        if self._block is not None:
            self._device.pins.free(self._block)
        self._block, self._window = None, Window(0)
        self._taken.clear()
        self._left.clear()
