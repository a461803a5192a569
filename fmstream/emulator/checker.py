"""The race checker: which accesses to the same bytes nothing puts in order.

Each interval of bytes remembers its last write and the reads since, by actor (as FastTrack does for variables: Flanagan
and Freund, PLDI 2009).  An access is in order after an earlier one if the vector clock of its actor knows that one's
step.  Bytes keep this memory when their block is freed and given out again, so that a reuse which came too early shows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fmstream.emulator.clocks import HOST, VectorClock
from fmstream.emulator.sites import Site, describe
from fmstream.errors import ConfigError, FmstreamError

Check = Literal["raise", "record"] | None
Span = tuple[int, int]
"""An address and a number of bytes."""


class Access:
    """One operation as the checker remembers it."""

    __slots__ = ("actor", "name", "number", "site", "tick")

    def __init__(self, actor: int, tick: int, name: str, site: Site, number: int) -> None:
        self.actor = actor
        self.tick = tick
        self.name = name
        self.site = site
        self.number = number
        """How many operations came before it on the whole machine."""

    def __str__(self) -> str:
        where = "the host" if self.actor == HOST else f"stream {self.actor}"
        return f"{self.name} on {where}"


@dataclass(frozen=True, slots=True)
class Report:
    """Something wrong with how bytes were used.

    ``kind`` is "race", "outside" (an access to bytes that no allocation holds) or "double free".  ``first`` is the
    earlier access of a race, ``second`` the one at which it was seen.
    """

    kind: str
    message: str
    first: Access | None = None
    second: Access | None = None


class SyncError(FmstreamError, RuntimeError):
    """An access is not ordered after another that it conflicts with, or lies outside any allocation."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.message)
        self.report = report


class Conflict(NamedTuple):
    """An earlier access, what it did, and where."""

    access: Access
    kind: str
    address: int


class _Cell:
    """An interval of bytes that have been used alike: its last write, and the reads since."""

    __slots__ = ("end", "readers", "writer")

    def __init__(self, end: int, writer: Access | None = None, readers: dict[int, Access] | None = None) -> None:
        self.end = end
        self.writer = writer
        self.readers: dict[int, Access] = {} if readers is None else readers

    def conflict(self, at: int, access: Access, write: bool, clock: VectorClock) -> Conflict | None:
        """An earlier access that this one is not ordered after; ``at`` is where the interval begins."""
        writer = self.writer
        if writer is not None and writer.actor != access.actor and clock.get(writer.actor, 0) < writer.tick:
            return Conflict(writer, "write", at)
        if write:
            for reader in self.readers.values():
                if reader.actor != access.actor and clock.get(reader.actor, 0) < reader.tick:
                    return Conflict(reader, "read", at)
        return None

    def note(self, access: Access, write: bool) -> None:
        if write:
            self.writer = access
            if self.readers:
                self.readers = {}
        else:
            self.readers[access.actor] = access

    def forget(self, clock: VectorClock) -> None:
        """Drop what ``clock`` knows."""
        if self.writer is not None and self.writer.tick <= clock.get(self.writer.actor, 0):
            self.writer = None
        self.readers = {a: reader for a, reader in self.readers.items() if reader.tick > clock.get(a, 0)}


