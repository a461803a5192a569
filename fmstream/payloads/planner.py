"""From what passes showed to the route of the next ones."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from fmstream.core.auto import least_memory
from fmstream.core.calibration import Calibration
from fmstream.core.plan import Costs, Limits, Plan, Prediction
from fmstream.core.policy import Policy
from fmstream.core.simulate import load_seconds, simulate
from fmstream.core.telemetry import Telemetry
from fmstream.core.trace import Trace
from fmstream.errors import MemoryBudgetError
from fmstream.payloads.passes import Route

FIRST_RATE = 1e9
"""Bytes a second that are assumed before anything was measured, where there is no calibration."""
RATES = 4
"""Passes over which the best rate is taken."""
LATENCY_SECONDS = 2e-4
"""From the issue of a load to its first byte: two thread switches and a system call."""
GAIN = 0.97
"""Another plan is worth its reload if it takes less than this share of the present one's time,"""
FEWER_BYTES = 0.9
"""or if it takes no longer and moves less than this share of the bytes: each costs memory bandwidth and a core."""
REPAID_IN = 10
"""Passes over which what another plan costs at first must be repaid: many loops have no more than a dozen or two."""
COMPARED = 2
"""Times that residents cost their way over the link: the first pass that shows them compares their bytes."""
REFINE_AFTER = (1, 3)
"""Passes on a route after which its times are taken anew: the traced pass was colder than the others."""
DRIFT = 0.25
DRIFT_PASSES = 3
"""So many passes in a row, each off the prediction by more than that share, call for new times;"""
PATIENCE = 4
"""so many times as many the next time, if they led to no other plan: to make one takes time from computing."""
MOST_PATIENCE = 2000


class Meter:
    """The link's rate, by which plans are made: the best of the last passes.

    A pass that computes most of the time keeps few workers busy, and shows less than the link can do.
    """

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.known: Costs | None = None if calibration is None else calibration.link
        self.first_rate = FIRST_RATE
        """Bytes a second that are assumed before anything was seen."""
        self._calibration = calibration
        self._rates: deque[float] = deque(maxlen=RATES)

    @property
    def costs(self) -> Costs:
        """What moving weights costs: as it was known from the start, or else as it was seen."""
        if self.known is not None:
            return self.known
        return Costs(max(self._rates, default=self.first_rate), LATENCY_SECONDS)

    def begin(self, telemetry: Telemetry) -> None:
        """Begin with the rate that a calibration has for where most weights are."""
        if self._calibration is not None:
            in_files = telemetry.file_bytes > telemetry.ram_bytes
            self.first_rate = self._calibration.host_rate(from_files=in_files) or FIRST_RATE

    def look(self, telemetry: Telemetry) -> tuple[float, int]:
        """Busy seconds and bytes so far."""
        return telemetry.link_seconds, telemetry.link_bytes

    def update(self, telemetry: Telemetry, since: tuple[float, int]) -> None:
        """Take the rate since an earlier look, if enough was moved to tell."""
        seconds, num_bytes = telemetry.link_seconds - since[0], telemetry.link_bytes - since[1]
        if num_bytes > 0 and seconds > 1e-6:
            self._rates.append(num_bytes / seconds)


