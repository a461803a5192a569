"""Pictures of a run: the timeline of its last passes, and the bars of a report.  Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmstream.core.telemetry import PassRecord, Span
from fmstream.errors import ConfigError
from fmstream.report.intervals import Interval, intersect, length, merge, overlap
from fmstream.report.measure import TRACE, Link, RootRow, measure_root
from fmstream.report.report import Report
from fmstream.report.timeline import order_lanes
from fmstream.report.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_PASSES = 2
DOTS_PER_INCH = 150
DENSE_SPANS = 400
DENSE_COLUMNS = 1200
"""With more blocks than this a lane is drawn as so many columns, each as dark as its share of busy time."""
HALF_LANE = 0.36

INK, FAINT = "#22272e", "#8a929c"
# Two shades of each kind: neighbouring blocks alternate, so that units stay visible where they touch.
SHADES = {
    "compute": ("#2f6db5", "#5a93d1"),
    "wait": ("#d1495b", "#e07b88"),
    "host": ("#b7791f", "#d9a657"),
    "copy": ("#2a9d74", "#62bd9a"),
    "other": ("#7a7f87", "#a3a8af"),
}
MARKS = ("compute", "waiting for weights", "link", "bound", "predicted")
MEANINGS = {
    "compute": "computing",
    "wait": "waiting for weights",
    "host": "stage on the host",
    "copy": "copying weights",
    "other": "other",
}


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch that is drawn: its limits, the time that is zero on the axis, and what the axis says."""

    start: float
    end: float
    origin: float
    label: str

    def to_ms(self, time: float) -> float:
        """A time on the axis, in milliseconds."""
        return (time - self.origin) * 1e3


def save_timeline_png(
    spans: Iterable[Span],
    passes: Iterable[PassRecord],
    path: str | Path,
    *,
    seconds: tuple[float, float] | None = None,
) -> None:
    """Draw the lanes over the last two planned passes, or over ``seconds`` (from, to) since the first record.

    Raises ``ConfigError`` if matplotlib is missing, or if there is no span in that stretch.
    """
    spans, passes = list(spans), list(passes)
    window = _choose_window(spans, passes, seconds)
    shown = [span for span in spans if span.end > window.start and span.start < window.end]
    if not shown:
        raise ConfigError(
            f"no spans between {window.start - window.origin:.3f} s and {window.end - window.origin:.3f} s: nothing to "
            "draw; choose other seconds, or run with at least one pass"
        )
    lanes = order_lanes(spans)
    figure = make_figure(11, 1.7 + 0.5 * len(lanes))
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        _draw_lane(axes, row, lane, [span for span in shown if span.lane == lane], window)
    _write_beside(axes, -0.7, "busy")
    _draw_passes(axes, passes, window)
    _finish_timeline(figure, axes, lanes, window)
    _draw_title(axes, *_describe(passes, spans, window))
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def save_report_png(report: Report, path: str | Path) -> None:
    """Draw a bar for each root: compute and waiting above, the link below, marks for bound and prediction.

    Raises ``ConfigError`` if matplotlib is missing, or if the report has no pass.
    """
    if not report.roots:
        raise ConfigError("the report has no pass: nothing to draw")
    figure = make_figure(11, 1.9 + 0.75 * len(report.roots))
    axes = figure.add_subplot()
    for row, root in enumerate(report.roots):
        _draw_root(axes, row, root)
    axes.set_yticks(range(len(report.roots)), [_label(root) for root in report.roots])
    axes.set_ylim(len(report.roots) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds a pass")
    _strip(axes)
    drawn, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, drawn, strict=True))
    named = [once[name] for name in MARKS if name in once]
    figure.legend(handles=named, loc="outside lower right", ncols=len(named), frameon=False, fontsize=9)
    memory = f"{format_bytes(report.memory_bytes)} of memory for {format_bytes(report.weights_bytes)} of weights"
    _draw_title(axes, f"{report.policy} on {report.device}", memory)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def make_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches.  Raises ``ConfigError`` if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _choose_window(spans: Sequence[Span], passes: Sequence[PassRecord], seconds: tuple[float, float] | None) -> Window:
    records: list[Span | PassRecord] = [*spans, *passes]
    first = min((record.start for record in records), default=0.0)
    last = max((record.end for record in records), default=0.0)
    if seconds is not None:
        begin, end = seconds
        if not begin < end:
            raise ConfigError(f"seconds is {seconds!r}: give (from, to) with from < to")
        return Window(first + begin, first + end, first, "ms since the first record")
    if not passes:
        return Window(first, last, first, "ms since the first record")
    planned = [record for record in passes if record.policy != TRACE]
    root = (planned or passes)[-1].root
    of_root = [record for record in planned or passes if record.root == root]
    shown = of_root[-SHOWN_PASSES:]
    margin = 0.02 * (shown[-1].end - shown[0].start)
    number = [record for record in passes if record.root == root].index(shown[0]) + 1
    label = f"ms since the start of pass {number} of {root}"
    return Window(shown[0].start - margin, shown[-1].end + margin, shown[0].start, label)


