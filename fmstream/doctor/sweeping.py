"""One sweep over a memory, in short launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from fmstream.doctor.patterns import Sweep

Compare = Callable[[int, Tensor, Tensor], None]
"""Told the first address of a chunk, what was read there, and what was written."""
Tick = Callable[[int], None]
"""Told how many words a launch wrote or read."""


class Store(Protocol):
    """Memory of 32-bit words under test, addressed by number.

    ``chunk_words`` is the most that one launch writes or reads.
    """

    num_words: int
    chunk_words: int
    device: torch.device

    def write(self, start: int, stop: int, step: int, words: Tensor) -> None:
        """Write every ``step``-th word from ``start`` to before ``stop``, in one launch that knows no order."""

    def read(self, start: int, stop: int) -> Tensor:
        """Read these words: int32; valid until the next call."""


def chunks(num_words: int, chunk_words: int, downward: bool = False) -> Iterator[tuple[int, int]]:
    """(start, stop) of each chunk, the last one of which may be shorter."""
    starts = range(0, num_words, chunk_words)
    for start in reversed(starts) if downward else starts:
        yield start, min(start + chunk_words, num_words)


def write_sweep(store: Store, sweep: Sweep, tick: Tick) -> None:
    """The writing half: each class of addresses over all of memory before the next one."""
    step = len(sweep.order)
    for residue in sweep.order:
        for start, stop in chunks(store.num_words, store.chunk_words, sweep.downward):
            skipped = (residue - start) % step
            words = sweep.words.at(start, stop - start, store.device)[skipped::step]
            if words.numel():
                store.write(start + skipped, stop, step, words)
                tick(words.numel())


def check_sweep(store: Store, sweep: Sweep, compare: Compare, tick: Tick) -> None:
    """The checking half."""
    for start, stop in chunks(store.num_words, store.chunk_words):
        compare(start, store.read(start, stop), sweep.words.at(start, stop - start, store.device))
        tick(stop - start)
