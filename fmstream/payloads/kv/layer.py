"""One layer of a paged cache, as transformers sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from fmstream.errors import ConfigError
from fmstream.payloads.kv.blocks import BlockTable
from fmstream.payloads.kv.pool import Pool

PoolFor = Callable[[torch.Tensor, torch.Tensor], Pool]
"""The pool for keys and values of such shapes."""


class PagedLayer(CacheLayerMixin):
    """A layer with full attention whose keys and values lie in pages; it behaves as ``DynamicLayer``.

    What `update` returns is where the layer was put together: it is right until the next layer's `update`, and for as
    long as somebody holds it.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, pool_for: PoolFor) -> None:
        self._pool_for = pool_for
        self.pool: Pool | None = None
        self.block = BlockTable()
        self.index = -1
        """Its place among the layers of the pool."""
        super().__init__()

    # What DynamicLayer keeps as tensors is put together when it is asked for.

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, [batch, heads, tokens, dim]."""
        return self._together()[0] if self.block.length else None

    @keys.setter
    def keys(self, _: Any) -> None:
        pass  # the base class clears it

    @property
    def values(self) -> torch.Tensor | None:
        """All values, [batch, heads, tokens, dim]."""
        return self._together()[1] if self.block.length else None

    @values.setter
    def values(self, _: Any) -> None:
        pass  # the base class clears it

    def _together(self) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self._entered()
        with torch.no_grad():
            return pool.assemble(self.block, self.block.length, self.block.num_sequences)

    def _entered(self) -> Pool:
        assert self.pool is not None
        self.pool.lanes.enter(self.pool.slab)
        self.pool.current = self.index
        self.pool.retire()
        return self.pool

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Find the pool for keys and values of this shape."""
        self.device, self.dtype = key_states.device, key_states.dtype
        if self.pool is None:
            self.pool = self._pool_for(key_states, value_states)
            self.index = len(self.pool.layers)
            self.pool.layers.append(self.block)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; returns all of them, contiguous.

        Raises:
            ConfigError: a gradient would have to flow through the cache.
            MemoryBudgetError: there is no room in any tier; the layer is as before.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ConfigError(
                "keys and values in pages have no gradients: call the model under torch.no_grad(), or without this cache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        pool, begin = self._entered(), self.block.length
        end = begin + key_states.shape[-2]
        with torch.no_grad():
            keys, values = pool.assemble(self.block, end, key_states.shape[0])
            keys[:, :, begin:].copy_(key_states)
            values[:, :, begin:].copy_(value_states)
            pool.store(self.block, keys, values)
            pool.prefetch((self.index + 1) % len(pool.layers))
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the mask is for."""
        return self.block.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens that are stored."""
        return self.block.length

    def get_max_length(self) -> int:
        """-1: there is no limit but memory."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = False
        if self.pool is not None:
            self.pool.release(self.block.clear())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        if tokens_to_remove == 0 or self.pool is None:
            return
        self.block.length = max(0, self.block.length + tokens_to_remove)
        self.pool.release(self.block.cut(self.pool.shape.pages(self.block.length)))

    def _choose(self, sequences: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        if self.pool is None or not self.block.length:
            return
        before = self.block.pages.copy()
        self.block.choose(sequences)
        self.pool.share(self.block.pages)
        self.pool.release(before)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put other sequences in place of those that are there, by index [batch]; pages are shared, not copied."""
        self._choose(_on_host(beam_idx))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some sequences: by index, or a mask."""
        chosen = indices.detach().cpu().numpy() if isinstance(indices, torch.Tensor) else np.asarray(indices)
        self._choose(np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each sequence be there ``repeats`` times; pages are shared, not copied."""
        self._choose(np.repeat(np.arange(self.block.num_sequences), repeats))

    def offload(self) -> None:
        """Nothing: pages come and go by themselves."""

    def prefetch(self) -> None:
        """Nothing: pages come and go by themselves."""


def _on_host(index: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    found: np.ndarray[Any, np.dtype[np.int64]] = index.detach().cpu().numpy().astype(np.int64)
    return found
