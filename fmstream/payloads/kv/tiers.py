"""Where pages lie that are not in frames: host memory first, then a file."""

from __future__ import annotations

import bisect
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

SMALLEST_BLOCK_BYTES: Final = 1 << 20
LARGEST_BLOCK_BYTES: Final = 256 << 20
"""Host memory is taken in blocks between these sizes, each as large as all before."""
TRANSIT_BYTES: Final = 8 << 20
"""Host memory through which pages go to the file, and are fetched from it at once, at most,"""
TRANSIT_PAGES: Final = 8
"""and in pages."""
FLOOR_SHARE: Final = 0.05
"""Part of the host memory that is free at first, within the limits of the control groups, which is left free."""
FILE: Final = 1 << 40
"""Homes from this number on are pages of the file."""


class TierCounts(NamedTuple):
    """Pages by tier, and bytes that went between host memory and the file."""

    host_pages: int
    file_pages: int
    host_bytes: int
    file_written_bytes: int
    file_read_bytes: int


class _Block(NamedTuple):
    first: int
    num_pages: int
    memory: HostBlock


class Tiers:
    """Homes of pages of one size: a home below `FILE` is a place in host memory, one from there on a page of the file.

    Pages stay where they were put first: a cache is read in full at every step, so that no page is hotter than another.
    Copies are enqueued on the lanes; the host waits for what goes to the file, and for what comes from it only where it
    is needed before a worker has read it.

    Args:
        page_bytes: size of a page.
        host_bytes: host memory that may be taken; None leaves only the floor.
        spill_dir: folder of the file; None does without.
        note: takes a sentence for the user.
    """

    def __init__(
        self,
        lanes: Lanes,
        page_bytes: int,
        host_bytes: int | None,
        spill_dir: str | os.PathLike[str] | None,
        note: Callable[[str], None],
    ) -> None:
        self.page_bytes = page_bytes
        self._lanes = lanes
        self._host_bytes = host_bytes
        self._spill_dir = spill_dir
        self._note = note
        self._blocks: list[_Block] = []
        self._starts: list[int] = []
        self._free = FreeRuns()
        self._places = Places(0, lanes)
        self._file: PageFile | None = None
        self._file_free = FreeRuns()
        self._file_pages = 0
        self._transit: HostBlock | None = None
        self._transit_places = Places(0, lanes)
        self._transit_next = 0
        self._host_used = self._file_used = 0
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
        found = self._free.take(wanted)
        if found is None and self._add_block(wanted):
            found = self._free.take(wanted)
        if found is not None:
            self._host_used += found[1]
            return found
        if self._spill_dir is None:
            raise MemoryBudgetError(self._full("there is no file tier"))
        found = self._file_free.take(wanted)
        if found is None:
            found = self._file_pages, wanted
            self._file_pages += wanted
        self._file_used += found[1]
        return FILE + found[0], found[1]

    def give(self, home: int, count: int) -> None:
        """Forget what lies in consecutive homes."""
        if home >= FILE:
            self._file_free.give(home - FILE, count)
            self._file_used -= count
        else:
            self._free.give(home, count)
            self._host_used -= count

    def _add_block(self, wanted: int) -> bool:
        """Take more host memory, if the limit and the floor allow a page of it."""
        taken = sum(block.memory.num_bytes for block in self._blocks)
        left = budget.available_bytes() - self._floor
        if self._host_bytes is not None:
            left = min(left, self._host_bytes - taken)
        size = min(max(taken, SMALLEST_BLOCK_BYTES), LARGEST_BLOCK_BYTES)
        num_pages = min(left, max(size, wanted * self.page_bytes)) // self.page_bytes
        if num_pages < 1:
            return False
        memory = self._lanes.block(num_pages * self.page_bytes)
        if not memory.pinned:
            self._tell(
                f"the system refused to pin {memory.num_bytes} bytes for KV pages: they are copied from pageable "
                "memory, which is slower and lets the host wait (raise the limit of locked memory)"
            )
        # A number is left out between blocks, so that no run goes from one to the next.
        first = self._blocks[-1].first + self._blocks[-1].num_pages + 1 if self._blocks else 0
        self._places.grow(first + num_pages)
        self._blocks.append(_Block(first, num_pages, memory))
        self._starts.append(first)
        self._free.give(first, num_pages)
        return True

    def _tell(self, sentence: str) -> None:
        if not self._told:
            self._told = True
            self._note(sentence)

    def _full(self, last: str) -> str:
        taken = sum(block.num_pages for block in self._blocks) * self.page_bytes
        limit = "all but its floor" if self._host_bytes is None else f"{self._host_bytes} bytes"
        return (
            f"no room for another page of {self.page_bytes} bytes of keys and values: the frames on "
            f"{self._lanes.torch_device} are all in use, the host tier holds {taken} bytes of {limit}, and {last}: "
            "give a spill_dir with room, more host memory (kv_host_memory), or a larger kv_cache_max_pages"
        )

    # Copies

    def write(self, source: torch.Tensor, home: int) -> None:
        """Enqueue pages, uint8 [n, page_bytes] on the device, to consecutive homes (lane OUT)."""
        if home < FILE:
            place, target = self._host(home, source.shape[0])
            self._places.claim(Lane.OUT, place, source.shape[0])
            with self._lanes.on(Lane.OUT):
                target.copy_(source, non_blocking=True)
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
        """Enqueue pages from consecutive homes to uint8 [n, page_bytes] on the device (lane IN).

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
        place, source = self._host(home, target.shape[0])
        self._places.claim(Lane.IN, place, target.shape[0])
        with self._lanes.on(Lane.IN):
            target.copy_(source, non_blocking=True)

    @property
    def reads(self) -> FileReads:
        """What comes from the file."""
        if self._reads is None:
            self._reads = FileReads(self._lanes, self.page_bytes, self._open())
        return self._reads

    def _host(self, home: int, count: int) -> tuple[int, torch.Tensor]:
        block = self._blocks[bisect.bisect(self._starts, home) - 1]
        at = (home - block.first) * self.page_bytes
        return home, block.memory.tensor[at : at + count * self.page_bytes].view(count, self.page_bytes)

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
        host_bytes = sum(block.memory.num_bytes for block in self._blocks)
        read = self._reads.num_bytes if self._reads is not None else 0
        return TierCounts(self._host_used, self._file_used, host_bytes, self._written, read)

    def check(self) -> None:
        """Verify that free and used homes add up."""
        assert self._free.num_free + self._host_used == sum(block.num_pages for block in self._blocks)
        assert self._file_free.num_free + self._file_used == self._file_pages

    def close(self) -> None:
        """Give everything back once no copy uses it; may be called again."""
        self._lanes.settle()
        blocks, self._blocks = [block.memory for block in self._blocks], []
        transit, self._transit = self._transit, None
        for memory in [*blocks, *([transit] if transit is not None else [])]:
            self._lanes.free(memory)
        self._starts.clear()
        if self._reads is not None:
            self._reads.close()
        if self._file is not None:
            self._file.close()
