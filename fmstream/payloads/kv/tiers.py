"""Where pages lie that are not in frames: host memory first, then a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch

from fmstream.core.freeruns import FreeRuns
from fmstream.core.order import Lane, Places
from fmstream.device.lanes import HostBlock, Lanes
from fmstream.device.pagefile import PageFile
from fmstream.errors import MemoryBudgetError, StreamError
from fmstream.payloads import budget
from fmstream.payloads.kv.filereads import FileReads
from fmstream.payloads.kv.hostpages import HostPages

SMALLEST_BLOCK_BYTES: Final = 1 << 20
LARGEST_BLOCK_BYTES: Final = 256 << 20
"""Host memory is taken in blocks between these sizes, each as large as all before,"""
BLOCK_SHARE: Final = 1 / 4
"""and if that is more than the smallest no larger than this part of all that may be taken, unless more is needed."""
TRANSIT_BYTES: Final = 8 << 20
"""Host memory through which pages go to the file, and are fetched from it at once, at most,"""
TRANSIT_PAGES: Final = 8
"""and in pages."""
FLOOR_SHARE: Final = 0.05
"""Part of the host memory that is free at first, within the limits of the control groups, which is left free."""
PACKED: Final = 1 << 39
"""Homes from this number on are packed pages in host memory,"""
FILE: Final = 1 << 40
"""and from this number on pages of the file."""


class TierCounts(NamedTuple):
    """Pages by tier, those in host memory that are packed among them, and bytes that went between host and file."""

    host_pages: int
    packed_pages: int
    file_pages: int
    host_bytes: int
    file_written_bytes: int
    file_read_bytes: int


class Tiers:
    """Homes of pages of one size: those below `FILE` are places in host memory, those from there on pages of the file.

    Pages stay in the tier that they were put in first: a cache is read in full at every step, so that no page is hotter
    than another.
    Copies are enqueued on the lanes; the host waits for what goes to the file, and for what comes from it only where it
    is needed before a worker has read it.

    Args:
        page_bytes: size of a page.
        host_limit: bytes of host memory that may be taken; None leaves only the floor.
        spill_dir: folder of the file; None does without.
        note: takes a sentence for the user.
    """

    def __init__(
        self,
        lanes: Lanes,
        page_bytes: int,
        host_limit: int | None,
        spill_dir: str | os.PathLike[str] | None,
        note: Callable[[str], None],
    ) -> None:
        self.page_bytes = page_bytes
        self._lanes = lanes
        self.host_limit = host_limit
        self._spill_dir = spill_dir
        self._note = note
        self.host = HostPages(lanes, page_bytes)
        self.packed: HostPages | None = None
        """Packed pages, where there are any."""
        self.make_room: Callable[[bool], None] | None = None
        """Asked to free places in host memory before more of it is taken; with True before the file is used."""
        self._file: PageFile | None = None
        self._file_free = FreeRuns()
        self._file_pages = 0
        self._transit: HostBlock | None = None
        self._transit_places = Places(0, lanes)
        self._transit_next = 0
        self._file_used = 0
        self._reads: FileReads | None = None
        self._written = 0
        self._told = False
        self._floor = int(budget.available_bytes() * FLOOR_SHARE)

    # Homes

    def take(self, wanted: int) -> tuple[int, int]:
        """Consecutive homes for up to ``wanted`` pages: (first, count).

        Raises:
            MemoryBudgetError: neither tier has room.
        """
        found = self.host.take(wanted) or self._take_freed(wanted, is_pressing=False)
        if found is None and self.grow(self.host, wanted):
            found = self.host.take(wanted)
        found = found or self._take_freed(wanted, is_pressing=True)
        if found is not None:
            return found
        if self._spill_dir is None:
            raise MemoryBudgetError(self._full("there is no file tier"))
        found = self._file_free.take(wanted)
        if found is None:
            found = self._file_pages, wanted
            self._file_pages += wanted
        self._file_used += found[1]
        return FILE + found[0], found[1]

    def _take_freed(self, wanted: int, *, is_pressing: bool) -> tuple[int, int] | None:
        if self.make_room is None:
            return None
        self.make_room(is_pressing)
        return self.host.take(wanted)

    def give(self, home: int, count: int) -> None:
        """Forget what lies in consecutive homes."""
        if home >= FILE:
            self._file_free.give(home - FILE, count)
            self._file_used -= count
        elif home >= PACKED:
            assert self.packed is not None
            self.packed.give(home - PACKED, count)
        else:
            self.host.give(home, count)

    def grow(self, pages: HostPages, wanted: int) -> bool:
        """Take more host memory for pages, if the limit and the floor allow one of them."""
        left = budget.available_bytes() - self._floor
        size = min(max(pages.num_bytes, SMALLEST_BLOCK_BYTES), LARGEST_BLOCK_BYTES)
        if self.host_limit is not None:
            left = min(left, self.host_limit - self._host_taken())
            size = max(min(size, int(self.host_limit * BLOCK_SHARE)), SMALLEST_BLOCK_BYTES)
        num_pages = min(left, max(size, wanted * pages.page_bytes)) // pages.page_bytes
        if num_pages < 1:
            return False
        try:
            memory = pages.add(num_pages)
        except OSError:  # the system gives none, whatever it said is free
            return False
        if not memory.pinned:
            self._tell(
                f"the system refused to pin {memory.num_bytes} bytes for KV pages: they are copied from pageable "
                "memory, which is slower and lets the host wait (raise the limit of locked memory)"
            )
        return True

    def _host_taken(self) -> int:
        return self.host.num_bytes + (self.packed.num_bytes if self.packed is not None else 0)

    def _tell(self, sentence: str) -> None:
        if not self._told:
            self._told = True
            self._note(sentence)

    def _full(self, last: str) -> str:
        taken = self._host_taken()
        limit = "all but its floor" if self.host_limit is None else f"{self.host_limit} bytes"
        return (
            f"no room for another page of {self.page_bytes} bytes of keys and values: the frames on "
            f"{self._lanes.torch_device} are all in use, the host tier holds {taken} bytes of {limit}, and {last}: "
            "give a spill_dir with room, more host memory (kv_host_memory), or a larger kv_cache_max_pages"
        )

    # Copies

    def write(self, source: torch.Tensor, home: int) -> None:
        """Enqueue pages, uint8 [n, page_bytes] on the device, to consecutive homes (lane OUT)."""
        if home < FILE:
            assert home < PACKED, f"home {home} holds a packed page"
            self.host.places.claim(Lane.OUT, home, source.shape[0])
            with self._lanes.on(Lane.OUT):
                self.host.rows(home, source.shape[0]).copy_(source, non_blocking=True)
            return
        for at, count, place, rows, address in self._in_transit(source.shape[0]):
            self._transit_places.claim(Lane.OUT, place, count)
            with self._lanes.on(Lane.OUT):
                rows.copy_(source[at : at + count], non_blocking=True)
            self._transit_places.join(place, count)
            try:
                had_room = self._open().write(address, home - FILE + at, count)
            except OSError as error:
                raise StreamError(
                    f"the file tier of keys and values in {self._spill_dir} cannot be written ({error}): look at that "
                    "disk, or give another spill_dir"
                ) from error
            if not had_room:
                raise MemoryBudgetError(self._full(f"the disk of {self._spill_dir} is full"))
            self._written += count * self.page_bytes

    def read(self, home: int, target: torch.Tensor) -> None:
        """Enqueue pages from consecutive homes to uint8 [n, page_bytes] on the device (lane IN); none is packed.

        The host waits for those in the file; `reads` lets it go on.
        """
        if home >= FILE:
            for at, count, place, rows, address in self._in_transit(target.shape[0]):
                self._transit_places.join(place, count)
                self.reads.fetch(home - FILE + at, address, count)
                self._transit_places.claim(Lane.IN, place, count)
                with self._lanes.on(Lane.IN):
                    target[at : at + count].copy_(rows, non_blocking=True)
            return
        assert home < PACKED, f"home {home} holds a packed page"
        self.host.places.claim(Lane.IN, home, target.shape[0])
        with self._lanes.on(Lane.IN):
            target.copy_(self.host.rows(home, target.shape[0]), non_blocking=True)

    @property
    def reads(self) -> FileReads:
        """What comes from the file."""
        if self._reads is None:
            self._reads = FileReads(self._lanes, self.page_bytes, self._open())
        return self._reads

    def _in_transit(self, num_pages: int) -> Iterator[tuple[int, int, int, torch.Tensor, int]]:
        """Cut pages into what transit takes at once: (first, count, place, rows of host memory, their address)."""
        size = max(1, min(TRANSIT_PAGES, TRANSIT_BYTES // self.page_bytes))
        if self._transit is None:
            self._transit = self._lanes.block(size * self.page_bytes)
            self._transit_places.grow(size)
        at = 0
        while at < num_pages:
            # In halves, so that the host writes one while the other is on its way.
            place = self._transit_next % size
            count = min(max(1, size // 2), size - place, num_pages - at)
            self._transit_next = place + count
            start = place * self.page_bytes
            rows = self._transit.tensor[start : start + count * self.page_bytes].view(count, self.page_bytes)
            yield at, count, place, rows, rows.data_ptr()
            at += count

    def _open(self) -> PageFile:
        if self._file is None:
            assert self._spill_dir is not None
            self._file = PageFile(self._spill_dir, self.page_bytes)
        return self._file

    # Books

    def counts(self) -> TierCounts:
        """What the tiers hold now."""
        packed = self.packed.num_used if self.packed is not None else 0
        read = self._reads.num_bytes if self._reads is not None else 0
        host_pages = self.host.num_used + packed
        return TierCounts(host_pages, packed, self._file_used, self._host_taken(), self._written, read)

    def check(self) -> None:
        """Verify that free and used homes add up."""
        self.host.check()
        if self.packed is not None:
            self.packed.check()
        assert self._file_free.num_free + self._file_used == self._file_pages

    def close(self) -> None:
        """Give everything back once no copy uses it; may be called again."""
        self.make_room = None  # whoever makes room knows these tiers
        self.host.close()
        if self.packed is not None:
            self.packed.close()
        transit, self._transit = self._transit, None
        if transit is not None:
            self._lanes.free(transit)
        if self._reads is not None:
            self._reads.close()
        if self._file is not None:
            self._file.close()
