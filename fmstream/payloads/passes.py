"""One pass: one call of an outermost module, followed along its plan or recorded to make one."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fmstream.actors.compute import Executor
from fmstream.actors.runs import Loaded
from fmstream.actors.tape import Tape
from fmstream.core.plan import Plan, Prediction
from fmstream.core.trace import Call, Trace
from fmstream.core.units import closing_call
from fmstream.payloads.sites import Site
from fmstream.payloads.transforms import are_active, outside
from fmstream.payloads.weights import Weights


@dataclass(slots=True)
class Event:
    """A call of a site as it was seen; times are seconds on the compute clock."""

    site: Site
    start: float
    end: float
    parent: int


class Route:
    """A plan, indexed by the calls of the trace that it was made from.

    ``memory_bytes`` is the fast memory for which the plan was made; ``predicted`` is the plan's prediction, or a later
    one from newer measurements of the same plan.
    """

    def __init__(self, trace: Trace, plan: Plan, memory_bytes: int, predicted: Prediction | None = None) -> None:
        self.trace = trace
        self.plan = plan
        self.memory_bytes = memory_bytes
        self.predicted = predicted or plan.predicted
        self.num_passes = 0
        self.num_refined = 0
        self.sites = [call.site for call in trace.calls]
        self.begins = [-1] * len(trace.calls)
        self.closes = [-1] * len(trace.calls)
        for index, unit in enumerate(plan.units):
            self.begins[unit.first] = index
            self.closes[closing_call(trace, unit)] = index
        self._places: dict[int, list[int]] = {}
        for index, site in enumerate(self.sites):
            self._places.setdefault(site, []).append(index)

    def find(self, site: int, at: int) -> int:
        """The first call of ``site`` at or after ``at``, or -1."""
        places = self._places.get(site)
        if places is None:
            return -1
        found = bisect.bisect_left(places, at)
        return places[found] if found < len(places) else -1


class Pass:
    """Follows the calls of one pass.

    On its route a call costs a comparison, and at the ends of a unit what the executor does.  A call that the route
    has later on means that those between are skipped.  A call that it does not have ends the route: the rest of the
    pass loads on demand, and is recorded.
    """

    def __init__(
        self,
        weights: Weights,
        executor: Executor,
        root: Site,
        route: Route | None,
        tape: Tape,
        *,
        light: bool = False,
    ) -> None:
        self.light = light
        """Whether everything is resident, so that calls need not be followed."""
        self.weights = weights
        self.executor = executor
        self.root = root
        self.route = route
        self.thread = threading.get_ident()
        self.on_route = route is not None
        self.skipped = False
        self.events: list[Event] = []
        self.cursor = 0
        self.open_unit = -1
        self.starts: list[float] = []
        self.ends: list[float] = []
        if route is not None:
            self.starts = [-1.0] * len(route.sites)
            self.ends = [-1.0] * len(route.sites)
        self._innermost = -1
        self._active: list[int] = []
        weights.comparing = route is None and not light
        self._kept_until = -1
        self._kept: Loaded | None = None
        self.tape = tape
        self.has_streams = executor.loads.has_streams
        self._mark = self.tape.mark()
        self._end = 0.0
        self.compute_seconds = 0.0
        """Time on the compute clock, once `take_times` was called."""

    # The calls of a site.  A token is an index on the route, or None, or what the demand load returned.

    def enter(self, site: Site) -> int | tuple[int, Loaded | None] | None:
        """Called before the module; makes what it binds usable."""
        if are_active():
            with outside():
                return self.enter(site)
        self.weights.stack.append(site)
        executor = self.executor
        if executor.loads.stop_reason is not None:
            executor.loads.check_stop()
        if self.on_route:
            if not site.params:
                return None
            assert self.route is not None
            index = self.cursor
            if index >= len(self.route.sites) or self.route.sites[index] != site.index:
                index = self._resync(site)
            if index >= 0:
                self.cursor = index + 1
                unit = self.route.begins[index]
                self._active.append(index)
                if unit >= 0:
                    self.weights.bring_aliases()
                    self._lane()
                    if self.open_unit >= 0:
                        self._retire()
                    self.open_unit = unit
                    executor.acquire(unit)
                    self._mark = self.tape.mark()
                if self.has_streams:
                    executor.follow()
                self.starts[index] = self.tape.stamp()
                return index
        return self._record(site)

    def leave(self, token: int | tuple[int, Loaded | None] | None) -> None:
        """Called after the module, also when it raised."""
        if are_active():
            with outside():
                return self.leave(token)
        self.weights.stack.pop()
        if token is None:
            return
        if type(token) is int:
            self._active.pop()
            self.ends[token] = self.tape.stamp()
            if self.on_route:
                assert self.route is not None
                unit = self.route.closes[token]
                if unit >= 0 and unit == self.open_unit:
                    self._retire()
            elif token == self._kept_until and self._kept is not None:
                self.executor.release(self._kept)
                self._kept = None
            return
        assert isinstance(token, tuple)
        index, loaded = token
        event = self.events[index]
        event.end = self.tape.stamp()
        self._innermost = max(event.parent, -1)
        if loaded is not None:
            self._lane(event.site.name)
            self.executor.release(loaded)

    def _retire(self) -> None:
        self.open_unit = -1
        self.executor.retire()
        if self.executor.held:
            self._leave_route()

    def _resync(self, site: Site) -> int:
        """The place on the route where the pass goes on, or -1 after leaving the route."""
        assert self.route is not None
        index = self.route.find(site.index, self.cursor)
        if index < 0:
            self._leave_route()
            return -1
        self.skipped = True
        units = self.route.plan.units
        if self.open_unit >= 0 and index > units[self.open_unit].last:
            self._retire()
            if not self.on_route:
                return -1
        if self.open_unit < 0:
            # The skip may lead into the middle of a unit whose first call never came.
            for number, unit in enumerate(units):
                if unit.first < index <= unit.last:
                    self.open_unit = number
                    self.executor.acquire(number)
        return index

    def _leave_route(self) -> None:
        """From here on the pass loads on demand; a unit that an active call belongs to is kept until that returns."""
        assert self.route is not None
        self.on_route = False
        self.weights.comparing = True
        current = self.executor.current
        if current is not None and self.open_unit >= 0:
            unit = self.route.plan.units[self.open_unit]
            inside = [index for index in self._active if unit.first <= index <= unit.last]
            if inside:
                self._kept, self._kept_until = current, inside[0]
        self.executor.leave_plan()
        if current is not None and self._kept is None:
            self.executor.release(current)
        self.open_unit = -1

    def _record(self, site: Site) -> tuple[int, Loaded | None]:
        parent = self._innermost
        if parent < 0 and self._active:
            parent = -2 - self._active[-1]  # a call on the route that is still going on
        event = Event(site, 0.0, 0.0, parent)
        self.events.append(event)
        index = self._innermost = len(self.events) - 1
        masters = self.weights.masters
        self.weights.bring_aliases()
        params = [p for p in site.params if masters[p].bound is None]
        loaded = None
        if params:
            self._lane()
            loaded = self.executor.demand(site.name, params)
            self._mark = self.tape.mark()
        if self.has_streams:
            self.executor.follow()
        event.start = self.tape.stamp()
        return index, loaded

    def _lane(self, name: str = "") -> None:
        """Close the stretch of computing that began at the last mark."""
        if self.open_unit >= 0:
            name = f"unit {self.open_unit}"
        self._mark = self.tape.lane(name or self.root.name, self._mark)

    # What was learnt

    def finish(self) -> None:
        """Close the last stretch of computing."""
        self._lane()
        self._end = self.tape.stamp()
        self.tape.end()

    def take_times(self) -> None:
        """Wait until the device has reached the end of the pass, and take all times from the tape."""
        tape = self.tape
        tape.finish()
        if not tape.timed:
            return
        self.starts, self.ends = tape.resolve(self.starts), tape.resolve(self.ends)
        (self.compute_seconds,) = tape.resolve([self._end])
        times = tape.resolve([stamp for event in self.events for stamp in (event.start, event.end)])
        for event, start, end in zip(self.events, times[::2], times[1::2], strict=True):
            event.start, event.end = start, end

    def trace(self, between: float) -> Trace:
        """What happened, as the planner needs it: the route with present times, or what was recorded."""
        seconds = self.compute_seconds
        sizes = tuple(self.weights.sizes)
        if self.route is None:
            return Trace(tuple(self._recorded()), sizes, seconds, between)
        timed = self._timed()
        if self.on_route:
            return Trace(tuple(timed), sizes, max(seconds, max((c.end for c in timed), default=0.0)), between)
        merged = merge(timed, self._recorded(), self.cursor)
        return Trace(tuple(merged), sizes, max(seconds, max((c.end for c in merged), default=0.0)), between)

    def _timed(self) -> list[Call]:
        """The route's calls with the times of this pass; a skipped call keeps its length and takes no time."""
        assert self.route is not None
        calls, last = [], 0.0
        for index, call in enumerate(self.route.trace.calls):
            start, end = self.starts[index], self.ends[index]
            if start < 0.0 or end < start:
                start, end = last, last
            last = max(last, start if call.parent >= 0 else end)
            calls.append(Call(call.site, self._params(call.site), start, end, call.parent))
        return calls

    def _params(self, site: int) -> tuple[int, ...]:
        return tuple(self.weights.sites[site].params)

    def _recorded(self) -> list[Call]:
        """Recorded calls that bind something, with their nearest such caller for parent."""
        place = {-1: -1}
        calls: list[Call] = []
        for index, event in enumerate(self.events):
            parent = place.get(event.parent, event.parent)
            if not event.site.params:
                place[index] = parent
                continue
            place[index] = len(calls)
            calls.append(Call(event.site.index, tuple(event.site.params), event.start, event.end, parent))
        return calls


