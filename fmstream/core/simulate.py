"""What a plan will cost: the link, the window and the compute clock played through a few passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fmstream.core.arena import num_pages
from fmstream.core.plan import Costs, Unit
from fmstream.core.trace import Trace
from fmstream.core.units import closing_call

PASSES = 3
"""Passes that are played; the last one is taken as the steady one."""


class Use(NamedTuple):
    """One unit as the simulation sees it: seconds on the compute clock, pages, and seconds on the link."""

    start: float
    end: float
    pages: int
    load_seconds: float


def load_seconds(num_bytes: int, costs: Costs) -> float:
    """Seconds that one load occupies the link."""
    return costs.latency_seconds + num_bytes / costs.bytes_per_second


def simulate(
    trace: Trace,
    units: Sequence[Unit],
    *,
    window_bytes: int,
    page_bytes: int,
    costs: Costs,
    lookahead: int | None,
    wrap: bool,
) -> float:
    """Seconds of a steady pass under a plan, from its start to its end.

    Args:
        trace: the pass; its clock says when each unit is entered and left, and ``between`` passes from pass to pass.
        units: what is streamed, as in a `Plan`.
        window_bytes, page_bytes: the circular window and its pages.
        costs: the link carries one load at a time, each for ``latency + bytes / rate``.
        lookahead: units that may be issued ahead of the one in use; 0: at its entry; None: all that fit.
        wrap: whether units of the next pass may be issued before this one has ended.
    """
    uses = [
        Use(
            trace.calls[unit.first].start,
            trace.calls[closing_call(trace, unit)].end,
            num_pages(unit.num_bytes, page_bytes),
            load_seconds(unit.num_bytes, costs),
        )
        for unit in units
    ]
    return play(uses, window_bytes // page_bytes, trace.seconds, trace.between, lookahead, wrap)


class _Link:
    """The link and the window: which units have been issued, when each has arrived, and where the cursors stand."""

    __slots__ = ("busy_until", "head", "issued", "num_frames", "positions", "ready", "released", "tail", "uses")

    def __init__(self, uses: Sequence[Use], num_frames: int) -> None:
        self.uses = uses
        self.num_frames = num_frames
        self.head = self.tail = 0
        self.issued = self.released = 0
        self.busy_until = 0.0
        self.positions: list[int] = []
        self.ready: list[float] = []

    def issue(self, limit: int, now: float) -> None:
        """Issue units up to the ``limit``-th, counted over all passes, while the window has room."""
        head, size, uses = self.head, self.num_frames, self.uses
        while self.issued < limit:
            use = uses[self.issued % len(uses)]
            position = head
            rest = size - position % size
            if rest < use.pages:
                position += rest
            if self.issued == self.released:
                self.tail = position
            elif position + use.pages - self.tail > size:
                break
            head = position + use.pages
            self.busy_until = max(now, self.busy_until) + use.load_seconds
            self.positions.append(position)
            self.ready.append(self.busy_until)
            self.issued += 1
        self.head = head

    def release(self) -> None:
        """Give back the oldest unit."""
        self.released += 1
        self.tail = self.positions[self.released] if self.released < self.issued else self.head


def play(
    uses: Sequence[Use], num_frames: int, seconds: float, between: float, lookahead: int | None, wrap: bool
) -> float:
    """Seconds of the last of a few passes over ``uses``; the arguments are those of `simulate`."""
    if not uses:
        return seconds
    if max(use.pages for use in uses) > num_frames:
        raise AssertionError(f"a unit of {max(use.pages for use in uses)} pages in a window of {num_frames}")
    link, count = _Link(uses, num_frames), len(uses)
    ahead = count * PASSES if lookahead is None else lookahead
    begin = lasted = 0.0
    for number in range(PASSES):
        waited, index = begin, number * count
        horizon = count * PASSES if wrap else index + count
        link.issue(min(index + ahead, horizon), begin)
        for use in uses:
            entry = waited + use.start
            # The unit that is needed now is always allowed, and always fits: all before it have been released.
            if lookahead is not None or link.issued == index:
                link.issue(min(index + 1 + ahead, horizon), entry)
            waited += max(0.0, link.ready[index] - entry)
            link.release()
            index += 1
            link.issue(min(index + ahead, horizon), waited + use.end)
        lasted = waited + seconds - begin
        begin += lasted + between
    return lasted
