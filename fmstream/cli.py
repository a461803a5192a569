"""The ``fmstream`` command.  Imports neither torch nor, before something is printed with it, rich."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence

from fmstream.errors import FmstreamError

EXAMPLES = """\
examples:
  fmstream report report.json              show what bounded a run, and what would help
  fmstream report report.json --json       the same as JSON, for other programs
  fmstream report report.json --png r.png  draw its steps, bounds and link times
  fmstream policies                        list the policies that policy= accepts

A report is what result.report.save("report.json") writes after fmstream.run(...).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for an input that cannot be used."""
    parser = _make_parser()
    options = parser.parse_args(argv)
    if options.version:
        return _version()
    if options.command is None:
        parser.print_help()
        return 0
    try:
        status: int = options.handler(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough; keep the interpreter from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except FmstreamError as error:
        print(f"fmstream: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fmstream: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return status


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fmstream",
        description="Run PyTorch models that are larger than memory at the speed of the slower of compute and link.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    report = commands.add_parser("report", help="show a saved report", description="Show a saved report.")
    report.add_argument("file", metavar="FILE", help="what Report.save wrote")
    report.add_argument("--json", action="store_true", help="print JSON instead of a table")
    report.add_argument("--png", metavar="OUT", help="also draw it into this PNG file")
    report.set_defaults(handler=_report)

    policies = commands.add_parser("policies", help="list the policies", description="List the policies.")
    policies.set_defaults(handler=_policies)
    return parser


def _version() -> int:
    from fmstream.report.report import DISTRIBUTION, installed_version

    print(f"fmstream {installed_version(DISTRIBUTION)}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from fmstream.report.report import Report

    report = Report.load(options.file)
    if options.png is not None:
        from fmstream.report.plot import save_report_png

        save_report_png(report, options.png)
    if options.json:
        print(report.to_json())
    else:
        from fmstream.report.terminal import print_report

        print_report(report)
    return 0


def _policies(options: argparse.Namespace) -> int:
    from fmstream.policies import get, names

    listed = names()
    width = max(map(len, listed), default=0)
    for name in listed:
        print(f"{name:{width}}  {_first_line(get(name))}")
    return 0


def _first_line(policy: object) -> str:
    text = inspect.getdoc(policy) or ""
    return text.strip().partition("\n")[0]
