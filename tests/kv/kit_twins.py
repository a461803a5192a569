"""Caches beside plain tensors that hold the same, and the operations that every kind of paged cache knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmstream import PagedCache
from fmstream.core.pages import RESIDENT

HEADS, DIM = 2, 4
MAX_ROWS, MAX_LENGTH, MAX_CACHES = 4, 40, 3

Operation = tuple[str, int, int]
"""Its name, the number of the cache, and a number that decides the rest."""
Held = list[Tensor | None]
"""Keys by layer, [rows, HEADS, length, DIM]; values are their negatives."""


class Twins:
    """Caches in one pool, each beside tensors that hold the same.

    Args:
        device: where the caches are.
        first: one of them; others are forked from it.
    """

    def __init__(self, device: str, first: PagedCache) -> None:
        self.device = device
        self.pairs: list[tuple[PagedCache, Held]] = [(first, [None] * len(first.layers))]
        self.number = 0.0

    def tensor(self, rows: int, length: int) -> Tensor:
        """Values that occur nowhere else; at times the same in all sequences."""
        count = rows * HEADS * length * DIM
        self.number += count
        new = torch.arange(self.number - count, self.number).view(rows, HEADS, length, DIM) / 64
        return new[:1].repeat(rows, 1, 1, 1) if self.number % 3 == 0 else new

    def apply(self, operation: Operation) -> None:
        """Carry out one operation on a cache and on its tensors, if it can be."""
        name, which, value = operation
        cache, held = self.pairs[which % len(self.pairs)]
        if name == "fork" and len(self.pairs) < MAX_CACHES:
            self.pairs.append((cache.fork(), list(held)))
        elif name == "free":
            self.free(cache, held)
        elif name == "read":
            self.compare(cache, held)
        elif name == "crop" and held[0] is not None:
            length = held[0].shape[2]
            cut = 1 + value % length
            cache.crop(-cut)
            held[:] = [tensor[:, :, : length - cut] if length > cut else None for tensor in held]
        elif name in ("repeat", "reorder", "select") and held[0] is not None:
            self.choose(cache, held, name, np.random.default_rng(value))
        else:
            self.act(cache, held, name, value)

    def act(self, cache: PagedCache, held: Held, name: str, value: int) -> None:
        """Carry out an operation of one kind of cache; any other name is let pass."""

    def free(self, cache: PagedCache, held: Held) -> None:
        """Drop a cache, or empty it if it is the only one."""
        if len(self.pairs) > 1:
            self.pairs.remove((cache, held))
        else:
            cache.reset()
            held[:] = [None] * len(held)

    def choose(self, cache: PagedCache, held: Held, name: str, choose: Any) -> None:
        """Repeat sequences, bring them into another order, or keep some."""
        rows = held[0].shape[0]
        if name == "repeat":
            if self.has_room(2 * rows, held[0].shape[2]):
                cache.batch_repeat_interleave(2)
                held[:] = [tensor.repeat_interleave(2, 0) for tensor in held]
            return
        count = rows if name == "reorder" else 1 + int(choose.integers(rows))
        index = torch.tensor(choose.integers(rows, size=count))
        (cache.reorder_cache if name == "reorder" else cache.batch_select_indices)(index)
        held[:] = [tensor[index] for tensor in held]

    def has_room(self, rows: int, length: int) -> bool:
        """Whether a cache may grow to so many sequences."""
        return rows <= MAX_ROWS

    def compare(self, cache: PagedCache, held: Held) -> None:
        """Look at all that a cache holds."""
        for index, tensor in enumerate(held):
            layer = cache.layers[index]
            assert layer.get_seq_length() == (0 if tensor is None else tensor.shape[2])
            if tensor is not None:
                assert torch.equal(layer.keys.cpu(), tensor)
                assert torch.equal(layer.values.cpu(), -tensor)


def let_leave(layer: Any, choose: Any) -> None:
    """Let some pages of a layer leave, as pressure would; its pool is the layer's already."""
    pages = np.unique(layer.block.pages)
    pages = pages[layer.pool.frames.table.state[pages] == RESIDENT]
    layer.pool.frames.evict(pages[choose.random(len(pages)) < 0.6])
