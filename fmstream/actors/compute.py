"""The compute actor: carries out any plan on the thread that runs the user's loop.

It alone issues loads, waits for them, shows weights to the modules and gives frames back.  It knows runs of pages and
parameter ids; what a parameter is, is the payload's affair.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from fmstream.actors.prefetch import CANCELLED, PrefetchActor, Request
from fmstream.actors.runs import Loaded, Payload, Run
from fmstream.core.arena import Arena, Window, num_pages, pack
from fmstream.core.pages import PageTable
from fmstream.core.plan import Plan
from fmstream.core.ring import Record
from fmstream.core.telemetry import Span, Telemetry
from fmstream.device.device import Device, Part, Slab
from fmstream.errors import CancelledRun, MemoryBudgetError, StreamError

POLL_SECONDS = 0.1
"""Longest sleep in a wait before cancellation is looked at again."""
MAX_RECORDS = 64
"""Completions taken at once."""
MAX_REQUESTS = 8192
"""Prepared requests that are remembered."""
GRACE_SECONDS = 0.5
"""How long reads under way may take to end before their memory is orphaned."""


class Executor:
    """Window, residents and demand loads over one slab of fast memory.

    Not thread-safe: the payload's lock admits one pass at a time.  Every wait is bounded by ``POLL_SECONDS`` between
    looks at ``stop_reason``.
    """

    def __init__(
        self,
        payload: Payload,
        device: Device,
        prefetch: PrefetchActor,
        telemetry: Telemetry,
        memory_bytes: int,
        page_bytes: int,
    ) -> None:
        self.payload = payload
        self.device = device
        self.prefetch = prefetch
        self.telemetry = telemetry
        self.page_bytes = page_bytes
        self.arena = Arena(memory_bytes, page_bytes)
        self.num_frames = self.arena.num_frames
        self.plan: Plan | None = None
        self.slab: Slab | None = None
        self.stop_reason: BaseException | None = None
        self.waited = 0.0
        self.streamed_bytes = 0
        self._ticket = 0
        self._pending: dict[int, Loaded] = {}
        self._failed: dict[int, BaseException] = {}
        self._units: list[Run] = []
        self._next = 0
        self._forget()

    def _forget(self) -> None:
        """An empty slab: no plan, nothing loaded."""
        self.plan = None
        self.pages = PageTable(self.num_frames, self.num_frames)
        self.arena = Arena(self.arena.num_bytes, self.page_bytes)
        self.window: Window | None = None
        self.residents: Loaded | None = None
        self.current: Loaded | None = None
        self._units = []
        self._repeated: frozenset[int] = frozenset()
        self._requests: dict[tuple[int, int], tuple[Run, Request]] = {}
        self._first_demand_page = 0
        self._ahead: deque[Loaded] = deque()
        self._demanded: list[Loaded] = []
        self._held: list[Loaded] = []

    # Plans

    def activate(self, plan: Plan | None) -> None:
        """Put ``plan`` in force (None: everything on demand): drop what is loaded, bring its residents."""
        self.drop_ahead()
        self._release_all()
        self._forget()
        slab = self._slab()
        if plan is None:
            return
        sizes = self.payload.sizes
        page = 0

        def make_run(name: str, params: Sequence[int]) -> Run:
            nonlocal page
            num_bytes = sum(sizes[p] for p in params)
            count = num_pages(num_bytes, self.page_bytes)
            run = Run(name, tuple(params), tuple(pack(sizes[p] for p in params)), num_bytes, page, count)
            page += count
            return run

        resident_run = make_run("residents", sorted(plan.resident)) if plan.resident else None
        self._units = [make_run(f"unit {i}", unit.params) for i, unit in enumerate(plan.units)]
        uses = Counter(param for unit in plan.units for param in unit.params)
        self._repeated = frozenset(param for param, count in uses.items() if count > 1)
        self._first_demand_page = page
        self.pages = PageTable(page + self.num_frames, self.num_frames)
        if plan.window_bytes:
            self.window = self.arena.split(plan.window_bytes)
        self._next = 0
        if resident_run:
            self.residents = self._submit(resident_run, 0, slab)
            self._wait(self.residents)
        self.plan = plan

    def bind_residents(self) -> None:
        """Show the residents, at the start of a pass."""
        if self.residents is not None:
            self._bind(self.residents)

    # Streamed units

    def acquire(self, index: int) -> None:
        """Make unit ``index`` of the plan usable: waits for its bytes, shows them, issues what there is room for."""
        run = self._units[index]
        while self._ahead and self._ahead[0].run is not run:
            self._drop(self._ahead.popleft(), newest=False)
        if self._ahead:
            loaded = self._ahead.popleft()
        else:
            self._next = index
            loaded = self._issue_next()
        self.current = loaded
        if self.plan is not None and self.plan.lookahead != 0:
            self._top_up()
        self._wait(loaded)
        self._bind(loaded)

    def retire(self) -> None:
        """Give back the unit in use and refill the window.  Raises nothing where a tensor still aliases it: it is
        held until the pass ends, and ``held`` says so."""
        loaded, self.current = self.current, None
        if loaded is None:
            return
        self._unbind(loaded)
        if self._holds(loaded):
            return
        self._give_back(loaded)
        if self.plan is not None and self.plan.lookahead != 0:
            self._top_up()

    @property
    def held(self) -> bool:
        """Whether a run could not be given back in this pass."""
        return bool(self._held)

    def _issue_next(self) -> Loaded:
        assert self.window is not None
        run = self._units[self._next]
        position = self.window.reserve(run.count)
        assert position is not None, "the window is empty and holds any unit"
        return self._submit_unit(run, position)

    def _submit_unit(self, run: Run, position: int) -> Loaded:
        assert self.window is not None
        loaded = self._submit(run, self.window.frame_of(position), self._slab())
        loaded.position = position
        self._next = (self._next + 1) % len(self._units)
        return loaded

    def _top_up(self) -> None:
        plan, window = self.plan, self.window
        if plan is None or window is None or not self._units:
            return
        most = len(self._units) - 1 if plan.lookahead is None else plan.lookahead
        while len(self._ahead) < most and (plan.wrap or self._next != 0):
            run = self._units[self._next]
            if self.current is not None and self.current.run is run:
                return
            if self._repeated and self._is_here(run):
                return
            position = window.reserve(run.count)
            if position is None:
                return
            self._ahead.append(self._submit_unit(run, position))

    def _is_here(self, run: Run) -> bool:
        """Whether a parameter of a run is in fast memory with another one: one copy at a time is enough."""
        wanted = self._repeated.intersection(run.params)
        here = self._ahead if self.current is None else (*self._ahead, self.current)
        return any(not wanted.isdisjoint(loaded.run.params) for loaded in here)

    def drop_ahead(self) -> None:
        """Drop every unit that was issued and is not in use."""
        while self._ahead:
            self._drop(self._ahead.pop(), newest=True)
        self._next = 0

    def leave_plan(self) -> None:
        """The rest of this pass is not as planned: keep the unit in use, drop what was issued for later."""
        self.drop_ahead()
        if self.current is not None:
            self.current.position = None
            self._demanded.append(self.current)
            self.current = None
        if self.window is not None:
            self.window.reset()

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        self._collect(lambda: not self._pending)

    def refresh(self, param: int) -> None:
        """The master of ``param`` changed: bring the change to every copy in fast memory."""
        self._requests.clear()  # its home may be another one
        for loaded in self._everything():
            run = loaded.run
            if param in run.params:
                if loaded.ticket in self._pending:
                    self._collect(lambda loaded=loaded: loaded.ticket not in self._pending)  # type: ignore[misc]
                self.payload.rewrite(param, loaded.part.address + run.offsets[run.params.index(param)])

    # Demand loads

    def demand(self, name: str, params: Sequence[int]) -> Loaded:
        """Load and show parameters outside any plan, in free frames; the caller releases them."""
        sizes = self.payload.sizes
        num_bytes = sum(sizes[p] for p in params)
        count = num_pages(num_bytes, self.page_bytes)
        frame = self._room(name, count)
        offsets = tuple(pack(sizes[p] for p in params))
        run = Run(name, tuple(params), offsets, num_bytes, self._first_demand_page + frame, count)
        loaded = self._submit(run, frame, self._slab())
        self._demanded.append(loaded)
        self._wait(loaded)
        self._bind(loaded)
        return loaded

    def release(self, loaded: Loaded) -> None:
        """Give back what `demand` loaded, or a unit kept by `leave_plan`."""
        if loaded not in self._demanded:
            return  # it had to make room
        self._demanded.remove(loaded)
        self._unbind(loaded)
        if not self._holds(loaded):
            self._give_back(loaded)

    def _room(self, name: str, count: int) -> int:
        """First free frame of ``count``, dropping first what is not in use, then residents, then outer calls'."""
        if count > self.num_frames:
            raise MemoryBudgetError(
                f"memory is {self.num_frames * self.page_bytes} bytes, but {name!r} alone needs "
                f"{count * self.page_bytes}: give memory={count * self.page_bytes} or more"
            )
        self._slab()
        frame = self.pages.find_free(count)
        if frame < 0:
            self.leave_plan()
            frame = self.pages.find_free(count)
        if frame < 0 and self.residents is not None:
            loaded, self.residents, self.plan = self.residents, None, None
            self._unbind(loaded)
            if not self._holds(loaded):
                self._give_back(loaded)
            frame = self.pages.find_free(count)
        while frame < 0 and self._demanded:
            self.release(self._demanded[0])
            frame = self.pages.find_free(count)
        if frame < 0 and self._held:
            self._orphan()
            self._slab()
            frame = 0
        assert frame >= 0
        return frame

    # Passes

    def end_pass(self) -> None:
        """Hide everything; a slab that somebody still looks into is left to them."""
        if self.current is not None:
            self.retire()
        for loaded in list(self._demanded):
            self.release(loaded)
        if self.residents is not None:
            self._unbind(self.residents)
        if self._held:
            self.leave_plan()
        if not all(self._is_left(loaded) for loaded in self._everything() if not loaded.bound):
            self._orphan()
            return
        for loaded in self._held:
            self._give_back(loaded)
        self._held.clear()

    def abort_pass(self) -> None:
        """After a failure at any point: nothing is shown, nothing is on its way, frames are free.

        The books may be half-written, so they are not settled but begun anew.
        """
        loaded_runs = self._everything()
        try:
            for loaded in loaded_runs:
                if loaded.bound:
                    self.payload.unbind(loaded.run.params, loaded.run.offsets, loaded.part)
        finally:
            try:
                self._cancel(list(self._pending))
            finally:
                self._pending.clear()
                if not all(self._is_left(loaded) for loaded in loaded_runs):
                    self.slab = None
                self._forget()

    def _is_left(self, loaded: Loaded) -> bool:
        """Whether nobody looks into a run that is not shown; who does is given the master instead, where possible."""
        if loaded.part.num_views() > 0:
            self.payload.outlived(loaded.run.params, loaded.run.offsets, loaded.part)
        return loaded.part.num_views() == 0

    def _everything(self) -> list[Loaded]:
        """All runs with frames."""
        single = [loaded for loaded in (self.residents, self.current) if loaded is not None]
        return [*single, *self._ahead, *self._demanded, *self._held]

    def _release_all(self) -> None:
        for loaded in self._everything():
            if loaded.ticket not in self._pending:
                self._give_back(loaded)

    def _orphan(self) -> None:
        """Leave the slab to whoever still looks into it, and begin with an empty one."""
        self.drop_ahead()
        for loaded in self._everything():
            if loaded.bound:
                self._unbind(loaded)
        left = [self._is_left(loaded) for loaded in self._everything()]
        if not all(left):
            self.slab = None
        self._forget()

    def close(self) -> None:
        """Stop what is on its way and drop the slab.  Idempotent."""
        self._cancel(list(self._pending))
        self._forget()
        self.slab = None

    # Loads

    def _slab(self) -> Slab:
        if self.slab is None:
            self.slab = self.device.slab(self.arena.num_bytes)
        return self.slab

    def _submit(self, run: Run, frame: int, slab: Slab) -> Loaded:
        self.pages.load(run.start, run.count, frame)
        self._ticket += 1
        part = slab.part(self.arena.offset_of(frame), run.count * self.page_bytes)
        loaded = Loaded(run, frame, self._ticket, part)
        # Pending from here on: should this be interrupted, the pass is aborted, and that waits for or abandons it.
        self._pending[loaded.ticket] = loaded
        self.prefetch.submit(loaded.ticket, self._request(run, part), slab, run.name)
        self.streamed_bytes += run.num_bytes
        return loaded

    def _request(self, run: Run, part: Part) -> Request:
        """The copies that bring a run to a part; runs come to the same places again and again."""
        known = self._requests.get((run.start, part.address))
        if known is not None and known[0] is run:
            return known[1]
        request = self.prefetch.prepare(
            [
                piece
                for param, offset in zip(run.params, run.offsets, strict=True)
                for piece in self.payload.pieces(param, part.address + offset)
            ]
        )
        if len(self._requests) >= MAX_REQUESTS:
            self._requests.clear()
        self._requests[run.start, part.address] = (run, request)
        return request

    def _wait(self, loaded: Loaded) -> None:
        self.check_stop()
        self._collect_ready()
        if loaded.ticket in self._pending:
            began = time.perf_counter()
            try:
                self._collect(lambda: loaded.ticket not in self._pending)
            finally:
                ended = time.perf_counter()
                self.waited += ended - began
                self.telemetry.spans.append(Span("wait", loaded.run.name, began, ended, loaded.run.num_bytes))
        error = self._failed.pop(loaded.ticket, None)
        if error is not None:
            raise StreamError(f"loading {loaded.run.name} failed: {error}") from error

    def check_stop(self) -> None:
        """Raise what stopped the run, if something did."""
        if self.stop_reason is not None:
            if isinstance(self.stop_reason, CancelledRun):
                raise self.stop_reason
            raise StreamError(f"the run was stopped: {self.stop_reason}") from self.stop_reason

    def _collect(self, enough: Callable[[], bool], until: float | None = None) -> None:
        """Take completions until ``enough()``, bounded by ``until`` (``time.perf_counter()``) where given."""
        while not enough():
            if until is None:
                self.check_stop()
            elif time.perf_counter() > until:
                return
            record = self.prefetch.completions.pop(POLL_SECONDS)
            if record is not None:
                self._complete(record)
            elif self.prefetch.failure is not None:
                raise StreamError(f"a prefetch worker died: {self.prefetch.failure}") from self.prefetch.failure

    def _collect_ready(self) -> None:
        """Take the completions that are there."""
        for record in self.prefetch.completions.pop_many(MAX_RECORDS):
            self._complete(record)

    def _complete(self, record: Record) -> None:
        loaded = self._pending.pop(record.sequence, None)
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

    def _cancel(self, tickets: list[int]) -> None:
        """Stop loads; where a read is blocked, leave the slab and its workers to it."""
        if not tickets:
            return
        self.prefetch.cancel(tickets)
        self._collect(lambda: not any(t in self._pending for t in tickets), time.perf_counter() + GRACE_SECONDS)
        for ticket in tickets:
            self._failed.pop(ticket, None)
        if any(t in self._pending for t in tickets):
            self.prefetch.abandon()
            for loaded in self._pending.values():
                self.pages.cancel(loaded.run.start, loaded.run.count)
            self._pending.clear()
            self.slab = None
            self.plan = None

    def _drop(self, loaded: Loaded, *, newest: bool) -> None:
        """Give back a run that was issued and never used: the newest one, or the oldest."""
        self.telemetry.wasted_bytes += loaded.run.num_bytes
        if loaded.ticket in self._pending:
            self._cancel([loaded.ticket])
        self._failed.pop(loaded.ticket, None)
        if newest and self.window is not None and loaded.position is not None:
            self.window.cancel_newest(loaded.position)
            loaded.position = None
        self._give_back(loaded)

    def _give_back(self, loaded: Loaded) -> None:
        run = loaded.run
        if self.pages.frame[run.start] == loaded.frame:
            self.pages.evict(run.start, run.count)
        if loaded.position is not None and self.window is not None:
            self.window.release(loaded.position)

    # Showing

    def _bind(self, loaded: Loaded) -> None:
        run, part, bind = loaded.run, loaded.part, self.payload.bind
        self.pages.pin(run.start, run.count)
        loaded.bound = True
        for param, offset in zip(run.params, run.offsets, strict=True):
            bind(param, part, offset)

    def _unbind(self, loaded: Loaded) -> None:
        if not loaded.bound:
            return
        self.payload.unbind(loaded.run.params, loaded.run.offsets, loaded.part)
        loaded.bound = False
        self.pages.unpin(loaded.run.start, loaded.run.count)

    def _holds(self, loaded: Loaded) -> bool:
        """Keep a run that somebody still looks into; it must not be overwritten before the pass ends."""
        if loaded.part.num_views() == 0:
            return False
        self.payload.escaped(loaded.run.params)
        loaded.position = None
        self._held.append(loaded)
        return True

    @property
    def num_loaded(self) -> int:
        """Runs that have frames."""
        return len(self._everything())

    @property
    def resident_bytes(self) -> int:
        """Bytes of the residents."""
        return self.residents.run.num_bytes if self.residents is not None else 0

    def statistics(self) -> dict[str, Any]:
        """Frames by state and loads on their way, for checks."""
        return {"pages": self.pages.counts(), "pending": len(self._pending), "loaded": self.num_loaded}
