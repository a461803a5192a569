"""Which pages hold the tokens of one layer: the block table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Numbers = NDArray[Any]


def runs(numbers: Numbers) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive numbers: (where it begins in ``numbers``, its first number, its length)."""
    if not len(numbers):
        return
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    begins = [0, *cuts.tolist()]
    for begin, end in zip(begins, [*begins[1:], len(numbers)], strict=True):
        yield begin, int(numbers[begin]), end - begin


def steps(numbers: NDArray[Any]) -> int:
    """How many numbers from the first on are consecutive."""
    return first_set(numbers != numbers[0] + np.arange(len(numbers)))


def longest(flags: NDArray[np.bool_], wanted: int) -> tuple[int, int]:
    """The first run of ``wanted`` flags that are set, else the longest: (first, count)."""
    edges = np.flatnonzero(np.diff(flags.view(np.int8), prepend=np.int8(0), append=np.int8(0)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    at = int(np.argmax(np.minimum(lengths, wanted)))
    return int(edges[2 * at]), min(wanted, int(lengths[at]))


def first_set(flags: NDArray[np.bool_]) -> int:
    """Index of the first flag that is set, or their number."""
    return int(np.argmax(flags)) if flags.any() else len(flags)


class BlockTable:
    """Pages of one layer by sequence and position: int32 [num_sequences, num_columns], with room to grow.

    All sequences have the same ``length`` in tokens; column ``c`` holds the tokens from ``c * page_tokens`` on.
    """

    def __init__(self) -> None:
        self.length = 0
        self.version = 0
        """Another number after each change."""
        self.layer = 0
        """Which layer of its cache it is of, among those in the same pool."""
        self._pages: Ids = np.empty((0, 0), np.int32)
        self._num_columns = 0
        self._counted, self._num_pages = (-1, 0), 0

    @property
    def pages(self) -> Ids:
        """The pages in use; a view."""
        return self._pages[:, : self._num_columns]

    @property
    def num_sequences(self) -> int:
        """Sequences, 0 while nothing was stored."""
        return int(self._pages.shape[0])

    @property
    def num_pages(self) -> int:
        """Pages, those of several sequences once."""
        if self.num_sequences < 2:
            return self.pages.size
        if self._counted != (self.version, self.pages.size):
            self._counted, self._num_pages = (self.version, self.pages.size), len(np.unique(self.pages))
        return self._num_pages

    def extend(self, pages: Ids) -> None:
        """Add columns."""
        self.version += 1
        wanted = self._num_columns + pages.shape[1]
        if pages.shape[0] != self._pages.shape[0] or wanted > self._pages.shape[1]:
            grown = np.empty((pages.shape[0], max(wanted, 2 * self._num_columns)), np.int32)
            if self._num_columns:
                grown[:, : self._num_columns] = self.pages
            self._pages = grown
        self._pages[:, self._num_columns : wanted] = pages
        self._num_columns = wanted

    def cut(self, num_columns: int) -> Ids:
        """Drop columns from ``num_columns`` on; returns the pages in them."""
        self.version += 1
        dropped = self._pages[:, num_columns : self._num_columns].copy()
        self._num_columns = min(self._num_columns, num_columns)
        return dropped

    def choose(self, sequences: NDArray[np.int64]) -> None:
        """Put other sequences in place of those that are there; one may be chosen several times."""
        self.version += 1
        self._pages = self._pages[sequences]

    def clear(self) -> Ids:
        """Forget everything; returns the pages that were in use."""
        dropped = self.pages.copy()
        self.become(BlockTable())
        return dropped

    def become(self, other: BlockTable) -> None:
        """Be what another table is, which is not used any more."""
        self.version += 1
        self.length, self._pages, self._num_columns = other.length, other._pages, other._num_columns

    def copy(self) -> BlockTable:
        """The same pages in a table of its own."""
        other = BlockTable()
        other.length, other._pages, other._num_columns = self.length, self._pages.copy(), self._num_columns
        return other
