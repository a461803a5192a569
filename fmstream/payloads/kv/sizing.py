"""How large a pool is: as given, or as large as is needed and as the device's free memory allows."""

from __future__ import annotations

import contextlib
from typing import Final, NamedTuple, Protocol

from fmstream.device.lanes import Lanes
from fmstream.errors import MemoryBudgetError
from fmstream.payloads.kv.pool import HEADROOM, Pool
from fmstream.payloads.kv.shape import PageShape

GROWTH: Final = 1.5
"""A pool that grows gets more than is needed now, so that it does not have to grow soon again."""
RELIEF: Final = 1 / 8
"""A pool that gives memory back gives this part more, for the same reason."""


class Sizes(Protocol):
    """Decides how large a pool is, for so many layers."""

    @property
    def num_layers(self) -> int:
        """Layers that will be in it."""
        ...

    def first(self, lanes: Lanes, shape: PageShape, rows: int, num_tokens: int) -> int:
        """Pages of a new pool, before a pass that holds ``num_tokens`` in each row of a block table."""
        ...

    def adjust(self, pool: Pool, rows: int, num_tokens: int) -> None:
        """Make a pool larger or smaller before such a pass; raises `MemoryBudgetError` where no tier has room."""
        ...


class Sizing(NamedTuple):
    """What a pool may take.

    Attributes:
        max_pages: its size; None lets it grow with the sequences.
        threshold_bytes: free memory of the device below which pages leave it.
        num_layers: layers that will be in it.
    """

    max_pages: int | None
    threshold_bytes: int
    num_layers: int

    def first(self, lanes: Lanes, shape: PageShape, rows: int, num_tokens: int) -> int:
        """Pages of a new pool."""
        if self.max_pages is not None:
            return self.max_pages
        in_layer = rows * shape.pages(num_tokens)
        wanted = int((self.num_layers + 1) * in_layer * GROWTH) + rows
        return max(in_layer, min(wanted, self._allowed(lanes, shape, wanted)))

    def adjust(self, pool: Pool, rows: int, num_tokens: int) -> None:
        """Before a pass that will hold ``num_tokens`` in each row: make the pool larger or smaller.

        Raises:
            MemoryBudgetError: pages have to leave the device, and no tier has room.
        """
        if self.max_pages is not None and not self.threshold_bytes:
            return
        shape, lanes = pool.shape, pool.lanes
        in_layer = rows * shape.pages(num_tokens)
        smallest = in_layer + int(in_layer * HEADROOM)
        available = lanes.available_bytes()
        if available is not None and available < self.threshold_bytes:
            less = -(-(self.threshold_bytes - available) // shape.num_bytes) + int(pool.max_pages * RELIEF)
            wanted = max(smallest, pool.max_pages - less)
            if wanted < pool.max_pages:
                pool.resize(wanted)
        elif self.max_pages is None:
            wanted = max(len(pool.layers), self.num_layers) * in_layer + smallest
            if wanted > pool.max_pages:
                self._grow(pool, int(wanted * GROWTH))
        elif pool.max_pages < self.max_pages:
            self._grow(pool, self.max_pages)
        if pool.max_pages < in_layer:  # one layer is had whatever is free, within the size that was given
            wanted = int(smallest * GROWTH)
            wanted = wanted if self.max_pages is None else min(wanted, self.max_pages)
            if wanted > pool.max_pages:
                pool.resize(wanted, emptied=True)

    def _grow(self, pool: Pool, wanted: int) -> None:
        """Make the pool larger, as far as there is memory; where that is little it is not worth the copies."""
        wanted = min(wanted, self._allowed(pool.lanes, pool.shape, wanted))
        if wanted > pool.max_pages * (1 + RELIEF):
            with contextlib.suppress(MemoryBudgetError):  # in pieces too small: then pages leave
                pool.resize(wanted)

    def _allowed(self, lanes: Lanes, shape: PageShape, wanted: int) -> int:
        """Pages for which the device has free memory now."""
        available = lanes.available_bytes()
        return wanted if available is None else max(0, available - self.threshold_bytes) // shape.num_bytes
