"""The times of one pass, on the clock of the device that computes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fmstream.core.telemetry import Span, Telemetry
from fmstream.device.accelerator import Accelerator, Mark

Stamp = float
"""A time that was taken: seconds, or the number of a mark whose time is known later."""


class Tape(Protocol):
    """Takes stamps while a pass goes on.

    Attributes:
        timed: whether stamps within the pass are taken; if not, only the times of the whole pass will be known.
        start: of the pass on the timeline, in seconds, once `finish` was called.
        seconds: wall time of the pass; ``waited`` is the part of it in which computing waited for weights.
    """

    timed: bool
    start: float
    seconds: float
    waited: float

    def stamp(self) -> Stamp:
        """A place on the compute clock, which stands while computing waits for weights."""

    def mark(self) -> Stamp:
        """A place on the timeline."""

    def lane(self, name: str, since: Stamp) -> Stamp:
        """Computing went on since an earlier `mark`; returns a new one."""

    def skip_stamps(self) -> None:
        """Only the times of the whole pass are wanted, if more are expensive."""

    def end(self) -> None:
        """The pass is over."""

    def is_done(self) -> bool:
        """Whether `finish` would not have to wait."""

    def finish(self) -> None:
        """Wait until all times are known, and compute them."""

    def resolve(self, stamps: Sequence[Stamp]) -> list[float]:
        """Stamps as seconds on the compute clock; negative ones are left as they are."""

    def pause(self, before: Tape) -> float | None:
        """Seconds between the end of an earlier pass and this one, both finished; None where they cannot be told."""


class Waiting(Protocol):
    """Counts the seconds that computing waited for weights."""

    waited: float


class HostTape:
    """The host's own clock, less what the compute actor waited."""

    timed = True

    def __init__(self, telemetry: Telemetry, waiting: Waiting) -> None:
        self._telemetry = telemetry
        self._waiting = waiting
        self._waited_before = waiting.waited
        self.seconds = 0.0
        self.waited = 0.0
        self.start = time.perf_counter()
        self._zero = self.start - self._waited_before

    def stamp(self) -> Stamp:
        """Seconds on the compute clock."""
        return time.perf_counter() - self._zero - self._waiting.waited

    def mark(self) -> Stamp:
        """Seconds on the timeline."""
        return time.perf_counter()

    def lane(self, name: str, since: Stamp) -> Stamp:
        """A span on the timeline."""
        now = time.perf_counter()
        self._telemetry.spans.append(Span("compute", name, since, now))
        return now

    def skip_stamps(self) -> None:
        """They cost next to nothing here."""

    def end(self) -> None:
        """The pass is over."""
        self.seconds = time.perf_counter() - self.start
        self.waited = self._waiting.waited - self._waited_before

    def is_done(self) -> bool:
        """All times are known at once."""
        return True

    def finish(self) -> None:
        """All times are known at once."""

    def resolve(self, stamps: Sequence[Stamp]) -> list[float]:
        """They are seconds already."""
        return list(stamps)

    def pause(self, before: Tape) -> float | None:
        """From end to start."""
        return self.start - before.start - before.seconds


@dataclass(slots=True)
class Timeline:
    """The last point on a device's timeline whose seconds are known; later ones are counted from there."""

    mark: Mark
    seconds: float

    def seconds_of(self, mark: Mark) -> float:
        """Seconds of a mark that has been reached; it is the one to count from next."""
        self.seconds += self.mark.event.elapsed_time(mark.event) / 1e3
        self.mark = mark
        return self.seconds


@dataclass(slots=True)
class StreamTape:
    """Marks in the streams of an accelerator.  Each costs the host some microseconds, so most passes take only two."""

    device: Accelerator
    telemetry: Telemetry
    timeline: Timeline
    timed: bool = True
    start: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    is_open: bool = True
    quiet: Mark | None = None
    """Behind all copies that were issued by the end of the pass."""
    copies: list[tuple[str, Mark, Mark, int]] = field(default_factory=list)
    """Copies that were issued in the pass: name, points before and behind, and bytes."""
    _marks: list[Mark] = field(default_factory=list)
    _waits: list[tuple[int, int, str]] = field(default_factory=list)
    _lanes: list[tuple[int, int, str]] = field(default_factory=list)
    _clock: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._marks.append(self.device.mark(timed=True))

    def stamp(self) -> Stamp:
        """The number of a new mark."""
        if not self.timed:
            return 0.0
        self._marks.append(self.device.mark(timed=True))
        return len(self._marks) - 1

    def mark(self) -> Stamp:
        """The number of a new mark."""
        return self.stamp()

    def lane(self, name: str, since: Stamp) -> Stamp:
        """A span on the timeline, later."""
        now = self.stamp()
        if self.timed:
            self._lanes.append((int(since), int(now), name))
        return now

    def wait(self, name: str, since: Stamp) -> None:
        """Computing waited since an earlier stamp."""
        if self.timed:
            self._waits.append((int(since), int(self.stamp()), name))

    def skip_stamps(self) -> None:
        """Take no marks but the first and the last."""
        self.timed = False

    def end(self) -> None:
        """The pass is over."""
        self._marks.append(self.device.mark(timed=True))
        self.quiet = self.device.mark(self.device.copies, timed=True)
        self.is_open = False

    def is_done(self) -> bool:
        """Whether the device has reached the end of the pass."""
        return bool(self._marks[-1].event.query())

    def finish(self) -> None:
        """Wait for the device to reach the end of the pass."""
        first, last = self._marks[0], self._marks[-1]
        last.event.synchronize()
        self.start = self.timeline.seconds_of(first)
        self.seconds = first.event.elapsed_time(last.event) / 1e3
        if not self.timed:
            return
        times = [first.event.elapsed_time(mark.event) / 1e3 for mark in self._marks]
        standing = [0.0] * len(times)
        for since, until, name in self._waits:
            standing[until] += times[until] - times[since]
            self._span("wait", name, times[since], times[until])
        total = 0.0
        for at, seconds in enumerate(standing):
            total += seconds
            self._clock.append(times[at] - total)
        self.waited = total
        for since, until, name in self._lanes:
            self._span("compute", name, times[since], times[until])
        for name, before, behind, num_bytes in self.copies:
            if behind.event.query():
                began, ended = (first.event.elapsed_time(mark.event) / 1e3 for mark in (before, behind))
                self._span("copy 0", name, began, ended, num_bytes)

    def _span(self, lane: str, name: str, began: float, ended: float, num_bytes: int = 0) -> None:
        self.telemetry.spans.append(Span(lane, name, self.start + began, self.start + ended, num_bytes))

    def resolve(self, stamps: Sequence[Stamp]) -> list[float]:
        """Seconds of marks by their numbers."""
        return [self._clock[int(stamp)] if stamp >= 0 else stamp for stamp in stamps]

    def pause(self, before: Tape) -> float | None:
        """What the user's code took: neither a wait for the link to do what was issued, nor the reading of marks.

        It is asked for where plans are made of the times.
        """
        assert isinstance(before, StreamTape)
        if not self.timed or before.timed or before.quiet is None:
            return None
        ended = before.start + before.seconds
        if before.quiet.event.query():
            quiet: float = before.start + before._marks[0].event.elapsed_time(before.quiet.event) / 1e3
            if ended < quiet < self.start:
                return self.start - quiet
        return self.start - ended
