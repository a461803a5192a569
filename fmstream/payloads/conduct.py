"""One pass on the plan that is in force: how it begins, what it shows, and what is written down when it ends."""

from __future__ import annotations

import time
from typing import Any

from fmstream.actors.compute import Executor
from fmstream.core.plan import Plan
from fmstream.core.telemetry import Telemetry
from fmstream.payloads.annex import Annex
from fmstream.payloads.embeddings import Tables
from fmstream.payloads.passbook import Ended, Passbook
from fmstream.payloads.passes import Pass
from fmstream.payloads.planner import Meter
from fmstream.payloads.roots import kind_of
from fmstream.payloads.routes import Routes
from fmstream.payloads.sites import Site
from fmstream.payloads.weights import Weights

SMALL_SHARE = 0.05
"""A root whose weights are below this share of the memory is loaded as a whole when it is called."""


class Conduct:
    """Begins and ends the passes of a session, from one survey to the next."""

    def __init__(
        self,
        weights: Weights,
        executor: Executor,
        routes: Routes,
        tables: Tables,
        annex: Annex | None,
        meter: Meter,
        passbook: Passbook,
        telemetry: Telemetry,
        resident_plan: Plan | None,
    ) -> None:
        self._weights = weights
        self._executor = executor
        self._routes = routes
        self._tables = tables
        self._annex = annex
        self._meter = meter
        self._passbook = passbook
        self._telemetry = telemetry
        self._resident_plan = resident_plan
        self._key: Any = None
        self._before: tuple[int, tuple[float, int]] = (0, (0.0, 0))
        self._activated = False
        """Whether a plan was put in force whose residents no pass has shown yet."""

    def begin(self, site: Site, args: Any, kwargs: dict[str, Any]) -> Pass:
        """Put a route in force for a call of a root, and show what it keeps resident."""
        executor, weights, routes = self._executor, self._weights, self._routes
        weights.fault_bytes = 0
        self._key = kind_of(args, kwargs)
        if self._resident_plan is not None and executor.plan is not self._resident_plan:
            self._load_all(executor, self._resident_plan)
        if self._annex is not None and self._annex.room.is_short:
            self._tables.shrink()
        self._passbook.take_times(block=False)
        tape = executor.loads.tape()
        self._before = (executor.streamed_bytes, self._meter.look(self._telemetry))
        root = routes.root(site)
        if self._resident_plan is not None:
            tape.skip_stamps()
            self._show_residents(executor)
            return Pass(weights, executor, site, None, tape, light=True)
        if root.num_bytes <= SMALL_SHARE * executor.arena.num_bytes:
            # Not worth a plan of its own, which would drive out that of a larger root.
            tape.skip_stamps()
            weights.comparing = True
            if root.params:
                executor.demand(site.title, root.params)
            return Pass(weights, executor, site, None, tape, light=True)
        route = routes.choose(executor, root, self._key)
        if not routes.wants_times(root, route):
            tape.skip_stamps()
        if route is not None:
            if executor.plan is not route.plan:
                executor.activate(route.plan)
                self._activated = True
        elif executor.plan is not None or executor.num_loaded:
            executor.activate(None)
        self._show_residents(executor)
        return Pass(weights, executor, site, route, tape)

    def _show_residents(self, executor: Executor) -> None:
        """At the end of the first pass that shows them, their bytes are compared."""
        self._weights.comparing, self._activated = self._activated, False
        executor.begin_pass()

    def _load_all(self, executor: Executor, plan: Plan) -> None:
        """Bring everything into fast memory, once; no pass is charged with it."""
        began = time.perf_counter()
        executor.activate(plan)
        self._activated = True
        seconds = time.perf_counter() - began
        self._telemetry.notes.append(
            f"all weights fit in the memory given: {executor.resident_bytes} bytes were read once, in {seconds:.3f} s, "
            "and nothing is streamed"
        )

    def finish(self, current: Pass) -> None:
        """End a pass that did not fail, and write it down."""
        executor, weights, routes = self._executor, self._weights, self._routes
        current.finish()
        if self._annex is not None:
            self._annex.room.end()
        on_route = current.route is not None and current.on_route
        executor.end_pass()
        self._tables.end_pass()
        weights.settle_aliases()
        root = routes.root(current.root)
        streamed, seen = self._before
        plan = executor.plan
        predicted = current.route.predicted if current.route is not None and on_route else None
        self._passbook.add(
            Ended(
                root=root,
                current=current,
                on_route=on_route,
                streamed_bytes=executor.streamed_bytes - streamed,
                resident_bytes=root.num_bytes if current.light else executor.resident_bytes,
                window_bytes=plan.window_bytes if plan is not None and not current.light else 0,
                fault_bytes=weights.fault_bytes,
                predicted=predicted if plan is not None and plan.units else None,
                seen=seen,
                key=self._key,
                held_bytes=executor.held_bytes,
            )
        )
