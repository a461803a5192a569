"""`python -m bench NAME [--quick] [--json]`, and `python -m bench --list`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.contract import Bench, BenchError, Result, Row, carry_out, load_benches


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; returns the exit status: 2 where a benchmark cannot be run here."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure what this project claims.")
    parser.add_argument("name", nargs="?", help="the benchmark to run")
    parser.add_argument("--list", action="store_true", help="name all benchmarks, each with its claim")
    parser.add_argument("--quick", action="store_true", help="a smaller case that ends within a minute")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object in the last line")
    asked = parser.parse_args(arguments)
    benches = load_benches()
    if asked.list:
        for name in sorted(benches):
            print(f"{name}: {benches[name].claim}")
        return 0
    if asked.name not in benches:
        parser.error(f"name one of the benchmarks: {', '.join(sorted(benches))}")
    try:
        result = carry_out(benches[asked.name], quick=asked.quick, say=_say)
    except BenchError as error:
        print(f"{asked.name}: {error}", file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    else:
        _show(result, benches[asked.name])
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(result: Result, bench: Bench) -> None:
    console = Console(width=max(100, Console().width), highlight=False)
    console.print(f"{result.bench}: {result.claim}\n{result.command}\n{result.machine}", soft_wrap=True)
    console.print(_table_of_figures(result, bench))
    for _, rows in groupby(result.rows, key=tuple):  # rows with the same columns
        console.print(_table_of_rows(list(rows)))


def _table_of_figures(result: Result, bench: Bench) -> Table:
    table = Table("figure", "value", "bar", "")
    for name, value in result.figures.items():
        bar = bench.bars.get(name)
        verdict = "" if bar is None else "cleared" if bar.cleared(value) else "missed"
        table.add_row(name, _text(value), "" if bar is None else str(bar), verdict)
    return table


def _table_of_rows(rows: Sequence[Row]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_text(row.get(column, "")) for column in columns))
    return table


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _stop(number: int, frame: object) -> None:
    # An ordinary exit, so that temporary files are deleted.
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
