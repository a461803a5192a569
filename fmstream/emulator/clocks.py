"""Virtual time and order: host threads, streams, marks, and the lanes on which work takes time.

Times are seconds since the machine began.  Order is kept in vector clocks (Fidge 1988, Mattern 1989): for each actor
the last of its steps that is known to have happened.  Streams are actors 0, 1, ...; the host is actor ``HOST``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

INSTANT: Final = 1e-12
"""Seconds that are nothing: what rounding leaves."""

VectorClock = dict[int, int]
Stretch = tuple[float, float]
"""From when to when."""

HOST: Final = -1
"""The host as an actor.  All its threads are one: in what order they came to call is taken as they left it."""

MAX_GAPS: Final = 64
"""Idle stretches of a lane that later work may still fill; older ones are forgotten."""


def join(clock: VectorClock, other: VectorClock) -> None:
    """Raise ``clock`` to know what ``other`` knows."""
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick


class Thread:
    """A host thread: its clock and its current stream."""

    __slots__ = ("seconds", "stream")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.stream = 0


class Stream:
    """A stream: when its work so far is seen done, and what its next operation is ordered after."""

    __slots__ = ("clock", "ended", "host_version", "id", "lane", "seconds", "unfinished")

    def __init__(self, number: int) -> None:
        self.id = number
        self.clock: VectorClock = {}
        self.host_version = 0
        """Of the host's clock, when it was last joined."""
        self.lane = ""
        """Of the last operation.  Another one on the same lane need not wait until that is seen done."""
        self.ended = 0.0
        self.seconds = 0.0
        self.unfinished: deque[float] = deque()
        """When the latest operations end."""

    def ready(self, lane: str) -> float:
        """The earliest start of an operation on ``lane``."""
        return self.ended if lane == self.lane else self.seconds

    def finish(self, lane: str, end: float, seen_seconds: float) -> None:
        """Note an operation that leaves its lane at ``end`` and is seen done ``seen_seconds`` later."""
        self.lane = lane
        self.ended = end
        self.seconds = max(self.seconds, end + seen_seconds)

    def delay(self, seconds: float) -> None:
        """Start nothing before ``seconds``."""
        self.ended = max(self.ended, seconds)
        self.seconds = max(self.seconds, seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A point in a stream, as an event records it.

    ``seconds`` is when everything before it is seen done; ``clock`` is what then is known to have happened.
    """

    stream: int
    seconds: float
    clock: VectorClock


class Lane:
    """Something that does one thing at a time: the compute engine, a copy engine, a disk.

    Work is placed in idle stretches where there are any, so that what waits for an event does not hold up what was
    enqueued later on another stream.  A copy takes the first that holds it.  What is ``divisible`` takes them as they
    come: kernels of several streams run side by side, so that a long one does not wait until short ones leave it room.
    """

    __slots__ = ("busy", "divisible", "free", "gaps", "name")

    def __init__(self, name: str, *, divisible: bool = False) -> None:
        self.name = name
        self.divisible = divisible
        self.busy = 0.0
        self.free = 0.0
        self.gaps: list[Stretch] = []

    def occupy(self, ready: float, seconds: float) -> list[Stretch]:
        """Take the lane for ``seconds``, not before ``ready``; from when to when, in pieces if it is divisible."""
        self.busy += seconds
        start = self.free
        taken: list[Stretch] = []
        if ready >= start:
            if ready > start:
                self._leave_gap(start, ready)
            start = ready
        elif self.gaps and self.gaps[-1][1] > ready:
            if self.divisible:
                taken = self._fill_each(ready, seconds)
                seconds -= sum(end - begin for begin, end in taken)
            elif (begin := self._fill(ready, seconds)) is not None:
                return [(begin, begin + seconds)]
        if seconds >= INSTANT or not taken:
            self.free = start + seconds
            taken.append((start, start + seconds))
        return taken

    def _leave_gap(self, start: float, end: float) -> None:
        self.gaps.append((start, end))
        if len(self.gaps) > MAX_GAPS:
            del self.gaps[0]

    def _fill(self, ready: float, seconds: float) -> float | None:
        for index, (low, high) in enumerate(self.gaps):
            start = max(low, ready)
            end = start + seconds
            if end <= high:
                self._cut(index, start, end)
                return start
        return None

    def _fill_each(self, ready: float, seconds: float) -> list[Stretch]:
        taken: list[Stretch] = []
        for low, high in [gap for gap in self.gaps if gap[1] > ready]:
            start = max(low, ready)
            end = min(high, start + seconds)
            self._cut(self.gaps.index((low, high)), start, end)
            taken.append((start, end))
            seconds -= end - start
            if seconds < INSTANT:
                break
        return taken

    def _cut(self, index: int, start: float, end: float) -> None:
        low, high = self.gaps[index]
        self.gaps[index : index + 1] = [gap for gap in ((low, start), (end, high)) if gap[0] < gap[1]]
