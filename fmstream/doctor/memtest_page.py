"""``fmstream memtest`` for terminals: progress while it runs, and what was found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fmstream.doctor.memtest import MemtestResult, Seen, Show, run_memtest

MEANING = {
    "cell": "few addresses, a bit or two in each: cells that hold the wrong value",
    "data line": "the same bits in many words: lines between the processor and its memory",
    "address line": "words of other addresses come back: lines that carry addresses",
    "unclear": "no pattern that one kind of fault would leave",
}


def run_command(
    device: str | None,
    size: str | None,
    patterns: str | None,
    rounds: int | None,
    seed: int | None,
    time_limit: float | None,
    as_json: bool,
) -> int:
    """Run the test, print what it found, and return the exit status: 1 with errors, 130 if interrupted without one."""
    chosen = {} if patterns is None else {"patterns": [name.strip() for name in patterns.split(",") if name.strip()]}
    repeated = {} if rounds is None else {"rounds": rounds}
    with _progress() as show:
        result = run_memtest(device, size=size, seed=seed, time_limit=time_limit, show=show, **chosen, **repeated)  # type: ignore[arg-type]
    print(result.to_json() if as_json else render(result))
    return result.status


@contextmanager
def _progress() -> Iterator[Show | None]:
    """Shows progress on the terminal, if standard error is one."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("memory test", total=None)

        def show(seen: Seen) -> None:
            found = f"{seen.num_errors} errors" if seen.num_errors else "no error"
            progress.update(
                task,
                description=f"{seen.pattern}, round {seen.round_number}: {found}",
                completed=seen.done_words,
                total=seen.total_words,
            )

        yield show


def render(result: MemtestResult) -> str:
    """What was tested and found, as text."""
    return "\n".join([*_head(result), "", *_verdict(result)])


def _head(result: MemtestResult) -> Iterator[str]:
    yield f"device    {result.device}, {result.device_name}"
    cache = ""
    if result.is_beyond_cache is False:
        cache = f"; its cache of {_size(result.cache_bytes or 0)} may have answered: test more"
    yield f"tested    {_size(result.tested_bytes)}{cache}"
    yield f"patterns  {', '.join(result.patterns)}; rounds {result.rounds}; seed {result.seed}"
    rate = (result.written_bytes + result.checked_bytes) / max(result.seconds, 1e-9) / 1e9
    ended = "" if result.ended == "complete" else f"; ended early ({result.ended}), {result.done:.0%} done"
    yield f"took      {result.seconds:.1f} s, {rate:.1f} GB/s{ended}"


def _verdict(result: MemtestResult) -> Iterator[str]:
    found = result.findings
    if not found.num_errors:
        yield "no error" if result.ended == "complete" else "no error in what was done"
        return
    yield f"{found.num_errors} errors: a fault on the memory path (memory, its controller, power or board)"
    kind = result.kind
    if kind is not None:
        yield f"looks like: {kind} ({MEANING[kind]})"
    yield "by pattern: " + ", ".join(f"{name} {count}" for name, count in found.by_pattern.items())
    yield "bits flipped: " + _histogram(found.bits, "bit")
    yield "flipped in one word: " + _histogram(found.flips, "bits")
    reads = found.second_reads
    yield (
        f"second reads: {reads['expected']} right (a transfer went wrong), {reads['same']} wrong alike (what is "
        f"stored), {reads['other']} wrong otherwise"
    )
    yield ""
    yield "  address             expected    read        second read  pattern"
    for fault in found.faults:
        yield (
            f"  0x{fault.address:016x}  0x{fault.expected:08x}  0x{fault.actual:08x}  0x{fault.second:08x}   "
            f"{fault.pattern}"
        )
    yield ""
    yield f"again with: --seed {result.seed} --rounds {result.rounds} --patterns {','.join(result.patterns)}"


def _histogram(counts: np.ndarray, unit: str) -> str:
    """The places with the largest counts."""
    largest = [int(at) for at in np.argsort(-counts, kind="stable")[:6] if counts[at]]
    more = int((counts > 0).sum()) - len(largest)
    shown = ", ".join(f"{unit} {at}: {counts[at]}" if unit == "bit" else f"{at} {unit}: {counts[at]}" for at in largest)
    return shown + (f", and {more} more" if more > 0 else "")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
