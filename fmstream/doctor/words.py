"""32-bit words as functions of their address, made in chunks on the device that they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_WORDS: Final = 1 << 16
"""Words after which patterns without marks recur; most patterns mark each block with its number."""
MASK: Final = 0xFFFFFFFF
ROTATING_WORDS: Final = 31 * 2048
"""A block of the rotating address: the rotation recurs after 31 words."""
GOLDEN: Final = 0x9E3779B1

Numbers = NDArray[np.int64]
Marks = Callable[[Numbers], NDArray[np.uint32]]


class Words:
    """A block of words that recurs, each time under other marks.

    Word ``i`` is ``block[i % n] ^ marks(i // n)[i % p]`` for a block of ``n`` words and ``p`` marks to each block;
    ``p`` divides ``n``.  One exclusive or makes a chunk of any pattern, so that a pass is as fast as the memory.

    Args:
        block: the words as unsigned 32-bit integers.
        marks: from the numbers of blocks, shape (k,), to their marks, shape (k, p); None where blocks are alike.
    """

    def __init__(self, block: NDArray[np.uint32], marks: Marks | None = None) -> None:
        self._block = torch.from_numpy(block.view(np.int32))
        self._marks = marks
        self._made: tuple[Any, Tensor] | None = None

    def complement(self) -> Words:
        """The same with every bit turned."""
        return Words(~self._block.cpu().numpy().view(np.uint32), self._marks)

    def at(self, start: int, count: int, device: torch.device) -> Tensor:
        """The words of ``count`` addresses from ``start`` on: int32, shape (count,); not to be written."""
        length = self._block.numel()
        key = (start % length if self._marks is None else start, count, device)
        if self._made is None or self._made[0] != key:
            self._made = key, self._make(start, count, device)
        return self._made[1]

    def _make(self, start: int, count: int, device: torch.device) -> Tensor:
        if self._block.device != device:
            self._block = self._block.to(device)
        length = self._block.numel()
        first, last = start // length, (start + count - 1) // length
        within = start - first * length
        numbers = np.arange(first, last + 1, dtype=np.int64)
        if self._marks is None:
            whole = self._block.expand(numbers.size, length)
        else:
            marks = torch.from_numpy(np.ascontiguousarray(self._marks(numbers)).view(np.int32)).to(device)
            if first == last and marks.numel() == 1:
                return self._block[within : within + count] ^ marks[0]
            whole = self._block.view(1, -1, marks.shape[1]) ^ marks.unsqueeze(1)
        return whole.reshape(-1)[within : within + count]


def own_address() -> Words:
    """Each word holds its own number."""
    return Words(np.arange(BLOCK_WORDS, dtype=np.uint32), _place)


def _place(numbers: Numbers) -> NDArray[np.uint32]:
    """The upper bits of a block's words; those above 32 are folded in."""
    low, high = numbers & 0xFFFF, numbers >> 16
    return (((low << 16) ^ (high * GOLDEN)) & MASK).astype(np.uint32)[:, None]


def rotating_address(offset: int) -> Words:
    """Each word holds its address, turned left by the address modulo 31, so that each line shows in every bit.

    After memtest_vulkan (GpuZelenograd/memtest_vulkan), where the address is one number; here it is the number of a
    block and the place within it, for which a block's marks recur.
    """
    places = np.arange(ROTATING_WORDS, dtype=np.uint32)
    turns = places[:31] % np.uint32(31)

    def marks(numbers: Numbers) -> NDArray[np.uint32]:
        raised = (((numbers + offset) << 16) ^ ((numbers >> 16) * GOLDEN)) & MASK
        return turned_left(raised.astype(np.uint32)[:, None], turns)

    return Words(turned_left(places ^ np.uint32(offset & 0xFFFF), places % np.uint32(31)), marks)


def turned_left(words: NDArray[np.uint32], by: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Words whose bits are rotated to the left by 0 to 31."""
    wide = words.astype(np.uint64)
    return (((wide << by) | (wide >> (np.uint64(32) - by))) & np.uint64(MASK)).astype(np.uint32)


def one_bit(shift: int) -> Words:
    """One set bit in each word, one place further from word to word."""
    places = (np.arange(BLOCK_WORDS, dtype=np.uint32) + np.uint32(shift)) % np.uint32(32)
    return Words(np.uint32(1) << places)


def random_words(seed: int) -> Words:
    """Random words of a seed."""
    generator = np.random.default_rng(seed)
    block = generator.integers(0, 1 << 32, BLOCK_WORDS, dtype=np.uint32)
    key = int(generator.integers(1 << 32))
    return Words(block, lambda numbers: _mixed(numbers, key))


def _mixed(numbers: Numbers, key: int) -> NDArray[np.uint32]:
    """A hash of each number: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014, figure 17)."""
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z >> np.uint64(32)).astype(np.uint32)[:, None]


def constant(value: int) -> Words:
    """The same word everywhere."""
    return Words(np.full(BLOCK_WORDS, value, dtype=np.uint32))


def one_in(modulus: int, residue: int, value: int) -> Words:
    """``value`` where the address has this residue, its complement elsewhere."""
    block = np.full(BLOCK_WORDS // modulus * modulus, value ^ MASK, dtype=np.uint32)
    block[residue::modulus] = value
    return Words(block)