def _draw_lane(axes: Axes, row: int, lane: str, spans: list[Span], window: Window) -> None:
    whole: list[Interval] = [(window.start, window.end)]
    busy = intersect(merge((span.start, span.end) for span in spans), whole)
    _write_beside(axes, row, format_share(length(busy) / length(whole)))
    shades = SHADES[_kind(lane)]
    if len(spans) > DENSE_SPANS:
        _draw_dense(axes, row, busy, window, shades[0])
        return
    blocks = sorted((max(span.start, window.start), min(span.end, window.end)) for span in spans)
    bars = [(window.to_ms(start), (end - start) * 1e3) for start, end in blocks]
    axes.broken_barh(bars, (row - HALF_LANE, 2 * HALF_LANE), facecolors=shades, linewidth=0)


def _draw_dense(axes: Axes, row: int, busy: Sequence[Interval], window: Window, shade: str) -> None:
    from matplotlib.colors import to_rgba

    width = (window.end - window.start) / DENSE_COLUMNS
    starts = [window.start + index * width for index in range(DENSE_COLUMNS)]
    cells = [to_rgba(shade, min(overlap((start, start + width), busy) / width, 1.0)) for start in starts]
    left, right = window.to_ms(window.start), window.to_ms(window.end)
    extent = (left, right, row + HALF_LANE, row - HALF_LANE)
    axes.imshow([cells], extent=extent, aspect="auto", interpolation="nearest", zorder=1)


def _write_beside(axes: Axes, row: float, text: str) -> None:
    """Small print to the right of a lane."""
    where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(text, (1, row), (6, 0), **where, va="center", color=FAINT, fontsize=9)


def _draw_passes(axes: Axes, passes: Iterable[PassRecord], window: Window) -> None:
    limits = {time for record in passes for time in (record.start, record.end) if window.start <= time <= window.end}
    for time in sorted(limits):
        axes.axvline(window.to_ms(time), color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=3)


def _finish_timeline(figure: Figure, axes: Axes, lanes: Sequence[str], window: Window) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(window.to_ms(window.start), window.to_ms(window.end))
    axes.set_xlabel(window.label)
    _strip(axes)
    kinds = dict.fromkeys(_kind(lane) for lane in lanes)
    handles: list[Any] = [Patch(color=SHADES[kind][0], label=MEANINGS[kind]) for kind in kinds]
    handles.append(Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), label="pass begins or ends"))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)


def _describe(passes: Sequence[PassRecord], spans: Sequence[Span], window: Window) -> tuple[str, str]:
    """The title and the line below it: the root that takes most of the window, its regime, step, bound and gap."""
    inside = [record for record in passes if record.end > window.start and record.start < window.end]
    if not inside:
        return "timeline", "no pass in this stretch"
    seconds: dict[str, float] = {}
    for record in inside:
        part = min(record.end, window.end) - max(record.start, window.start)
        seconds[record.root] = seconds.get(record.root, 0.0) + part
    root = max(seconds, key=lambda name: seconds[name])
    covered = (min(span.start for span in spans), max(span.end for span in spans))
    row = measure_root([record for record in passes if record.root == root], Link.from_spans(spans, covered))
    facts = [f"policy {row.policy}", f"step {format_seconds(row.step_seconds)}"]
    if row.bound_seconds is not None and row.gap is not None:
        facts += [f"bound {format_seconds(row.bound_seconds)}", f"gap {row.gap:.2f}x"]
    return f"{root}: {row.regime}", "   ".join(facts)


def _draw_title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK)
    axes.set_title(subtitle, loc="right", fontsize=10, color=INK)


def _draw_root(axes: Axes, row: int, root: RootRow) -> None:
    upper, lower, height = row - 0.14, row + 0.14, 0.28
    axes.barh(upper, root.compute_seconds, height, color=SHADES["compute"][0], label=MARKS[0])
    axes.barh(upper, root.wait_seconds, height, left=root.compute_seconds, color=SHADES["wait"][0], label=MARKS[1])
    axes.barh(lower, root.link_seconds or 0.0, height, color=SHADES["copy"][0], label=MARKS[2])
    if root.bound_seconds is not None:
        axes.vlines(root.bound_seconds, row - 0.36, row + 0.36, color=INK, linewidth=2, label=MARKS[3])
    if root.predicted_seconds is not None:
        mark: dict[str, Any] = {"color": "white", "markeredgecolor": INK, "linestyle": "none"}
        axes.plot(root.predicted_seconds, upper, marker="D", label=MARKS[4], **mark)


def _label(row: RootRow) -> str:
    gap = "" if row.gap is None else f", {row.gap:.2f}x"
    regime = "learned on demand" if row.policy == TRACE else row.regime
    return f"{row.root}\n{regime}{gap}"


def _kind(lane: str) -> str:
    kind = lane.partition(" ")[0]
    return kind if kind in SHADES else "other"


def _strip(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.tick_params(axis="x", color=FAINT, labelcolor=INK)
    axes.grid(axis="x", color="#dfe3e8", linewidth=0.6)
    axes.set_axisbelow(True)
