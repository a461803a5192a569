"""Full pages by what is in them, so that whoever comes with the same keys and values shares them.

A hash says which page may be the same, and its bits say whether it is: a result never rests on the hash.  Keys hold
the rotation by position, so that only sequences that begin alike have equal pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fmstream.payloads.kv.blocks import Ids

SEED: Final = 20240229
"""Of the weights of the hash: always the same, so that the same content has the same key."""
WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.int8)
"""As what the bits of a row are read, the widest that it is a multiple of."""
LEAST_PURGED: Final = 4096
MAX_TOLD: Final = 4096
"""Prefills of a layer whose hashes wait to be read; of the oldest beyond nothing is shared later."""

Hashes = NDArray[np.int64]


class Spot(NamedTuple):
    """Where pages [rows, columns] lie: only those of the same layer, KV head and column are held against one another.

    Attributes:
        layer: of the cache.
        stride: rows of one sequence.
        column: the first.
    """

    layer: int
    stride: int
    column: int

    def keys(self, hashes: Hashes) -> Iterator[tuple[int, int, int, int]]:
        """A key for each page."""
        for row, numbers in enumerate(hashes.tolist()):
            for column, number in enumerate(numbers, self.column):
                yield self.layer, row % self.stride, column, number


class KnownPages:
    """Pages by place and content; some may be gone or hold something else by now."""

    def __init__(self) -> None:
        self._pages: dict[tuple[int, int, int, int], int] = {}
        self._told: deque[tuple[Spot, Ids, torch.Tensor]] = deque(maxlen=MAX_TOLD)
        self._purge_at = LEAST_PURGED

    def tell(self, spot: Spot, pages: Ids, hashes: torch.Tensor) -> None:
        """Take note of pages; their hashes are read when somebody asks."""
        self._told.append((spot, pages.copy(), hashes))

    def note(self, spot: Spot, pages: Ids, hashes: Hashes) -> None:
        """Take note of pages, whose hashes the host has."""
        for page, key in zip(pages.ravel().tolist(), spot.keys(hashes), strict=True):
            self._pages[key] = page

    def find(self, spot: Spot, hashes: Hashes, refs: NDArray[np.int32]) -> Ids:
        """A page that may hold the same for each hash, -1 where there is none; ``refs`` are references by page."""
        for told, pages, numbers in self._told:
            self.note(told, pages, numbers.cpu().numpy())
        self._told.clear()
        found = np.array([self._pages.get(key, -1) for key in spot.keys(hashes)], np.int32)
        found[(found >= 0) & (refs[found] == 0)] = -1
        if len(self._pages) > self._purge_at:
            self._pages = {key: page for key, page in self._pages.items() if refs[page]}
            self._purge_at = max(LEAST_PURGED, 2 * len(self._pages))
        return found.reshape(hashes.shape)


class Hasher:
    """Numbers for what is in pages, computed where these are.

    A number is a sum of products with fixed odd weights modulo 2^64 (multilinear hashing: Carter and Wegman, 1979), so
    that pages which differ in one element have different ones.
    """

    def __init__(self) -> None:
        self._weights: dict[tuple[int, int, int, int], torch.Tensor] = {}

    def hash(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """The number of each page: int64 [rows, pages].

        Args:
            keys, values: [rows, heads, pages * tokens, dim].
            tokens: tokens of a page.
        """
        return self._hash(keys, tokens, 0) + self._hash(values, tokens, 1)

    def _hash(self, tensor: torch.Tensor, tokens: int, salt: int) -> torch.Tensor:
        rows, heads, length, dim = tensor.shape
        num_bytes = dim * tensor.element_size()
        words = tensor.view(next(kind for kind in WORDS if num_bytes % kind.itemsize == 0))
        weights = self._weights_of(salt, heads, tokens, words)
        pages = words.view(rows, heads, length // tokens, tokens, -1).to(torch.int64)
        return (pages * weights).sum((1, 3, 4))

    def _weights_of(self, salt: int, heads: int, tokens: int, words: torch.Tensor) -> torch.Tensor:
        key = salt, heads, tokens, words.shape[-1]
        if key not in self._weights:
            numbers = np.random.default_rng(SEED + salt).integers(-(2**63), 2**63, (heads, 1, *key[2:]), np.int64)
            self._weights[key] = torch.from_numpy(numbers | 1).to(words.device)
        return self._weights[key]