class Planner:
    """Makes routes from traces under fixed limits."""

    def __init__(self, policy: Policy, limits: Limits, meter: Meter, *, automatic: bool = False) -> None:
        self.policy = policy
        self.limits = limits
        self.meter = meter
        self.automatic = automatic
        """Whether to take no more memory than a pass can make use of."""
        self._off = 0
        self._patience = DRIFT_PASSES

    def make(
        self, trace: Trace, pinned: frozenset[int], allowed: int | None = None, near: int | None = None
    ) -> Route | None:
        """A first route for a trace; None where no plan fits, so that passes go on loading on demand.

        ``allowed`` is what activations leave of the limits' memory, if that is known to be less; ``near`` is what a
        route for such a trace took.
        """
        limits = replace(self.limits, pinned=pinned & trace.params)
        if allowed is not None and allowed < limits.memory_bytes:
            limits = replace(limits, memory_bytes=allowed // limits.page_bytes * limits.page_bytes)
        costs = self.meter.costs
        try:
            if self.automatic:
                limits = replace(limits, memory_bytes=least_memory(trace, limits, costs, self.policy, near=near))
            return Route(trace, self.policy(trace, limits, costs), limits.memory_bytes)
        except MemoryBudgetError:
            return None

    def will_be_due(self, route: Route) -> bool:
        """Whether the next pass on a route will call for new times, however long it takes."""
        return route.num_refined < len(REFINE_AFTER) and route.num_passes + 1 >= REFINE_AFTER[route.num_refined]

    def is_due(self, route: Route, seconds: float) -> bool:
        """Whether the last pass on a route calls for new times."""
        predicted = route.predicted.seconds
        self._off = self._off + 1 if abs(seconds - predicted) > DRIFT * predicted else 0
        if route.num_refined < len(REFINE_AFTER) and route.num_passes >= REFINE_AFTER[route.num_refined]:
            return True
        if self._off >= self._patience:
            self._off = 0
            self._patience = min(PATIENCE * self._patience, MOST_PATIENCE)
            return True
        return False

    def improve(self, route: Route, trace: Trace, pinned: frozenset[int], allowed: int | None = None) -> Route | None:
        """The route with a prediction from newer times, or a new one where that is clearly faster."""
        predicted = self.predict(route.plan, trace)
        better = self.make(trace, pinned, allowed, route.memory_bytes)
        fits = allowed is None or route.memory_bytes <= allowed
        if better is not None and (not fits or self._is_worth_it(better, route, predicted.seconds)):
            following = better
            self._patience = DRIFT_PASSES
        else:
            following = Route(trace, route.plan, route.memory_bytes, predicted)
        following.num_passes, following.num_refined = route.num_passes, route.num_refined + 1
        return following

    def predict(self, plan: Plan, trace: Trace) -> Prediction:
        """What a plan takes under the present costs."""
        costs = self.meter.costs
        if not plan.units:
            return replace(plan.predicted, seconds=trace.seconds, compute=trace.seconds, bound=trace.seconds)
        seconds = simulate(
            trace,
            plan.units,
            window_bytes=plan.window_bytes,
            page_bytes=self.limits.page_bytes,
            costs=costs,
            lookahead=plan.lookahead,
            wrap=plan.wrap,
            across=plan.across,
        )
        link = sum(load_seconds(unit.num_bytes, costs) for unit in plan.units)
        free = trace.between if plan.wrap else 0.0
        regime = "compute-bound" if trace.seconds >= link else "link-bound"
        return Prediction(seconds, trace.seconds, link, max(trace.seconds, link - free), regime)

    def _is_worth_it(self, better: Route, present: Route, present_seconds: float) -> bool:
        """Whether to exchange a route, whose passes are predicted to take so long, for another one."""
        seconds = better.predicted.seconds + self._exchange_seconds(better) / REPAID_IN
        if seconds < GAIN * present_seconds:
            return True
        if seconds > present_seconds / GAIN:
            return False
        return (
            better.plan.streamed_bytes < FEWER_BYTES * present.plan.streamed_bytes
            or better.memory_bytes < FEWER_BYTES * present.memory_bytes
        )

    def _exchange_seconds(self, route: Route) -> float:
        """What it costs to put a route in force where the fast memory is RAM: all that is resident comes anew.

        An accelerator compares nothing, and brings its residents in less than the time of a pass.
        """
        if self.meter.known is not None:
            return 0.0
        resident_bytes = sum(route.trace.sizes[param] for param in route.plan.resident)
        return COMPARED * resident_bytes / self.meter.costs.bytes_per_second
