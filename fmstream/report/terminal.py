"""The report for terminals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fmstream.report.layout import facts_table, render, ruled_table, show
from fmstream.report.measure import RootRow
from fmstream.report.pages import Pages
from fmstream.report.report import Report
from fmstream.report.units import format_bytes, format_rate, format_seconds, format_share

MAX_FAULTS = 8
"""Faults that are listed; the rest is counted."""

PLAIN_WIDTH = 100

REGIME_STYLES = {"link-bound": "yellow", "compute-bound": "green", "resident": "green", "balanced": "cyan"}


def render_report(report: Report, *, width: int = PLAIN_WIDTH) -> str:
    """The report as plain text without colour; lines end without blanks."""
    return render(_page(report), width)


def print_report(report: Report, file: IO[str] | None = None) -> None:
    """Print the report, coloured where the file is a terminal; to standard output by default."""
    show(_page(report), PLAIN_WIDTH, file)


def _page(report: Report) -> RenderableType:
    parts: list[RenderableType] = [facts_table(_facts(report))]
    if report.roots:
        parts += [_speed_table(report.roots), _memory_table(report.roots)]
    if report.faults:
        parts.append(_fault_table(report))
    parts += _list("notes", report.notes)
    parts += _list("advice", report.advice)
    return Group(*parts)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    totals = report.totals
    yield "fmstream", f"policy {report.policy or 'none'} on {report.device or 'no device'}"
    yield "versions", ", ".join(f"{name} {value}" for name, value in report.versions.items())
    memory = f"{format_bytes(report.memory_bytes)} given, {format_bytes(report.smallest_bytes)} is the least that works"
    if report.peak_rss_bytes:
        memory += f", peak RSS {format_bytes(report.peak_rss_bytes)}"
    yield "memory", memory
    homes = ((report.file_bytes, "in files"), (report.ram_bytes, "in RAM"), (report.kept_bytes, "kept in place"))
    placed = "".join(f", {format_bytes(size)} {home}" for size, home in homes if size)
    yield "weights", format_bytes(report.weights_bytes) + placed
    passes = "1 pass" if totals.passes == 1 else f"{totals.passes} passes"
    yield (
        "run",
        (
            f"{format_seconds(totals.wall_seconds)}, {passes}, waiting for weights {format_share(totals.wait_share)}, "
            f"plans made {totals.replans}"
        ),
    )
    link = f"{format_bytes(totals.streamed_bytes)} streamed, {format_bytes(totals.wasted_bytes)} of it unused"
    if totals.link_busy_share is not None:
        idle = 1.0 - totals.link_busy_share
        link += f", busy {format_share(totals.link_busy_share)}, idle {format_share(idle)}"
    yield "link", link
    if report.pages is not None:
        yield "pages", _pages(report.pages)


def _pages(pages: Pages) -> str:
    caches = "1 cache" if pages.num_caches == 1 else f"{pages.num_caches} caches"
    if not pages.decisions:
        return f"keys and values of {caches}, all attended to"
    text = (
        f"keys and values of {caches}: {pages.chosen} attended to, {pages.recalled} recalled for it, {pages.ahead} "
        f"fetched ahead and {pages.ahead_used} of these used"
    )
    return f"{text}, everything in {format_share(pages.fallbacks / pages.decisions)} of the steps"


def _speed_table(rows: tuple[RootRow, ...]) -> RenderableType:
    table = _table(("root", "policy"), ("passes", "step", "compute", "wait", "bound", "gap"), ("regime",))
    for row in rows:
        table.add_row(
            Text(row.root),
            Text(row.policy),
            str(row.passes),
            format_seconds(row.step_seconds),
            format_seconds(row.compute_seconds),
            format_seconds(row.wait_seconds),
            "-" if row.bound_seconds is None else format_seconds(row.bound_seconds),
            _gap(row.gap),
            Text(row.regime, style=REGIME_STYLES.get(row.regime, ""), no_wrap=True),
        )
    return Padding(table, (1, 0, 0, 0))


def _memory_table(rows: tuple[RootRow, ...]) -> RenderableType:
    names = ("resident", "window", "streamed", "link rate", "link time", "busy", "first", "predicted")
    table = _table(("root",), names)
    for row in rows:
        first = row.first_seconds if row.first_seconds is not None else row.traced_seconds
        table.add_row(
            Text(row.root),
            format_bytes(row.resident_bytes),
            format_bytes(row.window_bytes),
            format_bytes(row.streamed_bytes),
            "-" if row.link_bytes_per_second is None else format_rate(row.link_bytes_per_second),
            "-" if row.link_seconds is None else format_seconds(row.link_seconds),
            "-" if row.link_busy_share is None else format_share(row.link_busy_share),
            "-" if first is None else format_seconds(first),
            _predicted(row),
        )
    return Padding(table, (1, 0, 0, 0))


def _fault_table(report: Report) -> RenderableType:
    table = _table(("read outside the plan", "by"), ("times", "bytes"))
    for fault in report.faults[:MAX_FAULTS]:
        table.add_row(Text(fault.param), Text(fault.reader), str(fault.count), format_bytes(fault.num_bytes))
    rest = report.faults[MAX_FAULTS:]
    if rest:
        count, num_bytes = sum(fault.count for fault in rest), sum(fault.num_bytes for fault in rest)
        table.add_row(Text(f"{len(rest)} more"), "", str(count), format_bytes(num_bytes))
    return Padding(table, (1, 0, 0, 0))


def _table(left: tuple[str, ...], right: tuple[str, ...], *more: tuple[str, ...]) -> Table:
    """A table of columns that are aligned left, then right, then (``more``) left and right in turn."""
    table = ruled_table()
    for index, names in enumerate((left, right, *more)):
        for name in names:
            if index % 2:
                table.add_column(name, justify="right", no_wrap=True)
            else:
                table.add_column(name, overflow="fold")
    return table


def _list(title: str, sentences: tuple[str, ...]) -> list[RenderableType]:
    if not sentences:
        return []
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row(Text("-"), Text(sentence))
    return [Padding(Text(title, style="bold"), (1, 0, 0, 0)), table]


def _gap(gap: float | None) -> Text:
    if gap is None:
        return Text("-")
    style = "green" if gap <= 1.1 else "yellow" if gap <= 1.5 else "red"
    return Text(f"{gap:.2f}x", style=style)


def _predicted(row: RootRow) -> str:
    if row.predicted_seconds is None or row.prediction_error is None:
        return "-"
    return f"{format_seconds(row.predicted_seconds)} {row.prediction_error * 100:+.0f} %"
