"""How large a pool is whose layers attend to chosen pages: a part of all keys and values, or pages for each KV head."""

from __future__ import annotations

import contextlib
from typing import Final, NamedTuple

from fmstream.device.lanes import Lanes
from fmstream.errors import MemoryBudgetError
from fmstream.payloads.kv.choosing import LEAST_CHOSEN
from fmstream.payloads.kv.pool import HEADROOM, Pool
from fmstream.payloads.kv.shape import PageShape

GROWTH: Final = 1 / 16
"""A pool grows when the sequences have grown by this part since it got its size."""
TRANSIT: Final = 1 / 8
"""Part by which the frames of the smallest pool are more than what its layers keep, and"""
LEAST_TRANSIT: Final = 8
"""pages more."""


class BudgetSizing(NamedTuple):
    """What such a pool may take.

    Attributes:
        budget: part of all pages (float), or complete pages of a KV head in the mean of the layers that choose (int).
        max_pages: its size, if that is given as well.
        threshold_bytes: free memory of the device below which pages leave it.
        num_layers: layers that will be in it, and
        num_choosing: those of them that choose.
    """

    budget: float | int
    max_pages: int | None
    threshold_bytes: int
    num_layers: int
    num_choosing: int

    def least(self, shape: PageShape, rows: int, num_tokens: int) -> int:
        """Pages with which a step can choose: one whole layer, and in frames what each head needs."""
        return self._with_chosen(LEAST_CHOSEN, shape, rows, num_tokens)

    def _with_chosen(self, chosen: int, shape: PageShape, rows: int, num_tokens: int) -> int:
        columns = shape.pages(num_tokens)
        frames = rows * (self.num_layers + self.num_choosing * min(chosen, columns))
        return rows * columns + int(rows * columns * HEADROOM) + int(frames * (1 + TRANSIT)) + LEAST_TRANSIT

    def wanted(self, shape: PageShape, rows: int, num_tokens: int) -> int:
        """Pages that the budget allows for sequences of such a length."""
        if isinstance(self.budget, int):
            return self._with_chosen(max(self.budget, LEAST_CHOSEN), shape, rows, num_tokens)
        everything = self.num_layers * rows * shape.pages(num_tokens)
        return max(int(self.budget * everything), self.least(shape, rows, num_tokens))

    def first(self, lanes: Lanes, shape: PageShape, rows: int, num_tokens: int) -> int:
        """Pages of a new pool."""
        return self.max_pages or self.wanted(shape, rows, num_tokens)

    def adjust(self, pool: Pool, rows: int, num_tokens: int) -> None:
        """Before a pass that will hold ``num_tokens`` in each row: make the pool larger or smaller.

        Raises:
            MemoryBudgetError: the device has no room, or pages that leave it have none in any tier.
        """
        shape, lanes = pool.shape, pool.lanes
        if self.threshold_bytes:
            available = lanes.available_bytes()
            if available is not None and available < self.threshold_bytes:
                less = -(-(self.threshold_bytes - available) // shape.num_bytes)
                wanted = max(self.least(shape, rows, num_tokens), pool.max_pages - less)
                if wanted < pool.max_pages:
                    pool.resize(wanted)
                return
        if self.max_pages is not None:
            if pool.max_pages < self.max_pages:
                with contextlib.suppress(MemoryBudgetError):
                    pool.resize(self.max_pages, emptied=True)
            return
        wanted = self.wanted(shape, rows, num_tokens)
        too_small = pool.max_pages < rows * shape.pages(num_tokens)
        if too_small or wanted > pool.max_pages * (1 + GROWTH):
            with contextlib.suppress(*([] if too_small else [MemoryBudgetError])):
                # All pages leave first: what is on the device never is more than the budget.
                pool.resize(wanted, emptied=True)
