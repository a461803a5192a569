"""The compute actor: carries out any plan on the thread that runs the user's loop.

It alone issues loads, waits for them, shows weights to the modules and gives frames back.  It knows runs of pages and
parameter ids; what a parameter is, is the payload's affair.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from fmstream.actors.loads import Loads
from fmstream.actors.runs import Loaded, Payload, Run
from fmstream.core.arena import Arena, Window, num_pages, pack
from fmstream.core.pages import PageTable
from fmstream.core.plan import Plan
from fmstream.core.telemetry import Telemetry
from fmstream.device.device import Device, Slab
from fmstream.errors import MemoryBudgetError


class Executor:
    """Window, residents and demand loads over one slab of fast memory.

    Not thread-safe: the payload's lock admits one pass at a time.
    """

    def __init__(
        self,
        payload: Payload,
        device: Device,
        loads: Loads,
        telemetry: Telemetry,
        memory_bytes: int,
        page_bytes: int,
    ) -> None:
        self.payload = payload
        self.device = device
        self.loads = loads
        self.telemetry = telemetry
        self.page_bytes = page_bytes
        self.arena = Arena(memory_bytes, page_bytes)
        self.num_frames = self.arena.num_frames
        self.plan: Plan | None = None
        self.slab: Slab | None = None
        self.streamed_bytes = 0
        self._units: list[Run] = []
        self._next = 0
        self._at = -1
        self._forget()

    def _forget(self) -> None:
        """An empty slab: no plan, nothing loaded."""
        self.plan = None
        self._use_pages(PageTable(self.num_frames, self.num_frames))
        self.arena = Arena(self.arena.num_bytes, self.page_bytes)
        self.window: Window | None = None
        self.residents: Loaded | None = None
        self.current: Loaded | None = None
        self._units = []
        self._repeated: frozenset[int] = frozenset()
        self._first_demand_page = 0
        self._ahead: deque[Loaded] = deque()
        self._demanded: list[Loaded] = []
        self._held: list[Loaded] = []

    def _use_pages(self, pages: PageTable) -> None:
        self.pages = pages
        self.loads.begin(pages)

    # Plans

    def resize(self, num_bytes: int) -> None:
        """Take another amount of fast memory, in whole pages; what is loaded is dropped."""
        if num_bytes // self.page_bytes == self.num_frames:
            return
        self.drop_ahead()
        self._release_all()
        self.slab = None
        self.arena = Arena(num_bytes, self.page_bytes)
        self.num_frames = self.arena.num_frames
        self._forget()

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
        self._use_pages(PageTable(page + self.num_frames, self.num_frames))
        if plan.window_bytes:
            self.window = self.arena.split(plan.window_bytes)
        self._next, self._at = 0, -1
        if resident_run:
            self.residents = self._submit(resident_run, 0, slab)
            self.loads.arrive(self.residents)
        self.plan = plan

    def begin_pass(self) -> None:
        """A pass begins: show the residents, and issue what waited for that."""
        if self.plan is not None and self.plan.wrap and self._at >= 0:
            self._at = -1
            self._top_up()
        if self.residents is not None:
            self.loads.arrive(self.residents)
            self._bind(self.residents)

    def follow(self) -> None:
        """Let the caller's present stream find in place what is shown."""
        self.loads.follow(loaded for loaded in self._everything() if loaded.bound)

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
        self.current, self._at = loaded, index
        if self.plan is not None and self.plan.lookahead != 0:
            self._top_up()
        self.loads.arrive(loaded)
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
        if plan.across is not None:
            most = min(most, len(self._units) - 1 - self._at + plan.across)
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
        """Wait until nothing is on its way, and no master is being read."""
        self.loads.settle()

    def refresh(self, param: int) -> None:
        """The master of ``param`` changed: bring the change to every copy in fast memory."""
        self.loads.homes_changed()
        for loaded in self._everything():
            run = loaded.run
            if param in run.params:
                self.loads.land(loaded)
                self.payload.rewrite(param, loaded.part, run.offsets[run.params.index(param)])

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
        self.loads.arrive(loaded)
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
                self._cancel(list(self.loads.pending))
            finally:
                self.loads.pending.clear()
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
            if loaded.ticket not in self.loads.pending:
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
        self._cancel(list(self.loads.pending))
        self.loads.close()
        self._forget()
        self.slab = None

    # Loads

    def take_memory(self) -> Slab:
        """Allocate the slab now rather than with the first load."""
        return self._slab()

    def _slab(self) -> Slab:
        if self.slab is None:
            self.slab = self.device.slab(self.arena.num_bytes)
        return self.slab

    def _submit(self, run: Run, frame: int, slab: Slab) -> Loaded:
        loaded = self.loads.issue(run, frame, slab, self.arena.offset_of(frame), run.count * self.page_bytes)
        self.streamed_bytes += run.num_bytes
        return loaded

    def _cancel(self, tickets: list[int]) -> None:
        """Stop loads; where a read is blocked, leave the slab to it."""
        if not self.loads.cancel(tickets):
            self.slab = None
            self.plan = None

    def _drop(self, loaded: Loaded, *, newest: bool) -> None:
        """Give back a run that was issued and never used: the newest one, or the oldest."""
        self.telemetry.wasted_bytes += loaded.run.num_bytes
        self._cancel([loaded.ticket])
        self.loads.forget(loaded)
        if newest and self.window is not None and loaded.position is not None:
            self.window.cancel_newest(loaded.position)
            loaded.position = None
        self._give_back(loaded)

    def _give_back(self, loaded: Loaded) -> None:
        run = loaded.run
        if self.pages.frame[run.start] == loaded.frame:
            self.pages.evict(run.start, run.count)
        self.loads.released(loaded)
        if loaded.position is not None and self.window is not None:
            self.window.release(loaded.position)

    # Showing

    def _bind(self, loaded: Loaded) -> None:
        run, part, bind = loaded.run, loaded.part, self.payload.bind
        self.pages.pin(run.start, run.count)
        loaded.bound = loaded.used = True
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
    def held_bytes(self) -> int:
        """Bytes of fast memory that are allocated."""
        return self.arena.num_bytes if self.slab is not None else 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the residents."""
        return self.residents.run.num_bytes if self.residents is not None else 0

    def statistics(self) -> dict[str, Any]:
        """Frames by state and loads on their way, for checks."""
        return {"pages": self.pages.counts(), "pending": len(self.loads.pending), "loaded": self.num_loaded}