def merge(planned: Sequence[Call], extra: Sequence[Call], cursor: int) -> list[Call]:
    """A trace that holds both what was planned and what came instead, for skipped calls cost little.

    ``extra`` was recorded after the first ``cursor`` planned calls.  Where calls nest, or too many differ, what was
    recorded stands alone.
    """
    head, rest = list(planned[:cursor]), list(planned[cursor:])
    if any(call.parent != -1 for call in (*planned, *extra)) or len(extra) > 4 * len(planned) + 16:
        return head + [_renumbered(call, len(head)) for call in extra]
    known = {call.site for call in rest}
    merged = head
    at = 0
    clock = merged[-1].end if merged else 0.0
    for call in extra:
        if call.site in known:
            found = next((i for i in range(at, len(rest)) if rest[i].site == call.site), -1)
            if found >= 0:
                merged += [replace(c, start=clock, end=clock) for c in rest[at:found]]
                at = found + 1
        merged.append(replace(call, start=max(clock, call.start), end=max(clock, call.end)))
        clock = merged[-1].end
    return merged + [replace(c, start=clock, end=clock) for c in rest[at:]]


def _renumbered(call: Call, by: int) -> Call:
    """A recorded call behind ``by`` planned ones; below -1 its parent is one of those."""
    if call.parent == -1:
        return call
    return replace(call, parent=call.parent + by if call.parent >= 0 else -2 - call.parent)
