"""The numbers of a report, computed from telemetry.  Pure functions; no clock is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from fmstream.core.telemetry import PassRecord, Span, Telemetry
from fmstream.report.intervals import Interval, intersect, length, merge, overlap

TRACE = "trace"
"""The policy name of passes that loaded on demand to learn the order."""

BALANCED_WITHIN = 0.1
"""Compute and link that differ by less than this share of the larger one are called balanced."""

Regime = Literal["compute-bound", "link-bound", "balanced", "resident", "unknown"]


@dataclass(frozen=True, slots=True)
class RootRow:
    """One root module.  Times and bytes are medians over the measured passes, one pass each.

    The measured passes are the planned ones after the first, which fills the window and the residents; the first
    where there is no other; the traced ones where none was planned (``policy`` is then "trace").

    Attributes:
        root, policy: name of the module; policy of the measured passes.
        passes, traced_passes, measured_passes: number of all passes, of traced ones, of those behind the medians.
        total_seconds: wall time of all passes together.
        traced_seconds: median of the traced passes, None without one.
        first_seconds: the first planned pass, None without one.
        step_seconds, compute_seconds, wait_seconds: wall time, compute, waiting for weights.
        streamed_bytes, resident_bytes, window_bytes, fault_bytes: as in ``PassRecord``.
        link_bytes_per_second: measured while the link was busy in these passes; None if no copy was timed.
        link_seconds: streamed bytes over that rate, 0.0 where nothing is streamed, None if there is no rate.
        link_busy_share: share of the measured passes in which the link was busy, None if no copy was timed in them.
        bound_seconds: max(compute, link): no schedule that streams these bytes can be faster.
        gap: step over bound.
        regime: which of the two bounds the step; "balanced" within 10 %; "resident": nothing is streamed.
        predicted_seconds: median of what the plans expected, None without a plan.
        prediction_error: (predicted - measured) / measured.
    """

    root: str
    policy: str
    passes: int
    traced_passes: int
    measured_passes: int
    total_seconds: float
    traced_seconds: float | None
    first_seconds: float | None
    step_seconds: float
    compute_seconds: float
    wait_seconds: float
    streamed_bytes: int
    resident_bytes: int
    window_bytes: int
    fault_bytes: int
    link_bytes_per_second: float | None
    link_seconds: float | None
    link_busy_share: float | None
    bound_seconds: float | None
    gap: float | None
    regime: Regime
    predicted_seconds: float | None
    prediction_error: float | None


@dataclass(frozen=True, slots=True)
class Totals:
    """The whole run.

    Attributes:
        wall_seconds: from opening to closing, or to the last record of a handle that is still open.
        passes, traced_seconds: number of passes; wall time of the traced ones.
        compute_seconds, wait_seconds: sums over the passes.
        streamed_bytes, wasted_bytes: bytes over the link; of these, loaded ahead and dropped unused.
        replans: number of plans made.
        link_busy_share: share of the run in which the link was busy, None if no copy was timed.
        idle_planned_seconds, idle_traced_seconds, idle_outside_seconds: where the link was idle: in planned passes, in
            traced ones, outside passes.
    """

    wall_seconds: float
    passes: int
    traced_seconds: float
    compute_seconds: float
    wait_seconds: float
    streamed_bytes: int
    wasted_bytes: int
    replans: int
    link_busy_share: float | None
    idle_planned_seconds: float
    idle_traced_seconds: float
    idle_outside_seconds: float

    @property
    def link_idle_share(self) -> float | None:
        """Share of the run in which the link was idle."""
        return None if self.link_busy_share is None else 1.0 - self.link_busy_share

    @property
    def wait_share(self) -> float:
        """Share of the run in which the compute actor waited for weights."""
        return self.wait_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Reads of one parameter by one reader, outside the plan."""

    param: str
    reader: str
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """When the link was busy.  Several workers that copy at once count as one link.

    Attributes:
        copies: spans of the copy lanes.
        busy: the union of their times.
        covered: the stretch of the run for which all spans are known; older ones may have been dropped.
        worker_rate: bytes over busy seconds of the workers, for runs without spans.
    """

    copies: tuple[Span, ...]
    busy: tuple[Interval, ...]
    covered: tuple[Interval, ...]
    worker_rate: float | None = None

    @classmethod
    def from_spans(cls, spans: Sequence[Span], covered: Interval, worker_rate: float | None = None) -> Link:
        """Collect the copy lanes of spans."""
        copies = tuple(span for span in spans if span.lane.startswith("copy"))
        busy = merge((span.start, span.end) for span in copies)
        return cls(copies, tuple(busy), tuple(merge([covered])), worker_rate)

    def rate(self, within: Sequence[Interval]) -> float | None:
        """Bytes a second while the link was busy in these stretches, else in the whole run; None if never timed."""
        for stretch in (within, self.covered):
            seconds = length(intersect(self.busy, stretch))
            if seconds > 0:
                return sum(_bytes_within(span, stretch) for span in self.copies) / seconds or None
        return self.worker_rate

    def busy_share(self, within: Sequence[Interval]) -> float | None:
        """Share of these stretches, as far as they are covered, in which the link was busy."""
        known = intersect(within, self.covered)
        seconds = length(known)
        return length(intersect(self.busy, known)) / seconds if self.copies and seconds > 0 else None

    def idle_seconds(self, within: Sequence[Interval]) -> float:
        """Seconds of these stretches, as far as they are covered, in which the link was idle."""
        known = intersect(within, self.covered)
        return length(known) - length(intersect(self.busy, known))


