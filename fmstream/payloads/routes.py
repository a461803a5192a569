"""The routes of a session: which one a pass takes, in how much memory, and what passes teach about them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any

from fmstream.actors.compute import Executor
from fmstream.actors.scheduler import Scheduler
from fmstream.core.telemetry import Telemetry
from fmstream.core.trace import Trace
from fmstream.payloads.passbook import Ended
from fmstream.payloads.passes import Route
from fmstream.payloads.planner import Planner
from fmstream.payloads.room import Room
from fmstream.payloads.roots import Root
from fmstream.payloads.sites import Site
from fmstream.payloads.weights import Weights


class Routes:
    """All roots of a survey with their routes.  Plans are made by the scheduler, and taken by the next pass.

    ``room`` is what an accelerator's memory leaves; None on the CPU, where memory is as it was given.
    """

    def __init__(
        self, weights: Weights, telemetry: Telemetry, planner: Planner, scheduler: Scheduler, room: Room | None
    ) -> None:
        self.planner = planner
        self.roots: dict[int, Root] = {}
        self._weights = weights
        self._telemetry = telemetry
        self._scheduler = scheduler
        self._room = room

    def root(self, site: Site) -> Root:
        """What is known of an outermost module."""
        root = self.roots.get(id(site.module))
        if root is None:
            weights = self._weights
            inside = {id(module) for module in site.module.modules()}
            params = sorted({p for other in weights.sites if id(other.module) in inside for p in other.params})
            num_bytes = sum(weights.sizes[p] for p in params)
            root = self.roots[id(site.module)] = Root(site, tuple(params), num_bytes)
        return root

    def forget(self) -> None:
        """No route is right any more."""
        for root in self.roots.values():
            root.forget()

    def settle(self) -> None:
        """Wait until the plans that are being made are there."""
        wait([root.pending for root in self.roots.values() if root.pending is not None])

    # Taking one

    def choose(self, executor: Executor, root: Root, key: Any) -> Route | None:
        """The route for a kind of call, None where none is known; memory is then as it needs it."""
        root.settle(executor.loads.check_stop)
        route = root.route(key)
        return route if self._room is None else self._make_room(executor, self._room, root, key, route)

    def wants_times(self, root: Root, route: Route | None) -> bool:
        """Whether the times within the next pass are to be taken."""
        return route is None or root.wants_times or self.planner.will_be_due(route)

    def _make_room(self, executor: Executor, room: Room, root: Root, key: Any, route: Route | None) -> Route | None:
        """Hold as much memory as the route was planned for, or less where the pass needs the room.

        Returns the route, or another one for less memory.
        """
        kind = (id(root.site.module), key)
        if self.planner.automatic:
            wanted = room.smallest if route is None else route.memory_bytes
        else:
            wanted = self.planner.limits.memory_bytes
        granted = room.grant(kind, wanted, executor.held_bytes)
        if route is not None and route.memory_bytes > granted:
            route = self._replan(executor, root, key, route.trace, granted)
        executor.resize(granted)
        executor.take_memory()
        room.begin(kind)
        return route

    def _replan(self, executor: Executor, root: Root, key: Any, trace: Trace, memory: int) -> Route | None:
        """A route for less memory, from the trace of the present one."""
        pinned = frozenset(self._weights.pinned)
        root.routes.clear()
        self._submit(root, key, lambda: self.planner.make(trace, pinned, memory))
        root.settle(executor.loads.check_stop)
        return root.route(key)

    # Learning

    def learn(self, ended: Ended) -> None:
        """Decide whether a pass calls for another plan, and let the scheduler make it."""
        root, current = ended.root, ended.current
        weights, planner = self._weights, self.planner
        planner.meter.update(self._telemetry, ended.seen)
        if weights.learned:
            weights.learned = False
            root.forget()
            return
        route, pinned, allowed = current.route, frozenset(weights.pinned), self._allowed(ended)
        if route is None or not ended.on_route:
            trace = current.trace(root.between)
            if not trace.calls:
                return
            work = partial(planner.make, trace, pinned, allowed)
        else:
            route.num_passes += 1
            if root.pending is not None or current.skipped:
                return
            root.wants_times |= planner.is_due(route, current.tape.seconds)
            if not root.wants_times or not current.tape.timed:
                return
            root.wants_times = False
            trace = current.trace(root.between)
            work = partial(planner.improve, route, trace, pinned, allowed)
        self._telemetry.replans += 1
        self._submit(root, ended.key, work)

    def _allowed(self, ended: Ended) -> int | None:
        """Bytes of memory that activations leave, as far as that is known."""
        if self._room is None:
            return None
        if not self.planner.automatic:
            return self._room.limit
        return self._room.allowed((id(ended.root.site.module), ended.key), ended.held_bytes)

    def _submit(self, root: Root, key: Any, work: Callable[[], Route | None]) -> None:
        root.pending, root.pending_key = self._scheduler.submit(work), key
