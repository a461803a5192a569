"""Sentences about a run, each derived from the numbers of its report.

What is called modelled follows the linear model of a step: max(C, (W - M) / B), with compute C, weights W, memory M and
link rate B: each byte of memory more is a byte less to stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fmstream.report.measure import TRACE, RootRow
from fmstream.report.units import GIB, format_bytes, format_rate, format_seconds, format_share

if TYPE_CHECKING:
    from fmstream.report.report import Report

BEST_POLICY = "overlap_async"
SMALL_ROOT = 0.05
"""A root with less than this share of the time of all passes is not spoken of."""
NEAR_BOUND = 1.1
"""A step within this factor of its bound leaves little to gain."""
LARGE_WASTE = 0.05
LARGE_FAULTS = 0.01
LARGE_IDLE = 0.1
LARGE_ERROR = 0.2
LARGE_TRACING = 0.25
WORTH_GIVING_BACK = 0.05


def advise(report: Report) -> tuple[str, ...]:
    """What bounds the run, where the link idled, which option would help by how much."""
    if not report.roots:
        return ("No pass was recorded: no module was called, so there is nothing to say about speed.",)
    total = sum(row.total_seconds for row in report.roots)
    rows = [row for row in report.roots if row.total_seconds >= SMALL_ROOT * total]
    rows.sort(key=lambda row: -row.total_seconds)
    sentences: list[str] = []
    for row in rows:
        sentences += _root(row, report)
    sentences += _spare_memory(report)
    sentences += _idle(report)
    sentences += _tracing(report)
    sentences += _waste(report)
    sentences += _faults(report)
    return tuple(sentences)


def _root(row: RootRow, report: Report) -> Iterator[str]:
    if row.policy == TRACE:
        count = "1 pass" if row.passes == 1 else f"{row.passes} passes"
        yield f"{row.root}: {count}, loaded on demand to learn the order of use; no planned pass followed."
        return
    yield f"{row.root} {_bounded(row)}{_distance(row)}."
    if row.regime == "link-bound":
        yield from _more_memory(row)
    if row.policy != BEST_POLICY:
        yield from _better_policy(row, report.memory_bytes)
    if row.prediction_error is not None and row.predicted_seconds and abs(row.prediction_error) > LARGE_ERROR:
        yield (
            f"{row.root}: the plan expected {format_seconds(row.predicted_seconds)} a step, measured were "
            f"{format_seconds(row.step_seconds)}."
        )


def _bounded(row: RootRow) -> str:
    compute = f"compute takes {format_seconds(row.compute_seconds)} a step"
    if row.regime == "resident":
        return f"is resident: nothing is streamed, all fits; {compute}"
    if row.link_seconds is None or row.link_bytes_per_second is None:
        return f"streams {format_bytes(row.streamed_bytes)} a step, but no copy was timed, so its bound is unknown"
    link = (
        f"{format_bytes(row.streamed_bytes)} over the link at {format_rate(row.link_bytes_per_second)} "
        f"take {format_seconds(row.link_seconds)}"
    )
    return f"is {row.regime}: {link}, {compute}"


def _distance(row: RootRow) -> str:
    if row.gap is None or row.regime == "resident":
        return ""
    return f"; the measured {format_seconds(row.step_seconds)} are {row.gap:.2f} times the bound"


def _more_memory(row: RootRow) -> Iterator[str]:
    rate = row.link_bytes_per_second
    if not rate or row.bound_seconds is None:
        return
    until_compute = row.streamed_bytes - row.compute_seconds * rate
    until_all_fits = row.streamed_bytes - row.window_bytes
    extra = min(until_compute, until_all_fits)
    if extra <= 0:
        return
    near = row.gap is not None and row.gap <= NEAR_BOUND
    what = "the step" if near else f"the bound of a step from {format_seconds(row.bound_seconds)}"
    to = format_seconds(row.compute_seconds)
    sentence = f"{row.root}: memory + {format_bytes(extra)} would bring {what} to {to} (modelled)"
    if extra > 2 * GIB:
        sentence += f"; each GiB saves {format_seconds(GIB / rate)}"
    yield sentence + "."


def _better_policy(row: RootRow, memory_bytes: int) -> Iterator[str]:
    rate = row.link_bytes_per_second
    if not rate:
        return
    streamed = max(row.resident_bytes + row.streamed_bytes - memory_bytes, 0)
    best = max(row.compute_seconds, streamed / rate)
    if row.step_seconds > NEAR_BOUND * best:
        yield (
            f"{row.root}: policy {BEST_POLICY!r} would bring the step from {format_seconds(row.step_seconds)} "
            f"to {format_seconds(best)} at best (modelled)."
        )


def _spare_memory(report: Report) -> Iterator[str]:
    """Memory that a compute-bound run could do without."""
    spare = float(report.memory_bytes - report.smallest_bytes)
    for row in report.roots:
        if row.policy == TRACE:
            continue
        near = row.gap is not None and row.gap <= NEAR_BOUND
        if row.regime != "compute-bound" or not near or not row.link_bytes_per_second:
            return
        spare = min(spare, row.compute_seconds * row.link_bytes_per_second - row.streamed_bytes)
    planned = any(row.policy != TRACE for row in report.roots)
    if planned and spare >= WORTH_GIVING_BACK * report.memory_bytes > 0:
        yield (
            f"Compute hides the link: memory - {format_bytes(spare)} would keep the step (modelled), "
            "and leave that to activations."
        )


def _idle(report: Report) -> Iterator[str]:
    totals = report.totals
    share = totals.link_idle_share
    if share is None or share < LARGE_IDLE:
        return
    places = (
        (totals.idle_planned_seconds, "in planned passes"),
        (totals.idle_traced_seconds, "in passes that learned the order"),
        (totals.idle_outside_seconds, "outside passes"),
    )
    listed = ", ".join(f"{format_seconds(seconds)} {place}" for seconds, place in places if seconds > 0)
    yield f"The link was idle {format_share(share)} of the run: {listed}."


def _tracing(report: Report) -> Iterator[str]:
    totals = report.totals
    share = totals.traced_seconds / totals.wall_seconds if totals.wall_seconds > 0 else 0.0
    if share > LARGE_TRACING:
        yield (
            f"Learning the order of use took {format_seconds(totals.traced_seconds)}, {format_share(share)} of the "
            "run; fmstream.stream() pays it once for many calls."
        )


def _waste(report: Report) -> Iterator[str]:
    wasted, streamed = report.totals.wasted_bytes, report.totals.streamed_bytes
    if streamed and wasted > LARGE_WASTE * streamed:
        yield (
            f"{format_bytes(wasted)} were loaded ahead and dropped unused, {format_share(wasted / streamed)} of what "
            f"was streamed; plans made: {report.totals.replans}."
        )


def _faults(report: Report) -> Iterator[str]:
    num_bytes = sum(fault.num_bytes for fault in report.faults)
    if num_bytes and num_bytes > LARGE_FAULTS * report.totals.streamed_bytes:
        count, worst = sum(fault.count for fault in report.faults), report.faults[0]
        yield (
            f"Reads outside the plan: {count}, {format_bytes(num_bytes)}; most by {worst.reader} of {worst.param}, "
            f"{format_bytes(worst.num_bytes)}."
        )
