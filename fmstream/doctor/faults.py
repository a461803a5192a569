"""What a memory test found: errors with their addresses, histograms, and what they look like together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fmstream.doctor.words import MASK

KEPT: Final = 10
"""Errors of each pattern that are kept whole."""
LOOKED_AT: Final = 4096
"""Errors of each chunk that enter the histograms; all are counted."""
FEW_ADDRESSES: Final = 8
MANY_FLIPS: Final = 6
"""Flipped bits of one word: single cells and lines flip fewer, words of another address about 16 of 32."""
WIDE_SHARE: Final = 0.002
"""Share of all words, wrong in a single sweep, above which it is no handful of cells."""
LINE_SHARE: Final = 0.9
"""Share of all flipped bits that lie in the two positions flipped most often, for data lines."""

CELL, DATA_LINE, ADDRESS_LINE, UNCLEAR = "cell", "data line", "address line", "unclear"


@dataclass(frozen=True, slots=True)
class MemoryFault:
    """One wrong word.

    Attributes:
        address: virtual address; ``offset`` counts bytes from the start of what was tested.
        expected, actual: what was written there, what was read; ``second`` is what a second read gave.
        pattern: what was being written.
    """

    address: int
    offset: int
    expected: int
    actual: int
    second: int
    pattern: str

    def to_dict(self) -> dict[str, str | int]:
        """In JSON types, words and address in hexadecimal."""
        words = {name: f"0x{getattr(self, name):08x}" for name in ("expected", "actual", "second")}
        return {"address": f"0x{self.address:x}", "offset": self.offset, **words, "pattern": self.pattern}


@dataclass(slots=True)
class Findings:
    """Counts over all errors, histograms over those that were looked at.

    Attributes:
        num_errors: words that were wrong, each time that they were.
        faults: the first ones of each pattern.
        by_pattern: errors of each pattern.
        bits: how often each bit of 32 was flipped.
        flips: how many words had so many flipped bits, by number from 0 to 32.
        scrambled_flips: the same for patterns that make reads of wrong addresses show.
        second_reads: errors whose second read was as "expected", the "same" as the first, or "other".
        most_wrong: words wrong in one sweep, at most.
        addresses: numbers of words that were wrong, up to a limit.
    """

    num_errors: int = 0
    faults: list[MemoryFault] = field(default_factory=list)
    by_pattern: dict[str, int] = field(default_factory=dict)
    bits: NDArray[np.int64] = field(default_factory=lambda: np.zeros(32, dtype=np.int64))
    flips: NDArray[np.int64] = field(default_factory=lambda: np.zeros(33, dtype=np.int64))
    scrambled_flips: NDArray[np.int64] = field(default_factory=lambda: np.zeros(33, dtype=np.int64))
    second_reads: dict[str, int] = field(default_factory=lambda: {"expected": 0, "same": 0, "other": 0})
    most_wrong: int = 0
    addresses: set[int] = field(default_factory=set)
    _in_sweep: int = 0

    def begin_sweep(self) -> None:
        """What comes now belongs to another sweep."""
        self._in_sweep = 0

    def add(self, words: NDArray[np.int64], expected: Array, actual: Array, second: Array, scrambled: bool) -> None:
        """Enter errors into the histograms; words are unsigned 32-bit integers in 64."""
        turned = unpacked(expected ^ actual)
        self.bits += turned.sum(axis=0)
        counts = np.bincount(turned.sum(axis=1), minlength=33)
        self.flips += counts
        if scrambled:
            self.scrambled_flips += counts
        good, same = second == expected, second == actual
        self.second_reads["expected"] += int(good.sum())
        self.second_reads["same"] += int(same.sum())
        self.second_reads["other"] += int((~good & ~same).sum())
        if len(self.addresses) < LOOKED_AT:
            self.addresses.update(words.tolist())

    def count(self, num_errors: int, pattern: str) -> None:
        """Count errors of a chunk."""
        self.num_errors += num_errors
        self._in_sweep += num_errors
        self.most_wrong = max(self.most_wrong, self._in_sweep)
        self.by_pattern[pattern] = self.by_pattern.get(pattern, 0) + num_errors

    def keep(self, fault: MemoryFault) -> None:
        """Keep an error whole, if there is room for one more of its pattern."""
        if sum(kept.pattern == fault.pattern for kept in self.faults) < KEPT:
            self.faults.append(fault)


Array = NDArray[np.int64]


def unpacked(words: Array) -> Array:
    """Bits of 32-bit words, the lowest first: shape (n, 32)."""
    bits: Array = (words[:, None] >> np.arange(32)) & 1
    return bits


def unsigned(words: Tensor) -> Array:
    """A tensor of int32 as unsigned integers in 64 bits, on the host."""
    found: Array = words.to("cpu", torch.int64).numpy() & MASK
    return found


class Comparer:
    """Compares chunks with what was written, and enters what differs.

    Args:
        findings: where errors go.
        read_again: from numbers of words, all in one chunk, to what they hold now.
        address: of a word.
    """

    def __init__(
        self, findings: Findings, read_again: Callable[[Tensor], Tensor], address: Callable[[int], int]
    ) -> None:
        self._findings = findings
        self._read_again = read_again
        self._address = address
        self.pattern = ""
        self.scrambled = False

    def __call__(self, start: int, actual: Tensor, expected: Tensor) -> None:
        """Compare a chunk that begins at a word."""
        if torch.equal(actual, expected):
            return
        wrong = torch.nonzero(actual != expected).flatten()
        shown = wrong[:LOOKED_AT]
        second = unsigned(self._read_again(shown + start))
        words = (shown + start).cpu().numpy()
        was, had_to_be = unsigned(actual[shown]), unsigned(expected[shown])
        self._findings.count(wrong.numel(), self.pattern)
        self._findings.add(words, had_to_be, was, second, self.scrambled)
        for at in range(min(KEPT, words.size)):
            word = int(words[at])
            values = int(had_to_be[at]), int(was[at]), int(second[at])
            self._findings.keep(MemoryFault(self._address(word), 4 * word, *values, self.pattern))


def name_kind(findings: Findings, num_words: int) -> str | None:
    """What the errors look like together: "cell", "data line", "address line" or "unclear"; None without errors.

    Reads of a wrong address flip about half of the bits where the words of all addresses differ at random.  A data
    line flips its own bit, or two that touch theirs, in many words.  Cells are few, each with a bit or two.
    """
    if not findings.num_errors:
        return None
    if findings.scrambled_flips.sum():
        many = findings.scrambled_flips[MANY_FLIPS:].sum() / findings.scrambled_flips.sum()
        if many > 0.5:
            return ADDRESS_LINE
    most_flipped = np.sort(findings.bits)[-2:].sum() / max(1, findings.bits.sum())
    if len(findings.addresses) <= FEW_ADDRESSES:
        return CELL
    if findings.most_wrong / num_words >= WIDE_SHARE:
        # The address itself, written as a word, shows lines of both kinds as one flipped bit.
        only_address = set(findings.by_pattern) == {"own-address"}
        return DATA_LINE if most_flipped >= LINE_SHARE and not only_address else UNCLEAR
    few_bits = findings.flips[:3].sum() / findings.flips.sum()
    return CELL if few_bits > 0.5 else UNCLEAR
