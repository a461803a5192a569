"""Patterns of a memory test: which words are written in which order, each time checked in a pass apart.

What they find of which faults is measured by ``bench memtest_detection``.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fmstream.doctor.words import (
    MASK,
    Words,
    constant,
    one_bit,
    one_in,
    own_address,
    random_words,
    rotating_address,
)
from fmstream.errors import ConfigError

CLASSES: Final = (3, 5, 7)
"""Numbers of classes of addresses that are written one after the other.

Two addresses that differ in one bit are never of the same class, and others are apart for at least one of the numbers
unless they are a multiple of 105 words apart.
"""
ROTATIONS: Final = 8
SEEDS: Final = 36


@dataclass(frozen=True, slots=True)
class Sweep:
    """All of memory is written, then all of it is checked.

    Attributes:
        words: what is written.
        downward: whether writing goes from the last chunk to the first.
        order: residues of addresses modulo its length: those of the first are written in all chunks before those of
            the second.  Within a launch writes have no order, so this is how each word comes before its neighbours at
            times, and after them at others.
    """

    words: Words
    downward: bool = False
    order: Sequence[int] = (0,)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Some sweeps that belong together.

    Attributes:
        name: as it is chosen.
        num_sweeps: length of what ``sweeps`` yields.
        scrambled: whether words of different addresses differ in about half of their bits, so that a read from a wrong
            address shows as such.
        sweeps: makes them from a source of random numbers.
    """

    name: str
    num_sweeps: int
    scrambled: bool
    sweeps: Callable[[random.Random], Iterator[Sweep]]


def _own_address(numbers: random.Random) -> Iterator[Sweep]:
    """Each word holds its own address, then the complement."""
    words = own_address()
    yield Sweep(words)
    yield Sweep(words.complement(), downward=True)


def _rotating(numbers: random.Random) -> Iterator[Sweep]:
    """The address, turned by a number of bits that goes on."""
    for _ in range(ROTATIONS):
        words = rotating_address(numbers.getrandbits(24))
        yield Sweep(words)
        yield Sweep(words.complement(), downward=True)


def _inversions(numbers: random.Random) -> Iterator[Sweep]:
    """32-bit moving inversions: one bit walks, turns and turns back."""
    for shift in range(32):
        words = one_bit(shift)
        yield Sweep(words)
        yield Sweep(words.complement())
        yield Sweep(words, downward=True)


def _random(numbers: random.Random) -> Iterator[Sweep]:
    """Random words, then their complements in classes of addresses."""
    for number in range(SEEDS):
        words, classes = random_words(numbers.getrandbits(62)), CLASSES[number % len(CLASSES)]
        yield Sweep(words, numbers.random() < 0.5)
        # Every bit changes now, each before its neighbours' or after them.
        yield Sweep(words.complement(), numbers.random() < 0.5, numbers.sample(range(classes), classes))


def _walking(numbers: random.Random) -> Iterator[Sweep]:
    """8-bit moving inversions: the same walking bit in every byte."""
    for bit in range(8):
        words = constant(0x01010101 << bit)
        yield Sweep(words)
        yield Sweep(words.complement())
        yield Sweep(words, downward=True)


def _solid(numbers: random.Random) -> Iterator[Sweep]:
    """The same word everywhere: 0, A, 5, F, 0."""
    for value in (0, 0xAAAAAAAA, 0x55555555, MASK, 0):
        yield Sweep(constant(value))


def _modulo(numbers: random.Random) -> Iterator[Sweep]:
    """One word of 20, and the complement around it afterwards."""
    value = numbers.getrandbits(32)
    for first in range(20):
        yield Sweep(one_in(20, first, value), order=(first, *(r for r in range(20) if r != first)))


def _deadbeef(numbers: random.Random) -> Iterator[Sweep]:
    """The word 0xdeadbeef everywhere: finds little, as a comparison."""
    yield Sweep(constant(0xDEADBEEF))


PATTERNS: Final[dict[str, Pattern]] = {
    pattern.name: pattern
    for pattern in (
        Pattern("own-address", 2, False, _own_address),
        Pattern("rotating", 2 * ROTATIONS, True, _rotating),
        Pattern("inversions", 96, False, _inversions),
        Pattern("random", 2 * SEEDS, True, _random),
        Pattern("walking", 24, False, _walking),
        Pattern("modulo-20", 20, False, _modulo),
        Pattern("solid", 5, False, _solid),
        Pattern("deadbeef", 1, False, _deadbeef),
    )
}
DEFAULT: Final = ("own-address", "rotating", "inversions", "random")
"""The suite whose detection is measured."""


def find_patterns(names: Sequence[str]) -> tuple[Pattern, ...]:
    """The patterns of these names, in their order.

    Raises:
        ConfigError: there is none of that name, none at all, or one twice.
    """
    for name in names:
        if name not in PATTERNS:
            near = difflib.get_close_matches(name, PATTERNS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"no pattern is called {name!r}: {hint}There are {', '.join(PATTERNS)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"patterns={','.join(names)!r}: name each pattern once, at least one")
    return tuple(PATTERNS[name] for name in names)


def make_sweeps(pattern: Pattern, seed: int, round_number: int) -> Iterator[Sweep]:
    """A pattern's sweeps in a round; the same for the same seed."""
    return pattern.sweeps(random.Random(f"{seed} {round_number} {pattern.name}"))
