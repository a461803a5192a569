"""The checkup for terminals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import IO, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from fmstream.doctor.verdict import Checkup, Finding, Verdict
from fmstream.report.layout import facts_table, render, ruled_table, show

STYLES: Final = {
    Verdict.FAIL: "bold red",
    Verdict.WARN: "yellow",
    Verdict.UNKNOWN: "magenta",
    Verdict.INFO: "cyan",
    Verdict.OK: "green",
}
PLAIN_WIDTH: Final = 100


def render_checkup(checkup: Checkup, *, width: int = PLAIN_WIDTH) -> str:
    """The checkup as plain text without colour; lines end without blanks."""
    return render(_page(checkup), width)


def print_checkup(checkup: Checkup, file: IO[str] | None = None) -> None:
    """Print the checkup, coloured where the file is a terminal; to standard output by default."""
    show(_page(checkup), PLAIN_WIDTH, file)


def _page(checkup: Checkup) -> RenderableType:
    told = [finding for finding in checkup.findings if finding.result.applies]
    parts: list[RenderableType] = [facts_table(checkup.about.items()), Padding(_table(told), (1, 0, 0, 0))]
    left_out = _left_out(checkup)
    if left_out:
        parts.append(Padding(Text(left_out), (1, 0, 0, 0)))
    parts.append(Padding(_closing(checkup), (1, 0, 0, 0)))
    return Group(*parts)


def _table(findings: list[Finding]) -> RenderableType:
    several = len({finding.subject for finding in findings if finding.subject != "machine"}) > 1
    table = ruled_table()
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what was read", ratio=1, overflow="fold")
    for finding in findings:
        check = finding.check if not several or finding.subject == "machine" else f"{finding.check}, {finding.subject}"
        verdict = Text(str(finding.verdict), style=STYLES[finding.verdict])
        table.add_row(str(finding.number), Text(check), verdict, _told(finding))
    return table


def _told(finding: Finding) -> Text:
    """What was read; for a verdict that asks for something also the limit and the next step, each on its own line."""
    result = finding.result
    text = Text(result.read)
    if result.limit:
        text.append(
            f"\nlimit: {result.limit}" if finding.verdict in (Verdict.WARN, Verdict.FAIL) else f"; {result.limit}"
        )
    if result.advice:
        text.append("\n-> ", style="bold").append(result.advice)
    return text


def _left_out(checkup: Checkup) -> str:
    reasons = Counter(finding.result.read for finding in checkup.findings if not finding.result.applies)
    if not reasons:
        return ""
    told = "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
    return f"checks left out: {told}"


def _closing(checkup: Checkup) -> Text:
    text = Text()
    for piece in _counted(checkup):
        text.append_text(piece)
    return text


def _counted(checkup: Checkup) -> Iterator[Text]:
    first = True
    for verdict, count in checkup.counts.items():
        if count:
            yield Text("" if first else ", ")
            yield Text(f"{count} {verdict}", style=STYLES[verdict])
            first = False
