"""Packed pages: those of bfloat16 that lie in host memory take three quarters of their bytes there and over the link.

The host packs a page some time after it was written home, and the device unpacks it when it is recalled; what is in a
frame is never packed.  Nothing is lost: pages that would not be smaller stay as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch

from fmstream.core.order import Lane, Places
from fmstream.core.pages import RESIDENT, PageTable
from fmstream.device.device import Slab
from fmstream.device.lanes import Lanes
from fmstream.device.page_packing import pack_pages, unpack_pages
from fmstream.errors import MemoryBudgetError
from fmstream.payloads.kv.blocks import Ids, runs
from fmstream.payloads.kv.hostpages import HostPages
from fmstream.payloads.kv.tiers import PACKED, Tiers

RING_BYTES: Final = 64 << 20
"""Fast memory through which packed pages come: enough for what the link brings while a long kernel is in the way,"""
RING_SHARE: Final = 1 / 32
"""but no more than this part of the pool, and two pages at least."""
CHUNK_BYTES: Final = 4 << 20
"""Copied at once; what came is unpacked meanwhile."""
STEP_BYTES: Final = 16 << 20
"""Packed at once, so that no layer's turn takes the host long: some milliseconds."""
WAITING_BYTES: Final = 256 << 20
"""Pages that wait to be packed take no more host memory than this,"""
WAITING_SHARE: Final = 1 / 4
"""and than this part of what pages may take of it."""

Pack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Packs pages, uint8 [n, page_bytes], to uint8 [n, packed_bytes]; bool [n] says of which it did."""


class Packing(NamedTuple):
    """How pages are packed: the size of a packed one, and what does it."""

    packed_bytes: int
    pack: Pack = pack_pages


class _Waiting(NamedTuple):
    """Pages of consecutive numbers that are home once the lane OUT has passed a point."""

    start: int
    number: int
    point: int


class Packer:
    """Packs the pages of one table, oldest first, and brings packed ones to frames.

    Args:
        num_frames: of the pool; the fast memory that packed pages come through is small beside it.
    """

    def __init__(self, lanes: Lanes, tiers: Tiers, table: PageTable, packing: Packing, num_frames: int) -> None:
        self._lanes = lanes
        self._tiers = tiers
        self._table = table
        self._pack = packing.pack
        self._num_places = max(2, min(RING_BYTES // packing.packed_bytes, int(num_frames * RING_SHARE)))
        self._slab: Slab | None = None
        self._ring: torch.Tensor | None = None
        self._has_no_ring = False
        self._places = Places(self._num_places, lanes)
        self._chunk = max(1, min(CHUNK_BYTES // packing.packed_bytes, self._num_places // 2))
        self._next = 0
        self._waiting: deque[_Waiting] = deque()
        self._num_waiting = 0
        self._written = np.zeros(0, np.int64)
        """For each page the point behind which it was last written home."""
        self._homes = tiers.packed = HostPages(lanes, packing.packed_bytes)
        limit = WAITING_BYTES if tiers.host_limit is None else min(WAITING_BYTES, tiers.host_limit * WAITING_SHARE)
        self._most_waiting = limit // tiers.page_bytes
        tiers.make_room = self.make_room

    @property
    def packed_bytes(self) -> int:
        """Size of a packed page."""
        return self._homes.page_bytes

    @property
    def device_bytes(self) -> int:
        """Fast memory that packed pages come through; none until a page is packed."""
        return self._slab.num_bytes if self._slab is not None else 0

    # Packing

    def written(self, start: int, count: int, point: int) -> None:
        """Take note of pages that are being written to host memory: they are there behind a point of the lane OUT."""
        if len(self._written) < self._table.num_pages:
            self._written = np.pad(self._written, (0, self._table.num_pages - len(self._written)))
        self._written[start : start + count] = point
        self._waiting.append(_Waiting(start, count, point))
        self._num_waiting += count

    def work(self) -> None:
        """Pack some of the pages that have come home; the host does not wait for any."""
        most = max(1, STEP_BYTES // self._tiers.page_bytes)
        while most > 0 and self._waiting and self._lanes.has_passed(Lane.OUT, self._waiting[0].point):
            most -= self._waiting[0].number
            self._pack_oldest()

    def make_room(self, is_pressing: bool) -> None:
        """Pack all pages that wait, if they are many or nothing else makes room; the host waits until they are home."""
        if self._num_waiting > (0 if is_pressing else self._most_waiting):
            while self._waiting:
                self._lanes.join(Lane.OUT, self._waiting[0].point)
                self._pack_oldest()

    def _pack_oldest(self) -> None:
        start, count, point = self._waiting.popleft()
        self._num_waiting -= count
        pages = np.arange(start, start + count, dtype=np.int32)
        table, home = self._table, self._table.home[pages]
        # Others have been forgotten since, or written again, or are about to be.
        is_as_home = (table.state[pages] != RESIDENT) | ~table.dirty[pages]
        pages = pages[(self._written[pages] == point) & (home >= 0) & (home < PACKED) & is_as_home]
        for at, first, count in runs(self._table.home[pages]):
            if not self._pack_run(pages[at : at + count], first):
                return

    def _pack_run(self, pages: Ids, home: int) -> bool:
        """Pack pages with consecutive homes; False if there is no room for it."""
        while len(pages):
            found = self._take(len(pages))
            if found is None:
                return False
            first, count = found
            self._homes.places.join(first, count)
            fits = self._pack(self._tiers.host.rows(home, count), self._homes.rows(first, count)).numpy()
            where = np.flatnonzero(fits)
            self._table.home[pages[where]] = PACKED + first + where
            for _, at, number in runs(where):
                self._tiers.give(home + at, number)
            for _, at, number in runs(np.flatnonzero(~fits)):
                self._homes.give(first + at, number)
            pages, home = pages[count:], home + count
        return True

    def _take(self, wanted: int) -> tuple[int, int] | None:
        if not self._has_ring():
            return None  # packed pages could not come back
        found = self._homes.take(wanted)
        if found is None and self._tiers.grow(self._homes, wanted):
            found = self._homes.take(wanted)
        return found

    def _has_ring(self) -> bool:
        if self._ring is None and not self._has_no_ring:
            try:
                self._slab = self._lanes.slab(self._num_places * self.packed_bytes)
            except MemoryBudgetError:
                self._has_no_ring = True
            else:
                with torch.inference_mode(False):
                    whole = self._slab.part(0, self._num_places * self.packed_bytes).tensor
                    self._ring = whole.view(self._num_places, self.packed_bytes)
        return self._ring is not None

    # Unpacking

    def bring(self, home: int, target: torch.Tensor, claim: Callable[[int, int], None]) -> None:
        """Enqueue packed pages from consecutive homes to the device (lane UNPACK).

        Args:
            home: the first.
            target: uint8 [n, page_bytes].
            claim: called before some pages of the target, first and count, are written.
        """
        assert self._ring is not None
        first, at = home - PACKED, 0
        while at < len(target):
            place = self._next % self._num_places
            count = min(self._chunk, self._num_places - place, len(target) - at)
            self._next = place + count
            came = self._ring[place : place + count]
            self._places.claim(Lane.IN, place, count)
            self._homes.places.claim(Lane.IN, first + at, count)
            with self._lanes.on(Lane.IN):
                came.copy_(self._homes.rows(first + at, count), non_blocking=True)
            self._places.claim(Lane.UNPACK, place, count)
            claim(at, count)
            with self._lanes.on(Lane.UNPACK):
                unpack_pages(came, target[at : at + count])
            self._lanes.point(Lane.UNPACK)
            at += count
