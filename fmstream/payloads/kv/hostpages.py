"""Pages of one size in host memory, by number."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import torch

from fmstream.core.freeruns import FreeRuns
from fmstream.core.order import Places
from fmstream.device.lanes import HostBlock, Lanes


class _Block(NamedTuple):
    first: int
    num_pages: int
    memory: HostBlock


class HostPages:
    """Blocks of host memory cut into pages, which are numbered on from block to block.

    Attributes:
        page_bytes: size of a page.
        num_bytes: host memory taken.
        num_used: pages that were taken and not given back.
        places: who uses which page.
    """

    def __init__(self, lanes: Lanes, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.num_bytes = self.num_used = 0
        self.places = Places(0, lanes)
        self._lanes = lanes
        self._blocks: list[_Block] = []
        self._starts: list[int] = []
        self._free = FreeRuns()

    def take(self, wanted: int) -> tuple[int, int] | None:
        """Consecutive pages, up to ``wanted``: (first, count); None if none is free."""
        found = self._free.take(wanted)
        if found is not None:
            self.num_used += found[1]
        return found

    def give(self, first: int, count: int) -> None:
        """Forget what lies in consecutive pages."""
        self._free.give(first, count)
        self.num_used -= count

    def add(self, num_pages: int) -> HostBlock:
        """Take memory for more pages."""
        memory = self._lanes.block(num_pages * self.page_bytes)
        # A number is left out between blocks, so that no run goes from one to the next.
        first = self._blocks[-1].first + self._blocks[-1].num_pages + 1 if self._blocks else 0
        self.places.grow(first + num_pages)
        self._blocks.append(_Block(first, num_pages, memory))
        self._starts.append(first)
        self._free.give(first, num_pages)
        self.num_bytes += memory.num_bytes
        return memory

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Consecutive pages, uint8 [count, page_bytes]."""
        block = self._blocks[bisect.bisect(self._starts, first) - 1]
        at = (first - block.first) * self.page_bytes
        return block.memory.tensor[at : at + count * self.page_bytes].view(count, self.page_bytes)

    def check(self) -> None:
        """Verify that free and used pages add up."""
        assert self._free.num_free + self.num_used == sum(block.num_pages for block in self._blocks)

    def close(self) -> None:
        """Give the memory back, once no copy uses it; may be called again."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            self._lanes.free(block.memory)
        self._starts.clear()
        self.num_bytes = 0
