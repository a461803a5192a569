"""The validation for terminals."""

from __future__ import annotations

import io
from itertools import groupby
from typing import IO, Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fmstream.report.terminal import RULE
from fmstream.report.units import format_seconds
from fmstream.validate.outcome import Outcome, Validation, Verdict

STYLES: Final = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_RUN: "yellow"}
PLAIN_WIDTH: Final = 110


def render_validation(validation: Validation, *, width: int = PLAIN_WIDTH) -> str:
    """The validation as plain text without colour; lines end without blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(_renderable(validation))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def print_validation(validation: Validation, file: IO[str] | None = None) -> None:
    """Print the validation, coloured where the file is a terminal; to standard output by default."""
    console = Console(file=file, highlight=False)
    if console.is_terminal:
        console.print(_renderable(validation))
    else:
        console.file.write(render_validation(validation) + "\n")


def _renderable(validation: Validation) -> RenderableType:
    parts: list[RenderableType] = [_head(validation)]
    for part, outcomes in groupby(validation.outcomes, key=lambda outcome: outcome.part):
        parts.append(Padding(_table(part, list(outcomes)), (1, 0, 0, 0)))
    parts.append(Padding(_closing(validation), (1, 0, 0, 0)))
    return Group(*parts)


def _head(validation: Validation) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in validation.about.items():
        table.add_row(Text(name), Text(value))
    return table


def _table(part: str, outcomes: list[Outcome]) -> RenderableType:
    table = Table(
        box=RULE, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, header_style="bold", border_style="dim"
    )
    table.add_column(part, no_wrap=True, min_width=22)
    table.add_column("verdict", no_wrap=True, min_width=7)
    table.add_column("what was done", ratio=1, overflow="fold")
    table.add_column("time", justify="right", no_wrap=True, min_width=7)
    for outcome in outcomes:
        verdict = Text(str(outcome.verdict), style=STYLES[outcome.verdict])
        took = format_seconds(outcome.seconds) if outcome.seconds else "-"
        table.add_row(Text(outcome.trial), verdict, Text(outcome.read), took)
    return table


def _closing(validation: Validation) -> Text:
    told = [(verdict, count) for verdict, count in validation.counts.items() if count]
    pieces = [Text(f"{count} {verdict}", style=STYLES[verdict]) for verdict, count in told]
    return Text(", ").join(pieces)