def measure_link(telemetry: Telemetry) -> Link:
    """The link over the run."""
    spans = list(telemetry.spans)
    start, end = telemetry.started, last_time(telemetry)
    if len(spans) == telemetry.spans.maxlen:
        start = spans[0].end  # spans are recorded when they end: whatever ended earlier may be gone
    timed = telemetry.link_seconds > 0 and telemetry.link_bytes > 0
    return Link.from_spans(spans, (start, end), telemetry.link_bytes / telemetry.link_seconds if timed else None)


def last_time(telemetry: Telemetry) -> float:
    """When the handle was closed, or the end of the latest record."""
    if telemetry.ended is not None:
        return telemetry.ended
    ends = [record.end for record in telemetry.passes] + [span.end for span in list(telemetry.spans)]
    return max([telemetry.started, *ends])


def measure_roots(passes: Sequence[PassRecord], link: Link) -> tuple[RootRow, ...]:
    """One row for each root, in order of their first pass."""
    by_root: dict[str, list[PassRecord]] = {}
    for record in passes:
        by_root.setdefault(record.root, []).append(record)
    return tuple(measure_root(records, link) for records in by_root.values())


def measure_root(passes: Sequence[PassRecord], link: Link) -> RootRow:
    """The row of one root, from all its passes (at least one) in order of time."""
    traced = [record for record in passes if record.policy == TRACE]
    planned = [record for record in passes if record.policy != TRACE]
    measured = measured_passes(passes)
    within = _times(measured)
    step = median(record.seconds for record in measured)
    compute = median(record.compute_seconds for record in measured)
    streamed = _median_bytes(record.streamed_bytes for record in measured)
    rate = link.rate(within) if streamed else None
    copying = 0.0 if not streamed else streamed / rate if rate else None
    bound = None if copying is None else max(compute, copying)
    expected = [record.predicted.seconds for record in measured if record.predicted is not None]
    predicted = median(expected) if expected else None
    return RootRow(
        root=passes[0].root,
        policy=measured[-1].policy,
        passes=len(passes),
        traced_passes=len(traced),
        measured_passes=len(measured),
        total_seconds=sum(record.seconds for record in passes),
        traced_seconds=median(record.seconds for record in traced) if traced else None,
        first_seconds=planned[0].seconds if planned else None,
        step_seconds=step,
        compute_seconds=compute,
        wait_seconds=median(record.wait_seconds for record in measured),
        streamed_bytes=streamed,
        resident_bytes=_median_bytes(record.resident_bytes for record in measured),
        window_bytes=_median_bytes(record.window_bytes for record in measured),
        fault_bytes=_median_bytes(record.fault_bytes for record in measured),
        link_bytes_per_second=rate,
        link_seconds=copying,
        # Bytes came without a copy: they were loaded ahead, or the spans are gone; a share of 0 would mislead.
        link_busy_share=(link.busy_share(within) or None) if streamed else 0.0,
        bound_seconds=bound,
        gap=step / bound if bound else None,
        regime=_regime(compute, copying, streamed),
        predicted_seconds=predicted,
        prediction_error=(predicted - step) / step if predicted is not None and step > 0 else None,
    )


def measured_passes(passes: Sequence[PassRecord]) -> list[PassRecord]:
    """The passes that stand for a root: planned ones of the last policy without the first, else what there is."""
    planned = [record for record in passes if record.policy != TRACE]
    if not planned:
        return list(passes)
    current = [record for record in planned if record.policy == planned[-1].policy]
    return current[1:] or current


def measure_totals(telemetry: Telemetry, link: Link) -> Totals:
    """The sums over the run."""
    passes = list(telemetry.passes)
    traced = _times(record for record in passes if record.policy == TRACE)
    planned = _times(record for record in passes if record.policy != TRACE)
    run = [(telemetry.started, last_time(telemetry))]
    in_planned, in_traced = link.idle_seconds(planned), link.idle_seconds(traced)
    outside = link.idle_seconds(run) - link.idle_seconds(merge([*planned, *traced]))
    return Totals(
        wall_seconds=max(last_time(telemetry) - telemetry.started, 0.0),
        passes=len(passes),
        traced_seconds=sum(record.seconds for record in passes if record.policy == TRACE),
        compute_seconds=sum(record.compute_seconds for record in passes),
        wait_seconds=sum(record.wait_seconds for record in passes),
        streamed_bytes=telemetry.link_bytes,
        wasted_bytes=telemetry.wasted_bytes,
        replans=telemetry.replans,
        link_busy_share=link.busy_share(run),
        idle_planned_seconds=in_planned,
        idle_traced_seconds=in_traced,
        idle_outside_seconds=max(outside, 0.0),
    )


def measure_faults(telemetry: Telemetry) -> tuple[Fault, ...]:
    """Faults, most bytes first, then by name."""
    records = list(telemetry.faults.items())
    faults = [Fault(param, reader, count, num_bytes) for (param, reader), (count, num_bytes) in records]
    return tuple(sorted(faults, key=lambda fault: (-fault.num_bytes, fault.param, fault.reader)))


def _times(passes: Iterable[PassRecord]) -> list[Interval]:
    return merge((record.start, record.end) for record in passes)


def _median_bytes(values: Iterable[int]) -> int:
    return round(median(values))


def _bytes_within(span: Span, within: Sequence[Interval]) -> float:
    seconds = span.end - span.start
    return span.num_bytes * overlap((span.start, span.end), within) / seconds if seconds > 0 else 0.0


def _regime(compute: float, copying: float | None, streamed: int) -> Regime:
    if not streamed:
        return "resident"
    if copying is None:
        return "unknown"
    if abs(compute - copying) <= BALANCED_WITHIN * max(compute, copying):
        return "balanced"
    return "compute-bound" if compute > copying else "link-bound"
