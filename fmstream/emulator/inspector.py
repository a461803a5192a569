"""Looks at each operation: are its bytes allocated, and is it in order with those before it?"""

from __future__ import annotations

from collections.abc import Sequence

from fmstream.emulator.allocator import Allocator, Block
from fmstream.emulator.checker import Access, Checker, Report, Span
from fmstream.emulator.clocks import VectorClock
from fmstream.emulator.reserve import Reserve
from fmstream.emulator.sites import describe, here


class Inspector:
    """Joins the checker, which knows addresses, with the allocator, which knows what lies there."""

    def __init__(self, checker: Checker, reserve: Reserve, allocator: Allocator) -> None:
        self._checker = checker
        self._reserve = reserve
        self._allocator = allocator
        checker.explain = self._explain

    def look(
        self, reads: Sequence[Span], writes: Sequence[Span], actor: int, tick: int, name: str, clock: VectorClock
    ) -> None:
        """Check what an operation reads and writes.  Raises SyncError if the checker is to raise."""
        allocator, base, end = self._allocator, self._reserve.base, self._reserve.end
        allocator.num_operations += 1
        access = Access(actor, tick, name, here(), allocator.num_operations)
        for spans, write in ((reads, False), (writes, True)):
            for address, num_bytes in spans:
                if base <= address < end and num_bytes:
                    block = allocator.block_at(address)
                    if block is None or not block.allocated or address + num_bytes > block.address + block.nbytes:
                        self._outside(address, num_bytes, block, access, write)
            self._checker.access(spans, access, write, clock)

    def _outside(self, address: int, num_bytes: int, block: Block | None, access: Access, write: bool) -> None:
        verb = "writes" if write else "reads"
        why = "nothing is there" if block is None else "it ends before" if block.allocated else "it was freed"
        message = (
            f"access outside any allocation: {access} {verb} {num_bytes} bytes {self._place(address, block)}: {why}\n"
            f"  {describe(access.site)}"
        )
        self._checker.report(Report("outside", message, None, access))

    def _place(self, address: int, block: Block | None) -> str:
        """Where an address lies, the same at each run."""
        if block is None:
            return f"at device offset {address - self._reserve.base:#x}"
        start = block.address - self._reserve.base
        return f"{address - block.address} bytes into the block of {block.nbytes} bytes at device offset {start:#x}"

    def _explain(self, address: int, other: Access) -> str:
        """Where bytes lie, and whether they were given out anew since ``other`` used them."""
        if not self._reserve.base <= address < self._reserve.end:
            region = self._checker.region(address)
            return f"{address - (region.start if region else 0)} bytes into a pinned range"
        block = self._allocator.block_at(address)
        place = self._place(address, block)
        if block is None or other.number > block.born:
            return place
        return f"{place}, which was freed and given out again in between: a record_stream is missing, or a wait"
