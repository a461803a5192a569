"""Sequences that begin alike share pages: those of one batch, and those of caches in one pool."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fmstream.core.order import Lane
from fmstream.core.pages import ABSENT
from fmstream.payloads.kv.blocks import BlockTable, Ids
from fmstream.payloads.kv.known import Hashes, KnownPages, Spot, hash_pages

if TYPE_CHECKING:
    from fmstream.payloads.kv.pool import Pool

INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""As what elements are compared, by their size."""

Flags = NDArray[np.bool_]


class Sharing:
    """Finds pages for new tokens that are there already.

    Pages that are new and full are looked for: those are what a prefill brings, a chunk after the other.  The host
    waits where there is somebody to share with; while tokens come one by one there is nothing to compare.  Whoever
    writes to a page that has other references gets one of his own first, so that sharing needs no undoing.
    """

    def __init__(self) -> None:
        self._known = KnownPages()

    def share(self, pool: Pool, block: BlockTable, begin: int, keys: torch.Tensor, values: torch.Tensor) -> Flags:
        """Put pages that are there in place of new ones; which of [rows, columns] need not be written.

        Args:
            pool: of the layer.
            block: the layer, with pages for all its tokens.
            begin: tokens from here on are new.
            keys, values: all of them, put together, [rows, heads, tokens, dim].
        """
        tokens, rows = pool.shape.tokens, len(keys)
        low, high = pool.shape.pages(begin), block.length // tokens
        shared = np.zeros(block.pages.shape, np.bool_)
        if high <= low or block.length == begin + 1:
            return shared
        keys, values = (tensor[:, :, low * tokens : high * tokens] for tensor in (keys, values))
        new, done = block.pages[:, low:high], shared[:, low:high]
        hashes = hash_pages(keys, values, tokens)
        spot = Spot(block.layer, pool.stride, low)
        others = any(other.layer == block.layer and other.length for other in pool.layers if other is not block)
        if rows <= pool.stride and not others:
            self._known.tell(spot, new, hashes)  # the host waits when somebody asks, not now
            return shared
        numbers = hashes.cpu().numpy()
        if others:
            found = self._known.find(spot, numbers, pool.frames.refs)
            table = pool.frames.table  # a number that is used again may be that of a page which has yet to be written
            found[(table.state[found] == ABSENT) & (table.home[found] < 0)] = -1
            self._exchange(pool, new, found, self._verified(pool, found, keys, values))
            done |= new == found
        if rows > pool.stride:
            self._share_in_batch(pool, new, done, numbers, keys, values)
        self._known.note(spot, new, numbers)
        return shared

    def _share_in_batch(
        self, pool: Pool, new: Ids, done: Flags, numbers: Hashes, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Let a sequence share the pages of the first one that has the same."""
        tokens, first = pool.shape.tokens, first_alike(numbers, pool.stride)
        first[done] = -1
        for row in range(pool.stride, len(new)):
            same = np.zeros(new.shape[1], np.bool_)
            columns = np.flatnonzero(first[row] >= 0)
            for start, count in stretches(columns, columns, first[row, columns] * len(columns) + columns):
                at, other = int(columns[start]), int(first[row, columns[start]])
                where = slice(at * tokens, (at + count) * tokens)
                equal = equal_pages(by_page(keys[row, :, where], tokens), by_page(keys[other, :, where], tokens))
                equal &= equal_pages(by_page(values[row, :, where], tokens), by_page(values[other, :, where], tokens))
                same[at : at + count] = equal.cpu().numpy()
            common = new[first[row], np.arange(new.shape[1])]
            self._exchange(pool, new[row], common, same)
            done[row] |= same

    def _exchange(self, pool: Pool, new: Ids, others: Ids, same: Flags) -> None:
        """Put other pages in place of new ones where they hold the same."""
        own = new[same]
        new[same] = others[same]
        pool.frames.share(others[same])
        pool.frames.release(own)

    def _verified(self, pool: Pool, found: Ids, keys: torch.Tensor, values: torch.Tensor) -> Flags:
        """Which found pages hold the bits of the tokens that are in their place; the host waits."""
        tokens, frames, same = pool.shape.tokens, pool.frames, np.zeros(found.shape, np.bool_)
        chunk = pool.at_once()
        for row, begin in product(range(len(found)), range(0, found.shape[1], chunk)):
            columns = begin + np.flatnonzero(found[row, begin : begin + chunk] >= 0)
            if not len(columns):
                continue
            pages = found[row, columns]
            with frames.holding(np.unique(pages)):
                where = frames.table.frame[pages]
                for start, count in stretches(columns, where):
                    at, frame = int(columns[start]), int(where[start])
                    frames.claim(Lane.COMPUTE, frame, count)
                    part = slice(at * tokens, (at + count) * tokens)
                    held_keys, held_values = pool.in_frames(frame, count)
                    equal = equal_pages(by_page(keys[row, :, part], tokens), held_keys)
                    equal &= equal_pages(by_page(values[row, :, part], tokens), held_values)
                    same[row, at : at + count] = equal.cpu().numpy()
            pool.lanes.point(Lane.COMPUTE)
        return same


def first_alike(numbers: Hashes, stride: int) -> NDArray[np.int64]:
    """For each row and column the first row of the same KV head that has the same number there, -1 if it is itself."""
    rows, columns = numbers.shape
    by_sequence = numbers.reshape(rows // stride, stride, columns)
    alike = by_sequence[:, None] == by_sequence[None]
    sequence = alike.argmax(1)  # the first that is the same; each is the same as itself
    head = np.arange(stride)[None, :, None]
    first = np.where(sequence < np.arange(len(by_sequence))[:, None, None], sequence * stride + head, -1)
    return first.reshape(rows, columns).astype(np.int64)


def stretches(*numbers: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Stretches in which all of some lists of numbers, of the same length, go on by one: (where it begins, length)."""
    if not len(numbers[0]):
        return
    goes_on = np.all([np.diff(some) == 1 for some in numbers], axis=0)
    begins = [0, *(np.flatnonzero(~goes_on) + 1).tolist()]
    for begin, end in pairwise([*begins, len(numbers[0])]):
        yield begin, end - begin


def by_page(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """[heads, pages * tokens, dim] as [pages, heads, tokens, dim]; a view."""
    heads, length, dim = tensor.shape
    return tensor.view(heads, length // tokens, tokens, dim).transpose(0, 1)


def equal_pages(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Which pages, [n, heads, tokens, dim] each, hold the same bits: [n]."""
    bits = INTEGERS[ours.dtype.itemsize]
    return (ours.view(bits) == theirs.view(bits)).all(3).all(2).all(1)
