"""The machine: one card, its link and its memory, host threads, and everything that is enqueued."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fmstream.core.telemetry import MAX_SPANS
from fmstream.core.telemetry import Span as TimelineSpan
from fmstream.emulator.allocator import Allocator, round_up
from fmstream.emulator.backlog import Backlog, Execution, Run
from fmstream.emulator.cards import Card
from fmstream.emulator.checker import Check, Checker, Report, Span
from fmstream.emulator.clocks import HOST, Lane, Mark, Stream, Thread, VectorClock, join
from fmstream.emulator.inspector import Inspector
from fmstream.emulator.pins import Pinned, PinnedRounding
from fmstream.emulator.reserve import Reserve
from fmstream.emulator.steward import Steward
from fmstream.errors import ConfigError

DEVICE_LANES: Final = ("compute", "copy in", "copy out")
QUERY_SECONDS: Final = 1e-6
"""Host time of asking whether a mark lies behind, without which a loop that asks would never end."""
MAX_STREAMS: Final = 256
"""Streams beside the default one.  PyTorch has 32 of each priority; more of them show more races."""
ADDRESS_SPACE: Final = 4
"""Address space reserved for the device, in capacities: segments come and go without their holes mattering."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of what a machine did since ``reset_statistics``.

    ``busy`` is seconds by lane; ``wait_seconds`` is how long host threads waited for the device, for synchronisation or
    because too much was enqueued.  Bytes over the link are counted by direction.
    """

    seconds: float
    busy: dict[str, float]
    wait_seconds: float
    bytes_in: int
    bytes_out: int
    num_kernels: int
    num_copies: int
    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    pinned_bytes: int
    peak_pinned_bytes: int
    num_ooms: int
    num_reports: int


class HostLane:
    """A lane of work on the host: disk reads, the prefetch actor's CPU work."""

    def __init__(self, machine: Machine, lane: Lane) -> None:
        self._machine = machine
        self._lane = lane

    def occupy(self, seconds: float, name: str, num_bytes: int = 0) -> tuple[float, float]:
        """Take the lane, not before this thread's time; (start, end).

        The thread's clock stays as it is: ``join_clock(end)`` lets it wait.
        """
        return self._machine._occupy(self._lane, self._machine.now, seconds, name, num_bytes)


