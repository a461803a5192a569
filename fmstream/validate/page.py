"""The validation for terminals."""

from __future__ import annotations

from itertools import groupby
from typing import IO, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from fmstream.report.layout import facts_table, render, ruled_table, show
from fmstream.report.units import format_seconds
from fmstream.validate.outcome import Outcome, Validation, Verdict

STYLES: Final = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_RUN: "yellow"}
PLAIN_WIDTH: Final = 110


def render_validation(validation: Validation, *, width: int = PLAIN_WIDTH) -> str:
    """The validation as plain text without colour; lines end without blanks."""
    return render(_page(validation), width)


def print_validation(validation: Validation, file: IO[str] | None = None) -> None:
    """Print the validation, coloured where the file is a terminal; to standard output by default."""
    show(_page(validation), PLAIN_WIDTH, file)


def _page(validation: Validation) -> RenderableType:
    parts: list[RenderableType] = [facts_table(validation.about.items())]
    for part, outcomes in groupby(validation.outcomes, key=lambda outcome: outcome.part):
        parts.append(Padding(_table(part, list(outcomes)), (1, 0, 0, 0)))
    parts.append(Padding(_closing(validation), (1, 0, 0, 0)))
    return Group(*parts)


def _table(part: str, outcomes: list[Outcome]) -> RenderableType:
    table = ruled_table()
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
