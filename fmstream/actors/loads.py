"""Loads on their way to fast memory, on a device whose fast memory the prefetch actor writes itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from fmstream.actors.chunks import Piece
from fmstream.actors.prefetch import CANCELLED, PrefetchActor, Request
from fmstream.actors.runs import Loaded, Payload, Run
from fmstream.actors.tape import HostTape, Tape
from fmstream.core.pages import PageTable
from fmstream.core.ring import Record
from fmstream.core.telemetry import Span, Telemetry
from fmstream.device.device import Part, Slab
from fmstream.errors import CancelledRun, StreamError

POLL_SECONDS = 0.1
"""Longest sleep in a wait before cancellation is looked at again."""
GRACE_SECONDS = 0.5
"""How long reads under way may take to end before their memory is orphaned."""
MAX_RECORDS = 64
"""Completions taken at once."""
MAX_REQUESTS = 8192
"""Prepared requests that are remembered."""


class Loads:
    """Issues loads, and waits for them on the host.  Not thread-safe; the compute actor's.

    Every wait is bounded by ``POLL_SECONDS`` between looks at ``stop_reason``.
    """

    has_streams = False
    """Whether computing may go on in several streams, each of which must wait for what it uses."""

    def __init__(self, payload: Payload, prefetch: PrefetchActor, telemetry: Telemetry) -> None:
        self.payload = payload
        self.prefetch = prefetch
        self.telemetry = telemetry
        self.stop_reason: BaseException | None = None
        self.waited = 0.0
        self.pages = PageTable(0, 0)
        self.pending: dict[int, Loaded] = {}
        self._ticket = 0
        self._failed: dict[int, BaseException] = {}
        self._requests: dict[tuple[int, int], tuple[Run, Request]] = {}

    def begin(self, pages: PageTable) -> None:
        """Work for a new page table; nothing is on its way."""
        self.pages = pages
        self._requests.clear()

    def tape(self) -> Tape:
        """What takes the times of a pass that begins now."""
        return HostTape(self.telemetry, self)

    def homes_changed(self) -> None:
        """Masters may lie elsewhere by now."""
        self._requests.clear()

    # On the way

    def issue(self, run: Run, frame: int, slab: Slab, offset: int, num_bytes: int) -> Loaded:
        """Begin to bring a run to ``num_bytes`` of a slab at ``offset``."""
        self.pages.load(run.start, run.count, frame)
        self._ticket += 1
        loaded = Loaded(run, frame, self._ticket, slab.part(offset, num_bytes))
        # Pending from here on: should this be interrupted, the pass is aborted, and that waits for or abandons it.
        self.pending[loaded.ticket] = loaded
        self._start(loaded, slab)
        return loaded

    def _start(self, loaded: Loaded, slab: Slab) -> None:
        self.prefetch.submit(loaded.ticket, self._request(loaded.run, loaded.part), slab, loaded.run.name)

    def _request(self, run: Run, part: Part) -> Request:
        """The copies that bring a run to a part; runs come to the same places again and again."""
        known = self._requests.get((run.start, part.address))
        if known is not None and known[0] is run:
            return known[1]
        request = self.prefetch.prepare(self.pieces(run, part.address))
        if len(self._requests) >= MAX_REQUESTS:
            self._requests.clear()
        self._requests[run.start, part.address] = (run, request)
        return request

    def pieces(self, run: Run, address: int) -> Sequence[Piece]:
        """What to bring where for a run whose first byte is to lie at ``address``."""
        return [
            piece
            for param, offset in zip(run.params, run.offsets, strict=True)
            for piece in self.payload.pieces(param, address + offset)
        ]

    # Arriving

    def arrive(self, loaded: Loaded) -> None:
        """Make a run usable by what is computed next; raises `StreamError` if its load failed."""
        self.check_stop()
        self.collect_ready()
        if loaded.ticket in self.pending:
            began = time.perf_counter()
            try:
                self.collect(lambda: loaded.ticket not in self.pending)
            finally:
                ended = time.perf_counter()
                self.waited += ended - began
                self.telemetry.spans.append(Span("wait", loaded.run.name, began, ended, loaded.run.num_bytes))
        self.raise_failure(loaded)

    def follow(self, used: Iterable[Loaded]) -> None:
        """Let what the caller computes next find runs that have arrived in place, whatever stream it is in."""

    def raise_failure(self, loaded: Loaded) -> None:
        """Raise why a run was not loaded, if it was not."""
        error = self._failed.pop(loaded.ticket, None)
        if error is not None:
            raise StreamError(f"loading {loaded.run.name} failed: {error}") from error

    def land(self, loaded: Loaded) -> None:
        """Wait on the host until the bytes of a run are in place, or its load has failed."""
        if loaded.ticket in self.pending:
            self.collect(lambda: loaded.ticket not in self.pending)

    def released(self, loaded: Loaded) -> None:
        """Nothing that is computed from here on uses the frames of a run."""

    def barrier(self) -> None:
        """Nothing that is computed from here on uses any frame."""

    def check_stop(self) -> None:
        """Raise what stopped the run, if something did."""
        if self.stop_reason is not None:
            if isinstance(self.stop_reason, CancelledRun):
                raise self.stop_reason
            raise StreamError(f"the run was stopped: {self.stop_reason}") from self.stop_reason

    def collect(self, enough: Callable[[], bool], until: float | None = None) -> None:
        """Take completions until ``enough()``, bounded by ``until`` (``time.perf_counter()``) where given."""
        while not enough():
            if until is None:
                self.check_stop()
            elif time.perf_counter() > until:
                return
            record = self.prefetch.completions.pop(POLL_SECONDS)
            if record is not None:
                self.complete(record)
            elif self.prefetch.failure is not None:
                raise StreamError(f"a prefetch worker died: {self.prefetch.failure}") from self.prefetch.failure

    def collect_ready(self) -> None:
        """Take the completions that are there."""
        for record in self.prefetch.completions.pop_many(MAX_RECORDS):
            self.complete(record)

    def complete(self, record: Record) -> None:
        """Take note of a request that has ended."""
        loaded = self.pending.pop(record.sequence, None)
        if loaded is None:
            return
        run = loaded.run
        error = self.prefetch.error(record.sequence)
        if error is not None:
            self._failed[record.sequence] = error
            self.pages.cancel(run.start, run.count)
        elif record.op == CANCELLED:
            self.pages.cancel(run.start, run.count)
        else:
            self.pages.ready(run.start, run.count)

    # Giving up

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        self.collect(lambda: not self.pending)

    def cancel(self, tickets: Iterable[int]) -> bool:
        """Stop loads; False where a read is blocked, so that the slab and its workers must be left to it."""
        tickets = [ticket for ticket in tickets if ticket in self.pending]
        if tickets:
            self.prefetch.cancel(tickets)
            grace = time.perf_counter() + GRACE_SECONDS
            self.collect(lambda: not any(t in self.pending for t in tickets), grace)
        for ticket in tickets:
            self._failed.pop(ticket, None)
        if not any(ticket in self.pending for ticket in tickets):
            return True
        self.prefetch.abandon()
        for loaded in self.pending.values():
            self.pages.cancel(loaded.run.start, loaded.run.count)
        self.pending.clear()
        return False

    def forget(self, loaded: Loaded) -> None:
        """The failure of a run that is not wanted any more is nobody's."""
        self._failed.pop(loaded.ticket, None)

    def close(self) -> None:
        """Give up what belongs to this alone; nothing is on its way.  Idempotent."""
