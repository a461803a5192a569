"""Simulated memories, many at once, each with a fault of its own: what the patterns of the memory test run over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

CPU: Final = torch.device("cpu")


class Memories:
    """``count`` memories of ``num_words`` words each, in step: a `Store` whose reads have a row for each memory.

    Cells hold anything at first.  The subclasses are the kinds of fault; all sorts of one kind are drawn at random.
    """

    def __init__(self, count: int, num_words: int, chunk_words: int, source: torch.Generator) -> None:
        self.num_words, self.chunk_words, self.device = num_words, chunk_words, CPU
        self.source = source
        self.rows = torch.arange(count)
        self.cells = self.draw(-(1 << 31), 1 << 31, count, num_words).to(torch.int32)

    def draw(self, low: int, high: int, *size: int) -> Tensor:
        """Random integers from ``low`` to before ``high``: one for each memory, or of a size."""
        return torch.randint(low, high, size or (self.rows.numel(),), generator=self.source)

    def draw_bit(self) -> Tensor:
        """A word with one bit set, for each memory."""
        return (torch.ones_like(self.rows) << self.draw(0, 32)).to(torch.int32)

    def draw_other(self, first: Tensor, high: int) -> Tensor:
        """A number below ``high`` other than the first, for each memory."""
        return (first + self.draw(1, high)) % high

    def write(self, start: int, stop: int, step: int, words: Tensor) -> None:
        """Write the same words to all memories."""
        self.cells[:, start:stop:step] = words

    def read(self, start: int, stop: int) -> Tensor:
        """Read from all memories: shape (count, stop - start)."""
        return self.cells[:, start:stop].clone()


class StuckBit(Memories):
    """One bit of one cell that is always 1, or always 0."""

    def __init__(self, one: bool, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.one = one
        self.cell, self.bit = self.draw(0, self.num_words), self.draw_bit()

    def write(self, start: int, stop: int, step: int, words: Tensor) -> None:
        """Write, and let the bit be as it always is."""
        super().write(start, stop, step, words)
        held = self.cells[self.rows, self.cell]
        self.cells[self.rows, self.cell] = held | self.bit if self.one else held & ~self.bit


class Transition(Memories):
    """One bit that cannot go from 0 to 1, or not from 1 to 0."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.cell, self.bit, self.up = self.draw(0, self.num_words), self.draw_bit(), self.draw(0, 2).bool()

    def write(self, start: int, stop: int, step: int, words: Tensor) -> None:
        """Write, and take back what the bit cannot do."""
        before = self.cells[self.rows, self.cell]
        super().write(start, stop, step, words)
        after = self.cells[self.rows, self.cell]
        limited = torch.where(self.up, after & before, after | before)
        self.cells[self.rows, self.cell] = (after & ~self.bit) | (limited & self.bit)


