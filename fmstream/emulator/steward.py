"""What the allocator and pinned memory ask of a machine, and what becomes of what they tell it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from fmstream.emulator.allocator import Block, Segment
from fmstream.emulator.backlog import Backlog
from fmstream.emulator.checker import Checker, Report
from fmstream.emulator.clocks import Mark, VectorClock
from fmstream.emulator.reserve import Reserve
from fmstream.emulator.sites import describe, here

if TYPE_CHECKING:
    from fmstream.emulator.machine import Machine

POISON: Final = 0xFF
"""Floats of such bytes are NaN, integers -1."""


class Steward:
    """Joins memory with the machine's time, its backlog and its checker."""

    def __init__(self, machine: Machine, checker: Checker, backlog: Backlog, reserve: Reserve, *, poison: bool) -> None:
        self._machine = machine
        self._checker = checker
        self._backlog = backlog
        self._reserve = reserve
        self._poison = poison
        self.record = machine.record
        self.synchronize = machine.synchronize

    def passed(self, mark: Mark) -> bool:
        """Whether a mark lies behind this thread's time; if so, the work before it has been done."""
        if mark.seconds > self._machine.now:
            return False
        self._backlog.force(mark.clock)
        return True

    def poison(self, block: Block) -> None:
        """Spoil a free block behind what its stream was given so far."""
        stream, address, size = self._machine.streams[block.stream], block.address, block.size
        tick = stream.clock[stream.id] = stream.clock.get(stream.id, 0) + 1
        self._backlog.add(stream.id, tick, stream.clock, lambda: ctypes.memset(address, POISON, size))

    def opened(self, segment: Segment) -> None:
        """Make a segment's bytes usable and watched.  In a dry run only small ones hold bytes."""
        if not self._reserve.usable and segment.small:
            self._reserve.open(segment.address, segment.size)
        if self._poison:
            ctypes.memset(segment.address, POISON, segment.size)
        self._checker.open(segment.address, segment.address + segment.size)

    def closed(self, segment: Segment) -> None:
        """Forget a segment, which nothing uses any more."""
        self._checker.close(segment.address)

    def waited(self, block: Block, clock: VectorClock) -> None:
        """Hold nothing that ``clock`` knows against the next user of a block."""
        self._checker.forget(block.address, block.size, clock)

    def freed_twice(self, block: Block) -> None:
        """Report a free of what is free."""
        offset = block.address - self._reserve.base
        where = f"the block of {block.nbytes} bytes at device offset {offset:#x}"
        message = f"double free: {where} was freed before\n  {describe(here())}"
        self._checker.report(Report("double free", message))

    def pinned(self, address: int, num_bytes: int) -> None:
        """Watch a pinned range."""
        self._checker.open(address, address + num_bytes)

    def unpinning(self, address: int, num_bytes: int) -> None:
        """Report a copy that may still be using what is to be unpinned."""
        self._machine.host_access((), ((address, num_bytes),), "unpin")

    def unpinned(self, address: int) -> None:
        """Watch a range no more."""
        self._checker.close(address)
