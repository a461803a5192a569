"""How pages for terminals look, and how they are printed.  Importing it imports rich."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import IO

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

# A rule below the header and nothing else, in ASCII: it survives any terminal, log file and code page.
RULE = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def render(page: RenderableType, width: int) -> str:
    """A page as plain text without colour; lines end without blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(page)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def show(page: RenderableType, width: int, file: IO[str] | None = None) -> None:
    """Print a page, coloured and as wide as it gets where the file is a terminal; to standard output by default."""
    console = Console(file=file, highlight=False)
    if console.is_terminal:
        console.print(page)
    else:
        console.file.write(render(page, width) + "\n")


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Names, and beside each what is to be said of it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in facts:
        table.add_row(Text(name), Text(text))
    return table


def ruled_table(gap: int = 1) -> Table:
    """A table with a rule below its header, columns ``gap`` and one blank apart."""
    return Table(
        box=RULE, padding=(0, gap, 0, 0), show_edge=False, pad_edge=False, header_style="bold", border_style="dim"
    )