class Machine:
    """A card with its link, seen by any number of host threads.

    Each thread has a clock of its own and a current stream of its own.  A new thread's clock begins at zero, the
    machine's start; whoever hands work from thread to thread carries it along with ``now`` and ``join_clock``.  Threads
    that Python did not start (autograd's) work on the clock of the Python thread that called last.

    Args:
        card: rates and sizes.
        execution: when bytes are really moved and computed: "eager", "late", "dry" or a seed (see ``Backlog``).
        check: what becomes of an access out of order: "raise", "record" or None, not to look.
        capacity: bytes of device memory, None for the card's.
        pinned_cap: bytes of host memory that may be pinned, None for no limit.
        pinned_rounding: how a pinned allocation counts: "exact", or "power2" as in PyTorch's caching host allocator.
        poison: fill memory that is free with bytes that make NaN.
        keep_timeline: remember what ran when (the latest 200,000 spans).

    Raises ConfigError for an option that cannot be used.
    """

    def __init__(
        self,
        card: Card,
        *,
        execution: Execution = "eager",
        check: Check = "raise",
        capacity: int | None = None,
        pinned_cap: int | None = None,
        pinned_rounding: PinnedRounding = "exact",
        poison: bool = False,
        keep_timeline: bool = True,
    ) -> None:
        self.card = card
        self.execution = execution
        self.capacity = card.memory_bytes if capacity is None else capacity
        if self.capacity < 1:
            raise ConfigError(f"capacity={capacity!r} bytes of device memory: it must be at least 1")
        self.dry = execution == "dry"
        self._lock = threading.RLock()
        self._backlog = Backlog(execution)
        self._checker = Checker(check)
        self.streams = [Stream(0)]
        self._num_asked = 0
        self._engines = {name: Lane(name, divisible=name == "compute") for name in DEVICE_LANES}
        self._host_lanes: dict[str, Lane] = {}
        self._host_clock: VectorClock = {HOST: 0}
        self._host_version = 1
        self._local = threading.local()
        self._latest = self._local.thread = Thread()
        self._timeline: deque[tuple[str, str, float, float, int]] | None = (
            deque(maxlen=MAX_SPANS) if keep_timeline else None
        )
        self._reserve = Reserve(round_up(self.capacity * ADDRESS_SPACE, 1 << 26), usable=not self.dry)
        poison = poison and not self.dry
        self._steward = Steward(self, self._checker, self._backlog, self._reserve, poison=poison)
        self.allocator = Allocator(
            self._steward, self._lock, self._reserve, self.capacity, poison=poison, unit=card.segment_bytes
        )
        self.pinned = Pinned(self._steward, self._lock, pinned_cap, pinned_rounding)
        self._inspector = None if check is None else Inspector(self._checker, self._reserve, self.allocator)
        self.reset_statistics()

    # Time ---------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """This thread's clock, in seconds."""
        return self._thread().seconds

    def charge(self, seconds: float, name: str = "host") -> None:
        """Let this thread work for a while."""
        thread = self._thread()
        start = thread.seconds
        thread.seconds = start + seconds
        self._note("host", name, start, thread.seconds)

    def join_clock(self, seconds: float) -> None:
        """Let this thread's clock be at least another's, from which it took something over."""
        thread = self._thread()
        thread.seconds = max(thread.seconds, seconds)

    def lane(self, name: str) -> HostLane:
        """A lane of work on the host, made when first asked for."""
        with self._lock:
            return HostLane(self, self._host_lanes.setdefault(name, Lane(name)))

    # Streams ------------------------------------------------------------------------------------------------------

    @property
    def current_stream(self) -> int:
        """This thread's current stream."""
        return self._thread().stream

    def set_current_stream(self, stream: int) -> None:
        """Make ``stream`` this thread's current one."""
        self._thread().stream = self.streams[stream].id

    def new_stream(self) -> int:
        """A new stream; 0 is there from the start.  Beyond 256 they are given out again in turn, as CUDA's are."""
        with self._lock:
            self._num_asked += 1
            number = 1 + (self._num_asked - 1) % MAX_STREAMS
            while len(self.streams) <= number:  # one more, unless an interrupt came between the two lines above
                self.streams.append(Stream(len(self.streams)))
            return number

    def submit(
        self,
        stream: int,
        name: str,
        lane: str,
        seconds: float,
        run: Run | None,
        reads: Sequence[Span],
        writes: Sequence[Span],
        *,
        seen_seconds: float = 0.0,
        launch_seconds: float = 0.0,
        blocking: bool = False,
        num_bytes: int | None = None,
    ) -> float:
        """Enqueue an operation; when it will be seen done.

        It holds ``lane`` ("compute", "copy in" or "copy out") for ``seconds``, and what follows on another lane starts
        ``seen_seconds`` later.  ``run`` does the work on the bytes, None if there is nothing to do; ``reads`` and
        ``writes`` are (address, bytes).  ``num_bytes`` is what a copy moves, by default the device bytes it touches.
        The host pays ``launch_seconds``, and waits for the end if ``blocking``.  Raises SyncError if it is out of order
        and the machine is to raise.
        """
        with self._lock:
            thread, target, engine = self._thread(), self.streams[stream], self._engines[lane]
            unfinished = target.unfinished
            if len(unfinished) >= self.card.queue_limit:
                self._let_wait(thread, unfinished.popleft(), "queue")
            thread.seconds += launch_seconds
            clock = self._arrive(target)
            tick = clock[stream] = clock.get(stream, 0) + 1
            if self._inspector is not None:
                self._inspector.look(reads, writes, stream, tick, name, clock)
            taken = engine.occupy(max(thread.seconds, target.ready(lane)), seconds)
            end = taken[-1][1]
            target.finish(lane, end, seen_seconds)
            unfinished.append(end)
            if lane == "compute":
                self._num_kernels += 1
                num_bytes = 0
            else:
                num_bytes = self._count_copy(lane, reads, writes, num_bytes)
            if self._timeline is not None:
                self._timeline.extend((lane, name, *stretch, num_bytes) for stretch in taken)
            seen = target.seconds
            if run is not None:
                self._backlog.add(stream, tick, clock, run)
            if blocking:
                self._reach(thread, clock, seen)
            return seen

    def record(self, stream: int) -> Mark:
        """A mark behind everything that is enqueued on ``stream`` now."""
        with self._lock:
            target = self.streams[stream]
            clock = dict(self._arrive(target))
            return Mark(stream, max(target.seconds, self._thread().seconds), clock)

    def wait(self, stream: int, mark: Mark) -> None:
        """Let what ``stream`` is given from now on wait for a mark; the host does not wait."""
        with self._lock:
            if mark.stream != stream:  # its own order holds in any case
                target = self.streams[stream]
                join(target.clock, mark.clock)
                target.delay(mark.seconds)

    def mark_done(self, mark: Mark) -> bool:
        """Whether a mark lies behind at this thread's time; if so, what follows is ordered after it.

        Asking takes the host a microsecond.
        """
        with self._lock:
            thread = self._thread()
            thread.seconds += QUERY_SECONDS
            if mark.seconds > thread.seconds:
                return False
            self._reach(thread, mark.clock, mark.seconds)
            return True

    def synchronize(self, point: Mark | int | None = None) -> None:
        """Let the host wait for a mark, for a stream, or for everything."""
        with self._lock:
            thread = self._thread()
            if isinstance(point, Mark):
                self._reach(thread, point.clock, point.seconds)
                return
            for target in self.streams if point is None else [self.streams[point]]:
                self._reach(thread, target.clock, target.seconds)

    def settle(self, stream: int | None = None) -> None:
        """Do the deferred work of a stream (of all, if None) and what goes before it; no time passes."""
        with self._lock:
            for target in self.streams if stream is None else [self.streams[stream]]:
                self._backlog.force(target.clock)

    @property
    def immediate(self) -> bool:
        """Whether the work on the bytes is done as soon as it is submitted."""
        return self._backlog.immediate

    @property
    def running(self) -> bool:
        """Whether an operation's work on the bytes is being done now."""
        return self._backlog.running

    def host_access(self, reads: Sequence[Span], writes: Sequence[Span], name: str) -> None:
        """Note that the host itself touches pinned or device memory.

        What it has waited for has been done before; anything else in conflict is reported.
        """
        with self._lock:
            clock = self._host_clock
            tick = clock[HOST] = clock[HOST] + 1
            self._host_version += 1
            self._backlog.force(clock)
            if self._inspector is not None:
                self._inspector.look(reads, writes, HOST, tick, name, clock)

    # What happened ------------------------------------------------------------------------------------------------

    @property
    def reports(self) -> list[Report]:
        """Everything that was found wrong, the oldest first."""
        return self._checker.reports

    def statistics(self) -> Statistics:
        """A snapshot."""
        memory = self.allocator.statistics()
        with self._lock:
            return Statistics(
                seconds=self.now - self._since,
                busy={lane.name: lane.busy for lane in (*self._engines.values(), *self._host_lanes.values())},
                wait_seconds=self._wait_seconds,
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
                num_kernels=self._num_kernels,
                num_copies=self._num_copies,
                allocated=memory.allocated,
                reserved=memory.reserved,
                peak_allocated=memory.peak_allocated,
                peak_reserved=memory.peak_reserved,
                pinned_bytes=self.pinned.charged_bytes,
                peak_pinned_bytes=self.pinned.peak_bytes,
                num_ooms=memory.num_ooms,
                num_reports=len(self.reports),
            )

    def reset_statistics(self) -> None:
        """Count from here on: times, bytes, peaks and the timeline; clocks go on and reports stay."""
        with self._lock:
            self._since = self.now
            self._wait_seconds = 0.0
            self._bytes_in = self._bytes_out = self._num_kernels = self._num_copies = 0
            for lane in (*self._engines.values(), *self._host_lanes.values()):
                lane.busy = 0.0
            if self._timeline is not None:
                self._timeline.clear()
            self.allocator.reset_peaks()
            self.pinned.reset_peak()

    def timeline(self) -> list[TimelineSpan]:
        """What ran when, in the order in which it was enqueued.

        Lanes are "compute", "copy in", "copy out", "host" (work that was charged), "wait" (the host waits for the
        device) and the lanes of work on the host.
        """
        with self._lock:
            return [TimelineSpan(*entry) for entry in self._timeline or ()]

    # ----------------------------------------------------------------------------------------------------------------

    def _thread(self) -> Thread:
        thread: Thread | None = getattr(self._local, "thread", None)
        if thread is None:
            if isinstance(threading.current_thread(), threading._DummyThread):
                return self._latest
            thread = self._local.thread = Thread()
        self._latest = thread
        return thread

    def _arrive(self, target: Stream) -> VectorClock:
        """The clock of a stream to which the host hands something: what the host knows goes before it."""
        if target.host_version != self._host_version:
            join(target.clock, self._host_clock)
            target.host_version = self._host_version
        return target.clock

    def _reach(self, thread: Thread, clock: VectorClock, seconds: float) -> None:
        """Let the host wait for what ``clock`` knows, which is seen done at ``seconds``."""
        self._let_wait(thread, seconds, "wait")
        self._backlog.force(clock)
        join(self._host_clock, clock)
        self._host_version += 1

    def _let_wait(self, thread: Thread, seconds: float, name: str) -> None:
        if seconds > thread.seconds:
            self._wait_seconds += seconds - thread.seconds
            self._note("wait", name, thread.seconds, seconds)
            thread.seconds = seconds

    def _note(self, lane: str, name: str, start: float, end: float, num_bytes: int = 0) -> None:
        if self._timeline is not None:
            self._timeline.append((lane, name, start, end, num_bytes))

    def _occupy(self, lane: Lane, ready: float, seconds: float, name: str, num_bytes: int) -> tuple[float, float]:
        with self._lock:
            start, end = lane.occupy(ready, seconds)[0]
            self._note(lane.name, name, start, end, num_bytes)
            return start, end

    def _count_copy(self, lane: str, reads: Sequence[Span], writes: Sequence[Span], num_bytes: int | None) -> int:
        self._num_copies += 1
        if lane == "copy in":
            num_bytes = sum(size for _, size in writes) if num_bytes is None else num_bytes
            self._bytes_in += num_bytes
        else:
            num_bytes = sum(size for _, size in reads) if num_bytes is None else num_bytes
            self._bytes_out += num_bytes
        return num_bytes
