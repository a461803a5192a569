"""The ``fmstream`` command.  Imports neither torch nor, before something is printed with it, rich."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fmstream.errors import ConfigError, FmstreamError

if TYPE_CHECKING:
    from fmstream.report import Report

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  fmstream run --memory 6GiB generate.py   run a script; its models stream, it stays as it is
  fmstream report report.json              show what bounded a run, and what would help
  fmstream report report.json --json       the same as JSON, for other programs
  fmstream report report.json --png r.png  draw its steps, bounds and link times
  fmstream plan svd --gpu rtx4070-laptop   what streaming would give; needs neither model nor card
  fmstream doctor --path MODEL             look at link, card, memory and builds; say what to do
  fmstream memtest --size 2GiB             write patterns to memory and read them back
  fmstream bandwidth --save link.json      measure link, memory and disk; keep it for runs and plans
  fmstream validate                        stream and page small models here, and compare
  fmstream env                             versions and hardware, for a bug report
  fmstream policies                        list the policies that policy= accepts

A report is what fmstream run --report report.json writes, and result.report.save("report.json").
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 if a check failed, 2 for an input that cannot be used."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, passed_on = _split(given)
    parser = _make_parser()
    options = parser.parse_args(own, argparse.Namespace(arguments=passed_on))
    if options.version:
        return _version()
    if options.command is None:
        parser.print_help()
        return 0
    handler: Callable[[argparse.Namespace], int] = options.handler
    if handler is _run:
        return _run(options)  # what else the script raises is its own
    try:
        status = handler(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough; keep the interpreter from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except FmstreamError as error:
        print(f"fmstream: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        what = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        print(f"fmstream: {what}", file=sys.stderr)
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

    run = commands.add_parser(
        "run",
        help="run a script whose models stream",
        usage="fmstream run [options] SCRIPT [options] [--] [arguments of the script]",
        allow_abbrev=False,
        description="Run a Python script unchanged. Its diffusers pipelines, transformers models and other modules "
        "stream from their first call on, under one memory for all; the report is printed to stderr at the end.",
        epilog="Options may also stand right behind the script; the first argument that is none of them, or --, "
        "begins the script's own.",
    )
    _add_run_options(run)
    run.add_argument("script", metavar="SCRIPT", help="the script")
    run.set_defaults(handler=_run)

    report = commands.add_parser("report", help="show a saved report", description="Show a saved report.")
    report.add_argument("file", metavar="FILE", help="what Report.save wrote")
    report.add_argument("--json", action="store_true", help="print JSON instead of a table")
    report.add_argument("--png", metavar="OUT", help="also draw it into this PNG file")
    report.set_defaults(handler=_report)

    plan = commands.add_parser(
        "plan",
        help="what streaming would give for a model on a card",
        description="Run one step of a real-size model dry on an emulated card, and show what each policy would make "
        "of it with how much memory. Needs neither the card nor the weights; cards are estimates, not measured.",
    )
    _add_plan_options(plan)
    plan.set_defaults(handler=_plan)

    _add_doctor(commands)
    _add_memtest(commands)
    _add_bandwidth(commands)
    _add_validate(commands)
    _add_env(commands)
    policies = commands.add_parser("policies", help="list the policies", description="List the policies.")
    policies.set_defaults(handler=_policies)
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", help="for weights: 6GiB, 512MB, 50%%, auto (the default), or none")
    parser.add_argument("--policy", help="one of those that fmstream policies lists")
    parser.add_argument("--device", help="where to compute, such as cpu")
    parser.add_argument("--calibration", metavar="FILE", help="what fmstream bandwidth --save wrote on this machine")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with these and all other options")
    parser.add_argument("--progress", action="store_true", default=None, help="show the progress on the terminal")
    parser.add_argument("--report", metavar="FILE", help="save the report there, as JSON")


def _add_doctor(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look for what slows or breaks runs on this machine",
        description="Examine driver, builds, link, card and memory. What cannot be read is UNKNOWN, not a failure; the "
        "exit status is 1 if anything failed. Changes no setting. Cards are put under load for some seconds.",
    )
    doctor.add_argument("--path", metavar="MODEL", help="the model that is to run: its file or folder")
    doctor.add_argument("--memory", metavar="SIZE", help="fast memory that it is to be given, such as 6GiB")
    doctor.add_argument("--pinned", metavar="SIZE", help="host memory that is to be pinned; all weights if left out")
    doctor.add_argument("--no-load", action="store_true", help="put no card under load: read, try out nothing")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of the table")
    doctor.set_defaults(handler=_doctor)


def _add_memtest(commands: _Commands) -> None:
    memtest = commands.add_parser(
        "memtest",
        help="write patterns to memory and read them back",
        description="Test the memory of a card or of the host. Errors are a fault somewhere on the memory path. The "
        "exit status is 1 with errors; Ctrl-C ends it with what it has found.",
    )
    memtest.add_argument("--device", metavar="DEVICE", help='"cpu", "cuda", "cuda:1"; the CUDA card where there is one')
    memtest.add_argument("--size", metavar="SIZE", help='such as 2GiB, or "80%%" of the free memory')
    memtest.add_argument("--patterns", metavar="NAMES", help="by name, with commas between; 4 if left out")
    memtest.add_argument("--rounds", type=int, metavar="N", help="how often to go through all patterns; 2 if left out")
    memtest.add_argument("--seed", type=int, metavar="N", help="of the random patterns; drawn if left out")
    memtest.add_argument("--time-limit", type=float, metavar="SECONDS", help="end then with what was found")
    memtest.add_argument("--json", action="store_true", help="print JSON instead of text")
    memtest.set_defaults(handler=_memtest)


def _add_env(commands: _Commands) -> None:
    env = commands.add_parser(
        "env",
        help="versions and hardware, for a bug report",
        description="Print versions and hardware, to paste into a bug report. Names no user, no host, no home folder.",
    )
    env.add_argument("--json", action="store_true", help="print JSON instead of lines")
    env.set_defaults(handler=_env)


def _add_bandwidth(commands: _Commands) -> None:
    bandwidth = commands.add_parser(
        "bandwidth",
        help="measure link, memory and disk by size of copy",
        description="Measure copies to and from a card, pinned, pageable and both ways at once, copies within the "
        "host's memory, and reads of a file. What is saved serves later runs (calibration=) and fmstream plan.",
    )
    bandwidth.add_argument("--device", metavar="DEVICE", help='"cpu", "cuda", "cuda:1"; the CUDA card if there is one')
    bandwidth.add_argument("--largest", metavar="SIZE", help="the largest copy, 512MiB if left out")
    bandwidth.add_argument("--path", metavar="FILE", help="also read this file, or the largest in this folder")
    bandwidth.add_argument("--save", metavar="FILE", help="save a calibration there, as JSON")
    bandwidth.add_argument("--png", metavar="OUT", help="draw it into this PNG file")
    bandwidth.add_argument("--json", action="store_true", help="print JSON instead of tables")
    bandwidth.set_defaults(handler=_bandwidth)


def _add_validate(commands: _Commands) -> None:
    validate = commands.add_parser(
        "validate",
        help="stream and page small models on the device at hand, and compare",
        description="End to end on the device at hand: weights that stream under every policy, and keys and values in "
        "pages, are compared bit by bit with what they give in memory. With --kv the pages that are chosen for a "
        "language model are held against those that matter. The exit status is 1 if anything failed.",
    )
    validate.add_argument(
        "--device", metavar="DEVICE", help='"cpu", "cuda", "cuda:1", or "emu", the emulated device; the card if any'
    )
    validate.add_argument(
        "--kv", metavar="MODEL", help="measure how well pages are chosen for it: a folder, or module:function"
    )
    validate.add_argument("--prompt", metavar="FILE", help="what that model reads; the Python reference if left out")
    validate.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    validate.set_defaults(handler=_validate)


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="wan2.1-i2v-14b, svd, flux or another example; a model's folder; module:function",
    )
    parser.add_argument("--gpu", required=True, help="the card, such as rtx4070-laptop, rtx4090 or h200")
    parser.add_argument(
        "--calibration", metavar="FILE", help="the card's link as fmstream bandwidth --save measured it"
    )
    parser.add_argument("--memory", help="play the runtime itself with so much for weights: 4GiB, 50%%, auto")
    parser.add_argument("--verify", action="store_true", help="play it with auto too, beside what is predicted")
    for name in ("frames", "height", "width", "batch"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="of the step; usual for the model if left out")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens that a language model has seen before")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the page")
    parser.add_argument("--out", metavar="FOLDER", help="save plan.json and the picture plan.png there")


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """What ``fmstream run`` reads itself, and the arguments of the script."""
    if given[:1] != ["run"]:
        return given, []
    options = argparse.ArgumentParser(add_help=False)
    _add_run_options(options)
    takes_value = {name: action.nargs != 0 for action in options._actions for name in action.option_strings}
    script_seen, at = False, 1
    while at < len(given):
        name, assigned, _ = given[at].partition("=")
        if name in takes_value:
            at += 2 if takes_value[name] and not assigned else 1
        elif script_seen:
            break
        else:
            script_seen = not name.startswith("-")
            at += 1
    behind = given[at:]
    return given[:at], behind[1:] if behind[:1] == ["--"] else behind


def _version() -> int:
    from fmstream.report.report import DISTRIBUTION, installed_version

    print(f"fmstream {installed_version(DISTRIBUTION)}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from fmstream.config import StreamConfig
    from fmstream.doors.script import find_script, run_script, streaming
    from fmstream.policies import get

    names = ("memory", "policy", "device", "calibration", "progress")
    chosen = {name: value for name in names if (value := getattr(options, name)) is not None}
    if chosen.get("memory") == "none":
        chosen["memory"] = None
    file: str | None = options.report
    try:
        config = StreamConfig.from_options(options.config, **chosen)
        get(config.policy)
        find_script(options.script)
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"--report {file}: there is no such folder: give a file in one that exists")
        with _reports_at_the_end(file) as reports, streaming(config, reports):
            run_script(options.script, options.arguments)
    except FmstreamError as error:
        print(f"fmstream: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _reports_at_the_end(file: str | None) -> Iterator[list[Report]]:
    """Print what was measured to stderr, also where the script failed, and save it."""
    from fmstream.report.terminal import print_report

    reports: list[Report] = []
    try:
        yield reports
        if not reports:
            print("fmstream: the script called no model", file=sys.stderr)
    finally:
        sys.stdout.flush()
        for number, report in enumerate(reports, start=1):
            print_report(report, sys.stderr)
            if file is not None:
                # Models that did not stream together have a report each.
                report.save(file if number == 1 else Path(file).with_stem(f"{Path(file).stem}-{number}"))


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


def _plan(options: argparse.Namespace) -> int:
    from fmstream.doors.inputs import Size
    from fmstream.doors.plan_command import make_page
    from fmstream.report.plan_page import render_plan

    size = Size(options.frames, options.height, options.width, options.batch, options.tokens)
    folder = None if options.out is None else Path(options.out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    drawn = folder is not None
    page = make_page(
        options.target,
        options.gpu,
        size,
        memory=options.memory,
        verify=options.verify,
        drawn=drawn,
        calibration=options.calibration,
    )
    if folder is not None:
        from fmstream.report.plan_plot import save_plan_png

        (folder / "plan.json").write_text(page.to_json() + "\n", encoding="utf-8")
        save_plan_png(page, folder / "plan.png")
    print(page.to_json() if options.json else render_plan(page))
    return 0


def _memtest(options: argparse.Namespace) -> int:
    from fmstream.doctor.memtest_page import run_command

    return run_command(
        options.device,
        options.size,
        options.patterns,
        options.rounds,
        options.seed,
        options.time_limit,
        options.json,
    )


def _bandwidth(options: argparse.Namespace) -> int:
    from fmstream.doctor.bandwidth_page import run_command

    return run_command(options.device, options.largest, options.path, options.save, options.png, as_json=options.json)


def _doctor(options: argparse.Namespace) -> int:
    from fmstream.doctor.command import run_doctor

    return run_doctor(
        path=options.path,
        memory=options.memory,
        pinned=options.pinned,
        loads=not options.no_load,
        as_json=options.json,
    )


def _validate(options: argparse.Namespace) -> int:
    from fmstream.validate.command import run_validate

    return run_validate(device=options.device, kv=options.kv, prompt=options.prompt, as_json=options.json)


def _env(options: argparse.Namespace) -> int:
    from fmstream.doctor.command import run_env

    return run_env(as_json=options.json)


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