class Coupling(Memories):
    """A bit of one cell that changes when a bit of another one rises, or falls: it is turned, set or cleared.

    Where both cells are written by one launch, the victim comes last, so that nothing shows.

    Args:
        reach: how far the cells are apart at most; None for anywhere.
    """

    def __init__(self, reach: int | None, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.cell, self.bit, self.victim_bit = self.draw(0, self.num_words), self.draw_bit(), self.draw_bit()
        if reach is None:
            self.victim = self.draw_other(self.cell, self.num_words)
        else:
            sign = 1 - 2 * self.draw(0, 2)
            self.victim = (self.cell + sign * self.draw(1, reach + 1)) % self.num_words
        self.rising, self.effect = self.draw(0, 2).bool(), self.draw(0, 3)

    def write(self, start: int, stop: int, step: int, words: Tensor) -> None:
        """Write, and disturb the victims that were not themselves written."""
        before = self.cells[self.rows, self.cell]
        super().write(start, stop, step, words)
        after = self.cells[self.rows, self.cell]
        moved = torch.where(self.rising, after & ~before, before & ~after) & self.bit
        written = (self.victim >= start) & (self.victim < stop) & ((self.victim - start) % step == 0)
        held = self.cells[self.rows, self.victim]
        turned, lifted, cleared = held ^ self.victim_bit, held | self.victim_bit, held & ~self.victim_bit
        disturbed = torch.where(self.effect == 0, turned, torch.where(self.effect == 1, lifted, cleared))
        self.cells[self.rows, self.victim] = torch.where((moved != 0) & ~written, disturbed, held)


class BridgedCells(Memories):
    """The same bit of two cells, read as the OR of both, or as the AND."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.cell, self.bit, self.either = self.draw(0, self.num_words), self.draw_bit(), self.draw(0, 2).bool()
        self.other = self.draw_other(self.cell, self.num_words)

    def read(self, start: int, stop: int) -> Tensor:
        """Read, both bits as one."""
        found = super().read(start, stop)
        one, two = self.cells[self.rows, self.cell], self.cells[self.rows, self.other]
        joined = torch.where(self.either, one | two, one & two) & self.bit
        for cell, held in ((self.cell, one), (self.other, two)):
            rows = self.rows[(cell >= start) & (cell < stop)]
            found[rows, cell[rows] - start] = ((held & ~self.bit) | joined)[rows]
        return found


class BridgedLines(Memories):
    """Two data lines that touch: both bits of every word are read as the OR, or as the AND, of the two."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        line = self.draw(0, 32)
        one = torch.ones_like(line)
        self.one = (one << line).to(torch.int32)[:, None]
        self.two = (one << self.draw_other(line, 32)).to(torch.int32)[:, None]
        self.either = self.draw(0, 2).bool()[:, None]

    def read(self, start: int, stop: int) -> Tensor:
        """Read over the touching lines."""
        found = super().read(start, stop)
        one, two, both = (found & self.one) != 0, (found & self.two) != 0, self.one | self.two
        return torch.where(torch.where(self.either, one | two, one & two), found | both, found & ~both)


class StuckAddressLine(Memories):
    """One address line that is always 0, or always 1: two words share one cell.

    Of two that one launch writes to a cell, either comes last, always the same.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        line = (torch.ones_like(self.rows) << self.draw(0, self.num_words.bit_length() - 1))[:, None]
        address, high = torch.arange(self.num_words)[None, :], self.draw(0, 2).bool()[:, None]
        self.cell_of = torch.where(high, address | line, address & ~line)
        late = (self.cell_of == address) ^ self.draw(0, 2).bool()[:, None]
        # A column beyond the end takes what the other of the two steps writes.
        self.cells = torch.nn.functional.pad(self.cells, (0, 1))
        self.steps = [torch.where(late == now, self.cell_of, self.num_words) for now in (False, True)]

    def write(self, start: int, stop: int, step: int, words: Tensor) -> None:
        """Write to the cells that are reached, to some of them twice."""
        for cells in self.steps:
            at = cells[:, start:stop:step]
            self.cells.scatter_(1, at, words.expand_as(at))

    def read(self, start: int, stop: int) -> Tensor:
        """Read the cells that are reached."""
        return self.cells.gather(1, self.cell_of[:, start:stop])


class Intermittent(Memories):
    """One bit of one cell that each read sees turned with a probability."""

    def __init__(self, probability: float, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.probability = probability
        self.cell, self.bit = self.draw(0, self.num_words), self.draw_bit()

    def read(self, start: int, stop: int) -> Tensor:
        """Read, now and then wrongly."""
        found = super().read(start, stop)
        turned = torch.rand(self.rows.shape, generator=self.source) < self.probability
        rows = self.rows[turned & (self.cell >= start) & (self.cell < stop)]
        found[rows, self.cell[rows] - start] ^= self.bit[rows]
        return found


Make = Callable[[int, int, int, torch.Generator], Memories]
INTERMITTENT: Final = 0.01
"""Probability that a read of the cell is wrong."""
NEIGHBOURS: Final = 4

PERMANENT: Final[dict[str, Make]] = {
    "stuck at 1": lambda *sizes: StuckBit(True, *sizes),
    "stuck at 0": lambda *sizes: StuckBit(False, *sizes),
    "transition": lambda *sizes: Transition(*sizes),
    "bridged data lines": lambda *sizes: BridgedLines(*sizes),
    "bridged cells": lambda *sizes: BridgedCells(*sizes),
    "coupling": lambda *sizes: Coupling(None, *sizes),
    "stuck address line": lambda *sizes: StuckAddressLine(*sizes),
}
COUPLED_NEIGHBOURS: Final[Make] = lambda *sizes: Coupling(NEIGHBOURS, *sizes)  # noqa: E731
NOW_AND_THEN: Final[Make] = lambda *sizes: Intermittent(INTERMITTENT, *sizes)  # noqa: E731
