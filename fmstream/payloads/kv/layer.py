"""One layer of a paged cache, as transformers sees it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fmstream.errors import ConfigError, IdsError
from fmstream.payloads.kv.blocks import BlockTable
from fmstream.payloads.kv.compat import CacheLayerMixin, length_of_query, length_to_keep
from fmstream.payloads.kv.pool import Pool
from fmstream.payloads.kv.sizing import Sizes
from fmstream.payloads.kv.turns import in_turn

PoolFor = Callable[[torch.Tensor, torch.Tensor], tuple[Pool, list[BlockTable]]]
"""The pool for keys and values of such shapes, and the layers of the cache that are in it, in order."""


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer with full attention whose keys and values lie in pages; it behaves as ``DynamicLayer``.

    What `update` returns is where the layer was put together: it is right until the next layer's `update`, and for as
    long as somebody holds it.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, pool_for: PoolFor, sizing: Sizes) -> None:
        self._pool_for = pool_for
        self._sizing = sizing
        self.pool: Pool | None = None
        self.block = BlockTable()
        self._siblings: list[BlockTable] = []
        super().__init__()  # type: ignore[no-untyped-call]

    # What DynamicLayer keeps as tensors is put together when it is asked for.

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, [batch, heads, tokens, dim]."""
        return self._together()[0] if self.block.length else None

    @keys.setter
    def keys(self, keys: Any) -> None:
        _refuse("keys", keys)  # the base class clears it

    @property
    def values(self) -> torch.Tensor | None:
        """All values, [batch, heads, tokens, dim]."""
        return self._together()[1] if self.block.length else None

    @values.setter
    def values(self, values: Any) -> None:
        _refuse("values", values)

    @in_turn
    def _together(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.pool is not None
        self.pool.enter(self.block)
        rows, length = self.block.num_sequences, self.block.length
        if rows * self.pool.shape.pages(length) > self.pool.max_pages:  # there are more sequences than at the last pass
            self._sizing.adjust(self.pool, rows, length)
        with torch.no_grad():
            return self.pool.together(self.block)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Find the pool for keys and values of this shape."""
        self.device, self.dtype = key_states.device, key_states.dtype
        pool = self.pool
        if (
            pool is not None
            and not self.block.length
            and (pool.is_closed or self._misfit(pool, key_states, value_states))
        ):
            self.leave()
        if self.pool is None:
            self.join(*self._pool_for(key_states, value_states))
        self.is_initialized = True

    def join(self, pool: Pool, siblings: list[BlockTable]) -> None:
        """Be a layer of a pool until this is dropped."""
        self.pool, self._siblings = pool, siblings
        self.block.layer = len(siblings)
        siblings.append(self.block)
        pool.layers.append(self.block)
        # The pool may be at work when this is collected: it looks at who left when it is used next.
        self._left = weakref.finalize(self, pool.left.append, self.block)
        self._left.atexit = False

    def leave(self) -> None:
        """Be in no pool any more, and empty; may be called again."""
        if self.pool is None:
            return
        self._left()
        if self.block in self._siblings:
            self._siblings.remove(self.block)
        self.pool, self.block, self._siblings = None, BlockTable(), []
        self.is_initialized = False

    @in_turn
    def fork(self, pool_for: PoolFor, siblings: list[BlockTable]) -> PagedLayer:
        """A layer of the same content, whose pages are shared until either writes to them."""
        other = self._like(pool_for)
        if self.pool is not None:
            other.device, other.dtype, other.is_initialized = self.device, self.dtype, self.is_initialized
            other.block = self.block.copy()
            self.pool.frames.share(other.block.pages)
            other.join(self.pool, siblings)
        return other

    def _like(self, pool_for: PoolFor) -> PagedLayer:
        """An empty layer of the same options."""
        return PagedLayer(pool_for, self._sizing)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; returns all of them, contiguous.

        Raises:
            ConfigError: a gradient would have to flow through the cache, or they are of another kind than what is
                stored: of other sequences, heads, sizes, types or devices.
            MemoryBudgetError: there is no room in any tier; the layer is as before.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ConfigError("keys and values in pages have no gradients: call the model under torch.no_grad()")
        if not self.block.length:
            self.lazy_initialization(key_states, value_states)
        return self._update(key_states, value_states)

    @in_turn
    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self._enter(key_states, value_states)
        if not self.block.length and not key_states.shape[-2]:
            return key_states, value_states
        with torch.no_grad():
            keys, values = self._append(pool, key_states, value_states)
            self._prefetch(pool)
        return keys, values

    def _enter(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Pool:
        """Begin an `update`."""
        assert self.pool is not None
        if wrong := self._misfit(self.pool, key_states, value_states):
            raise ConfigError(
                f"keys {_said(key_states)} and values {_said(value_states)} do not fit this cache: {wrong}; give "
                "another model a cache of its own, or call reset() first"
            )
        self.pool.enter(self.block)
        return self.pool

    def _misfit(self, pool: Pool, keys: torch.Tensor, values: torch.Tensor) -> str | None:
        """What keeps keys and values [batch, heads, tokens, dim] from joining those that are there."""
        shape, device = pool.shape, pool.lanes.torch_device
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3] or not len(keys):
            return "they must be [batch, heads, tokens, dim] of as many tokens, of at least one sequence"
        heads = shape.heads * pool.stride
        if (keys.shape[1], keys.shape[3], values.shape[3]) != (heads, shape.key_dim, shape.value_dim):
            return f"it has {heads} heads of {shape.key_dim} and {shape.value_dim}"
        there = self.block.num_sequences // pool.stride
        if self.block.length and there != len(keys):
            return f"it has {there} sequences"
        if keys.device != device or values.device != device:
            return f"it is on {device}"
        if any(torch.promote_types(part.dtype, shape.dtype) != shape.dtype for part in (keys, values)):
            return f"it holds {shape.dtype}"
        if not self.block.length and keys.dtype != shape.dtype:
            return f"it is made for {shape.dtype}"
        return None

    def _append(self, pool: Pool, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [rows, heads, tokens, dim]; returns all of them, put together."""
        begin, rows, end = self.block.length, keys.shape[0], self.block.length + keys.shape[-2]
        if self._siblings[0] is self.block or rows * pool.shape.pages(end) > pool.max_pages:
            self._sizing.adjust(pool, rows, end)
        all_keys, all_values = pool.assemble(self.block, rows, end)
        all_keys[:, :, begin:].copy_(keys)
        all_values[:, :, begin:].copy_(values)
        pool.store(self.block, all_keys, all_values)
        return all_keys, all_values

    def _prefetch(self, pool: Pool) -> None:
        siblings = self._siblings
        pool.prefetch(siblings[(siblings.index(self.block) + 1) % len(siblings)])

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of the keys that the mask is for."""
        return self.block.length + length_of_query(query_length), 0

    def get_seq_length(self) -> int:
        """Tokens that are stored."""
        return self.block.length

    def get_max_length(self) -> int:
        """-1: there is no limit but memory."""
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.18

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = False
        if self.pool is not None and self.pool.turn.is_broken:
            self.leave()
        self._forget()

    @in_turn
    def _forget(self) -> None:
        if self.pool is not None:
            self.pool.frames.release(self.block.clear())

    @in_turn
    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        length = length_to_keep(tokens_to_remove, self.block.length)
        if length < self.block.length:
            assert self.pool is not None
            self.block.length = length
            self.pool.frames.release(self.block.cut(self.pool.shape.pages(length)))

    @in_turn
    def _choose(self, sequences: NDArray[np.int64]) -> None:
        if self.pool is None or not self.block.length:
            return
        before = self.block.pages.copy()
        self.block.choose(sequences)
        self.pool.frames.share(self.block.pages)
        self.pool.frames.release(before)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put other sequences in place of those that are there, by index [batch]; pages are shared, not copied.

        Raises:
            IdsError: an index is no sequence of the cache; the layer is as before.
        """
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some sequences: by index, or a mask.

        Raises:
            IdsError: an index is no sequence of the cache; the layer is as before.
        """
        if self.pool is not None and self.block.length:
            self._choose(chosen_sequences(indices, self.block.num_sequences // self.pool.stride))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each sequence be there ``repeats`` times; pages are shared, not copied."""
        self._choose(np.repeat(np.arange(self.block.num_sequences), repeats))

    def offload(self) -> None:
        """Nothing: pages come and go by themselves."""

    def prefetch(self) -> None:
        """Nothing: pages come and go by themselves."""


def chosen_sequences(indices: Any, count: int) -> NDArray[np.int64]:
    """Sequences out of ``count`` by index or mask, as numbers from 0.

    Raises:
        IdsError: these are neither whole numbers of sequences nor a mask of all.
    """
    chosen = indices.detach().cpu().numpy() if isinstance(indices, torch.Tensor) else np.asarray(indices)
    if chosen.ndim == 1 and chosen.dtype == np.bool_ and len(chosen) == count:
        return np.flatnonzero(chosen)
    is_index = chosen.ndim == 1 and (chosen.dtype.kind in "iu" or not chosen.size)
    if is_index and ((chosen >= -count) & (chosen < count)).all():
        numbers: NDArray[np.int64] = chosen.astype(np.int64)
        return np.where(numbers < 0, numbers + count, numbers)
    raise IdsError(
        f"{chosen.tolist()!r} chooses no sequences of this cache, which has {count}: give their numbers from 0 to "
        f"{count - 1}, or a mask of {count} flags"
    )


def _refuse(name: str, value: Any) -> None:
    """Only the base class may set these, and to None."""
    if value is not None:
        raise ConfigError(
            f"{name} of a layer in pages cannot be set: crop() or reset() the cache and append with update(), or use "
            "a DynamicCache"
        )


def _said(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
