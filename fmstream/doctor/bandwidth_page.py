"""``fmstream bandwidth`` for terminals, and its picture."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from fmstream.doctor.bandwidth import SIZES, BandwidthResult, run_bandwidth
from fmstream.doctor.host_rates import RAM
from fmstream.doctor.rates import Rate
from fmstream.errors import ConfigError
from fmstream.report import layout
from fmstream.report.plot import DOTS_PER_INCH, make_figure
from fmstream.report.units import format_bytes, format_rate, format_seconds, format_share

UNSTEADY: Final = 0.15
"""Spread above which a figure is marked: something else was going on."""
WIDTH: Final = 110


def run_command(
    device: str | None, largest: str | None, path: str | None, save: str | None, png: str | None, as_json: bool
) -> int:
    """Measure, write what is to be written, and print it; returns the exit status 0."""
    for option, file in (("--save", save), ("--png", png)):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"{option} {file}: there is no such folder: give a file in one that exists")
    show = (lambda text: print(f"measuring {text} ...", file=sys.stderr)) if sys.stderr.isatty() else None
    result = run_bandwidth(device, largest=SIZES[-1] if largest is None else largest, path=path, show=show)
    if save is not None:
        result.calibration().save(save)
    if png is not None:
        save_bandwidth_png(result, png)
    print(result.to_json() if as_json else render(result))
    return 0


def render(result: BandwidthResult) -> str:
    """The page as plain text; lines end without blanks."""
    return layout.render(_page(result), WIDTH)


def _page(result: BandwidthResult) -> RenderableType:
    return Group(layout.facts_table(_facts(result)), *(Padding(table, (1, 0, 0, 0)) for table in _tables(result)))


def _facts(result: BandwidthResult) -> Iterator[tuple[str, str]]:
    yield "bandwidth", f"{result.device}, {result.device_name}"
    if any("the device" in rate.what for rate in result.rates):
        if not result.links:
            yield "link", "this system does not tell its generation and width"
        else:
            first, last = result.links[0], result.links[-1]
            limit = result.theoretical
            carries = "" if limit is None else f", which could carry {format_rate(limit)} each way"
            yield "link", f"{first} at the first copies, {last} at the last{carries}"
        latency, seen = result.costs
        yield "each copy", f"{format_seconds(latency)} on the link beside its bytes, {format_seconds(seen)} until seen"
    if result.file is not None:
        yield "file", result.file
    spread = format_share(UNSTEADY)
    yield "figures", f"the median, and below it what 95 % of samples reached; * where times varied by over {spread}"


def _tables(result: BandwidthResult) -> Iterator[RenderableType]:
    kinds = dict.fromkeys(rate.what for rate in result.rates)
    sizes = sorted({rate.num_bytes for rate in result.rates if not rate.what.startswith("disk")})
    table = _empty("copies in GB/s")
    for size in sizes:
        table.add_column(_short(size), justify="right", no_wrap=True)
    by_place = {(rate.what, rate.num_bytes): rate for rate in result.rates}
    has_share = result.theoretical is not None
    if has_share:
        table.add_column("of the link", justify="right", no_wrap=True)
    for kind in kinds:
        if not kind.startswith("disk"):
            cells = [_cell(by_place.get((kind, size))) for size in sizes]
            best = result.largest(kind)
            share = None if best is None else result.share(best)
            table.add_row(kind, *cells, *(["" if share is None else format_share(share)] if has_share else []))
    yield table
    disk = [rate for rate in result.rates if rate.what.startswith("disk")]
    if disk:
        reads = _empty("reads")
        for name in ("median", "95 %", "bytes a sample"):
            reads.add_column(name, justify="right", no_wrap=True)
        for rate in disk:
            reads.add_row(
                rate.what, format_rate(rate.median) + _mark(rate), format_rate(rate.p95), format_bytes(rate.num_bytes)
            )
        yield reads


def _empty(first: str) -> Table:
    table = layout.ruled_table()
    table.add_column(first, no_wrap=True)
    return table


def _cell(rate: Rate | None) -> str:
    """Median above, what 95 % of samples reached below, both in GB/s."""
    return "-" if rate is None else f"{_digits(rate.median)}{_mark(rate)}\n{_digits(rate.p95)}"


def _digits(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g}"


def _mark(rate: Rate) -> str:
    return "*" if rate.cv > UNSTEADY else ""


def _short(num_bytes: int) -> str:
    """A size as people say it, where it is a round one: "64 KiB"."""
    for power, unit in ((20, "MiB"), (10, "KiB")):
        if num_bytes % (1 << power) == 0:
            return f"{num_bytes >> power} {unit}"
    return format_bytes(num_bytes)


def save_bandwidth_png(result: BandwidthResult, path: str | os.PathLike[str]) -> None:
    """Draw the rates by size of copy, beside what the link could carry.

    Raises ``ConfigError`` if matplotlib is missing.
    """
    figure = make_figure(9, 5.5)
    axes = figure.add_subplot()
    for kind in dict.fromkeys(rate.what for rate in result.rates):
        rates = sorted((rate for rate in result.rates if rate.what == kind), key=lambda rate: rate.num_bytes)
        sizes, medians = [rate.num_bytes for rate in rates], [rate.median / 1e9 for rate in rates]
        if kind.startswith("disk"):
            axes.axhline(medians[0], label=kind, linestyle=":", color="C7" if "past" in kind else "C9")
        else:
            axes.plot(
                sizes,
                medians,
                marker="o",
                label=kind,
                linestyle=":" if kind == RAM else "--" if "both" in kind else "-",
            )
    if result.theoretical is not None:
        axes.axhline(result.theoretical / 1e9, color="black", linewidth=0.8, label="the link could carry")
    axes.set_xscale("log", base=2)
    sizes = sorted({rate.num_bytes for rate in result.rates if not rate.what.startswith("disk")})
    axes.set_xticks(sizes, [_short(size) for size in sizes], rotation=30, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of one copy")
    axes.set_ylabel("GB/s, median")
    axes.grid(alpha=0.3)
    axes.set_title(f"Copies on {result.device_name}", loc="left")
    axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)