class Shadow:
    """The cells of one region of memory, in order of address and disjoint; bytes never used have none."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self._starts: list[int] = []
        self._cells: list[_Cell] = []

    def touch(self, low: int, high: int, access: Access, write: bool, clock: VectorClock) -> Conflict | None:
        """Note an access to [low, high); the first that it is in conflict with."""
        starts, cells = self._starts, self._cells
        index = bisect_left(starts, low)
        if index < len(starts) and starts[index] == low and cells[index].end == high:  # as it was used before
            cell = cells[index]
            found = cell.conflict(low, access, write, clock)
            cell.note(access, write)
            return found
        return self._touch_many(low, high, access, write, clock)

    def _touch_many(self, low: int, high: int, access: Access, write: bool, clock: VectorClock) -> Conflict | None:
        first, last = self._cut(low), self._cut(high)
        found: Conflict | None = None
        for index in range(first, last):
            found = self._cells[index].conflict(self._starts[index], access, write, clock)
            if found is not None:
                break
        if write:
            self._starts[first:last] = [low]
            self._cells[first:last] = [_Cell(high, access)]
        else:
            self._read(first, last, low, high, access)
        return found

    def _read(self, first: int, last: int, low: int, high: int, access: Access) -> None:
        """Add a reader to the cells from first to last, and cells for the bytes between them."""
        starts, cells, at = [], [], low
        for start, cell in zip(self._starts[first:last], self._cells[first:last], strict=True):
            if at < start:
                starts.append(at)
                cells.append(_Cell(start, None, {access.actor: access}))
            cell.note(access, False)
            starts.append(start)
            cells.append(cell)
            at = cell.end
        if at < high:
            starts.append(at)
            cells.append(_Cell(high, None, {access.actor: access}))
        self._starts[first:last] = starts
        self._cells[first:last] = cells

    def _cut(self, at: int) -> int:
        """Divide the cell that ``at`` lies inside of; the index of the first cell at or after it."""
        index = bisect_left(self._starts, at)
        if index and self._cells[index - 1].end > at:
            before = self._cells[index - 1]
            self._starts.insert(index, at)
            self._cells.insert(index, _Cell(before.end, before.writer, dict(before.readers)))
            before.end = at
        return index

    def forget(self, low: int, high: int, clock: VectorClock) -> None:
        """Drop accesses to [low, high) that ``clock`` knows: the next user was made to wait for them."""
        first, last = self._cut(low), self._cut(high)
        for cell in self._cells[first:last]:
            cell.forget(clock)

    def check(self) -> None:
        """Raise AssertionError unless the cells are in order, disjoint and within the region."""
        at = self.start
        for start, cell in zip(self._starts, self._cells, strict=True):
            assert at <= start < cell.end, (at, start, cell.end)
            at = cell.end
        assert at <= self.end


class Checker:
    """Shadows of all regions, and the reports.

    ``check`` is "raise" (a SyncError at the access that shows it), "record" (only a report) or None (nothing is
    looked at).  Regions are segments of device memory and pinned ranges; addresses outside of them are not followed.
    """

    def __init__(self, check: Check) -> None:
        if check not in ("raise", "record", None):
            raise ConfigError(f"check={check!r} is none of 'raise', 'record' and None")
        self.check = check
        self.reports: list[Report] = []
        self._starts: list[int] = []
        self._shadows: list[Shadow] = []
        self.explain: Callable[[int, Access], str] = lambda address, other: ""
        """Says where an address lies, and what became of it since an earlier access."""

    def open(self, start: int, end: int) -> None:
        """Follow accesses to a region."""
        index = bisect_left(self._starts, start)
        self._starts.insert(index, start)
        self._shadows.insert(index, Shadow(start, end))

    def close(self, start: int) -> None:
        """Forget a region."""
        index = bisect_left(self._starts, start)
        del self._starts[index], self._shadows[index]

    def region(self, address: int) -> Shadow | None:
        """The region that an address lies in."""
        index = bisect_right(self._starts, address)
        if index:
            shadow = self._shadows[index - 1]
            if address < shadow.end:
                return shadow
        return None

    def access(self, spans: Iterable[Span], access: Access, write: bool, clock: VectorClock) -> None:
        """Note accesses to some spans, and report the first conflict of each."""
        starts, shadows = self._starts, self._shadows
        for address, num_bytes in spans:
            index = bisect_right(starts, address)
            if not index or not num_bytes:
                continue
            shadow = shadows[index - 1]
            if address >= shadow.end:
                continue
            found = shadow.touch(address, min(address + num_bytes, shadow.end), access, write, clock)
            if found is not None:
                self._race(access, "write" if write else "read", found)

    def forget(self, address: int, num_bytes: int, clock: VectorClock) -> None:
        """Drop accesses that ``clock`` knows."""
        shadow = self.region(address)
        if shadow is not None:
            shadow.forget(address, address + num_bytes, clock)

    def report(self, report: Report) -> None:
        """Raise, or keep, a report."""
        if self.check is None:
            return
        self.reports.append(report)
        if self.check == "raise":
            raise SyncError(report)

    def _race(self, access: Access, kind: str, found: Conflict) -> None:
        other, before = found.access, found.kind
        message = (
            f"unsynchronised access: the {kind} by {access} is not ordered after the {before} by {other}: no event, "
            f"stream or host waited for it; the bytes lie {self.explain(found.address, other)}\n"
            f"  {kind}: {describe(access.site)}\n  earlier {before}: {describe(other.site)}"
        )
        self.report(Report("race", message, other, access))
