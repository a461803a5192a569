"""Frames that alternate a step on the card and a stage on the host: how near to the longest of them alone?"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from bench.contract import SCRATCH, Bar, BenchError, Findings, Row, Timing, Workplace, in_turn, register, seconds_of

CLAIM: Final = (
    "A loop whose frames go to the host for a stage in every round takes hardly longer than the longest of computing, "
    "stage and copies alone, and 2.2 times less than one after the other where these three are alike (modelled); with "
    "a real stage on two cores it is 1.7 times faster."
)
BARS: Final = {
    "vs_sync": Bar(at_least=2.2),
    "gap_max": Bar(at_most=1.08),
    "vs_sync_wall": Bar(at_least=1.7),
}
CARD: Final = "rtx4070-laptop"
WINDOWS: Final = (1, 2, 4, 16, 128)
DEFAULT_WINDOW: Final = 4
NUM_FRAMES: Final = 128
ROWS, COLUMNS = 864, 2048
"""A frame: 576 x 1024 pixels of three 16-bit values."""
SIDE: Final = 512
"""Rows and columns of a frame where time is real."""
TRIED_PASSES: Final = 8
MARK: Final = "row: "
PICTURE: Final = SCRATCH / "latents.png"


class Mix(NamedTuple):
    """Shares of the sequential time of a turn: of the step, of the stage, and of both copies."""

    compute: float
    host: float
    copies: float
    varied: bool = False
    """Whether a stage takes anything from nothing to twice its time."""

    def __str__(self) -> str:
        return f"{self.compute:.2f}/{self.host:.2f}/{self.copies:.2f}" + (" varied" if self.varied else "")


THIRDS: Final = Mix(1 / 3, 1 / 3, 1 / 3)
MIXES: Final = (
    THIRDS,
    Mix(0.25, 0.25, 0.5),
    Mix(0.4, 0.4, 0.2),
    Mix(0.6, 0.2, 0.2),
    Mix(0.2, 0.6, 0.2),
    Mix(0.2, 0.2, 0.6),
    Mix(0.45, 0.1, 0.45),
    Mix(0.1, 0.45, 0.45),
    Mix(0.8, 0.1, 0.1),
    Mix(0.1, 0.8, 0.1),
    Mix(0.1, 0.1, 0.8),
)
VARIED: Final = THIRDS._replace(varied=True)


@register("latents", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Modelled times in a process that installs the emulated device; wall times in another one."""
    modelled = list(_in_process("modelled", quick=place.quick))
    place.say("modelled loops done")
    wall = list(_in_process("wall", quick=place.quick))
    if picture := draw(modelled):
        place.say(f"the sweep over windows is drawn in {picture}")
    chosen = [row for row in modelled if row["window"] == DEFAULT_WINDOW]
    figures = {
        "vs_sync": next(row["vs_sync"] for row in chosen if row["mix"] == str(THIRDS)),
        "gap_max": max(row["gap"] for row in chosen if row["mix"] != str(VARIED)),
        "vs_sync_wall": next(row["vs_sync"] for row in wall if row["contender"] == "LatentLoop"),
        "vs_sync_bare": next(row["vs_sync"] for row in wall if row["contender"] == "bare threads"),
    }
    return Findings(figures, [*modelled, *wall])


def _in_process(kind: str, *, quick: bool) -> Iterator[Row]:
    command = [sys.executable, "-m", "bench.latents", kind, str(int(quick))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        raise BenchError(f"the process for {kind} times ended with {done.returncode}: see what it printed above")
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))


# Modelled


def modelled_rows(*, quick: bool) -> Iterator[Row]:
    """Each mix with each window, beside the loop one after the other; virtual time."""
    from fmstream import LatentLoop

    rounds = 2 if quick else 4
    for mix in (VARIED, *(MIXES[:7] if quick else MIXES)):
        case = Case(mix)
        sequential, _ = case.measure(rounds, case.one_after_the_other)
        for window in WINDOWS:
            with LatentLoop(case.step, case.stage, window) as loop:
                loop.run(case.frames())  # pins its memory, which costs once what many turns take
                seconds, busy = case.measure(rounds, loop.run)
            yield {
                "kind": "modelled",
                "mix": str(mix),
                "window": window,
                "turn_ms": seconds * 1e3,
                "sync_turn_ms": sequential * 1e3,
                "longest_ms": max(busy.values()) * 1e3,
                "vs_sync": sequential / seconds,
                "limit": sequential / max(busy.values()),
                "gap": seconds / max(busy.values()),
            }


class Case:
    """Frames, a step and a stage whose modelled times have the shares of a mix."""

    def __init__(self, mix: Mix) -> None:
        import torch

        from fmstream import emulator
        from fmstream.emulator.cost import copy_seconds

        self.machine = emulator.reset(CARD, execution="dry", capacity=7 << 30, keep_timeline=False)
        card = self.machine.card
        num_bytes = 2 * ROWS * COLUMNS
        copies = sum(copy_seconds(card, lane, num_bytes, pinned=True) for lane in ("copy in", "copy out"))
        turn = (copies + 2 * card.copy_seen_seconds) / mix.copies
        self.host_seconds = turn * mix.host
        inner = round(turn * mix.compute * card.gemm_flops / (4 * ROWS * COLUMNS))
        self.first = torch.empty(COLUMNS, inner, dtype=torch.bfloat16, device="emu")
        self.second = torch.empty(inner, COLUMNS, dtype=torch.bfloat16, device="emu")
        self.lane = self.machine.lane("host")
        self.random = random.Random(0) if mix.varied else None

    def frames(self) -> list[Any]:
        """What the first round is given."""
        import torch

        return [torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="emu") for _ in range(NUM_FRAMES)]

    def step(self, frame: Any) -> Any:
        """Two matrix products."""
        return frame @ self.first @ self.second

    def stage(self, frame: Any) -> Any:
        """Takes its time on a lane of the host."""
        factor = 1.0 if self.random is None else self.random.uniform(0, 2)
        _, end = self.lane.occupy(self.host_seconds * factor, "host stage")
        self.machine.join_clock(end)
        return frame

    def one_after_the_other(self, frames: list[Any], rounds: int) -> None:
        """The loop that waits for each copy and each stage, through pinned memory."""
        import torch

        pinned = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16).pin_memory()
        for _ in range(rounds):
            for index, frame in enumerate(frames):
                made = self.step(frame)
                pinned.copy_(made, non_blocking=True)
                torch.get_device_module("emu").synchronize()
                made.copy_(self.stage(pinned), non_blocking=True)
                frames[index] = made
                torch.get_device_module("emu").synchronize()

    def measure(self, rounds: int, work: Callable[[list[Any], int], object]) -> tuple[float, dict[str, float]]:
        """Virtual seconds of a turn, and for how much of them each lane was busy."""
        import torch

        frames = self.frames()
        if self.random is not None:
            self.random.seed(0)
        torch.get_device_module("emu").synchronize()
        self.machine.reset_statistics()
        with torch.no_grad():
            work(frames, rounds)
        torch.get_device_module("emu").synchronize()
        found = self.machine.statistics()
        turns = NUM_FRAMES * rounds
        return found.seconds / turns, {lane: busy / turns for lane, busy in found.busy.items()}


def draw(rows: Sequence[Row]) -> str | None:
    """Draw the sweep over windows; None where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, mix in enumerate(dict.fromkeys(row["mix"] for row in rows)):
        of_mix = [row for row in rows if row["mix"] == mix]
        windows, speedups = [row["window"] for row in of_mix], [row["vs_sync"] for row in of_mix]
        style: dict[str, Any] = {"color": f"C{number % 10}", "markersize": 4}
        axes.plot(windows, speedups, "o--" if number >= 10 or mix == str(VARIED) else "o-", label=mix, **style)
        axes.plot(windows[-1] * 1.25, of_mix[-1]["limit"], marker="<", **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(WINDOWS, [str(window) for window in WINDOWS])
    axes.set_xlabel("window: frames under way at once")
    axes.set_ylabel("times faster than one after the other")
    axes.set_title("frames between card and host (modelled); arrows: the longest stage alone", fontsize=10)
    axes.grid(color="#dfe3e8", linewidth=0.6)
    figure.legend(loc="outside right center", title="step/stage/copies", fontsize=8, title_fontsize=8, frameon=False)
    figure.savefig(PICTURE, dpi=90)
    return str(PICTURE.relative_to(PICTURE.parents[1]))


# Wall clock


def wall_rows(*, quick: bool) -> Iterator[Row]:
    """A step of one torch thread and a compiled stage that take alike long, on the CPU.

    Beside them both at once in bare threads, neither waiting for the other: what this machine has to give.
    """
    import torch

    from fmstream import LatentLoop

    num_frames, rounds = (24, 7) if quick else (32, 11)
    weight = torch.randn(SIDE, SIDE) / SIDE**0.5
    frames = [torch.rand(SIDE, SIDE) for _ in range(num_frames)]
    sharpen = compile_sharpening()

    def step(frame: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            frame = torch.tanh(frame @ weight)
        return frame

    passes = _alike(lambda: step(frames[0]), lambda: sharpen(frames[0].numpy(), TRIED_PASSES))

    def stage(frame: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(sharpen(frame.numpy(), passes))

    def steps() -> list[torch.Tensor]:
        return [step(frame) for frame in frames]

    def stages() -> list[torch.Tensor]:
        return [stage(frame) for frame in frames]

    def one_after_the_other() -> list[torch.Tensor]:
        return [stage(step(frame)) for frame in frames]

    def both_at_once() -> None:
        thread = threading.Thread(target=stages)
        thread.start()
        steps()
        thread.join()

    loop = LatentLoop(step, stage, DEFAULT_WINDOW)
    assert all(map(torch.equal, loop.run(frames), one_after_the_other())), "the loop gave other frames"
    contenders: dict[str, Callable[[], object]] = {
        "steps alone": steps,
        "stages alone": stages,
        "one after the other": one_after_the_other,
        "LatentLoop": lambda: loop.run(frames),
        "bare threads": both_at_once,
    }
    times = in_turn({name: partial(_seconds, work) for name, work in contenders.items()}, rounds)
    yield from _wall_table(times, num_frames)


def _seconds(work: Callable[[], object]) -> list[float]:
    return [seconds_of(work)]


def _alike(step: Callable[[], object], stage: Callable[[], object]) -> int:
    """How many passes of a stage, of which `TRIED_PASSES` are tried, take as long as a step."""
    step_seconds, stage_seconds = (min(seconds_of(work) for _ in range(15)) for work in (step, stage))
    return max(1, round(TRIED_PASSES * step_seconds / stage_seconds))


def _wall_table(times: dict[str, Timing], num_frames: int) -> Iterator[Row]:
    sequential = times["one after the other"].median
    for name, timing in times.items():
        more = {"frame_ms": timing.median / num_frames * 1e3, "vs_sync": sequential / timing.median}
        yield {"kind": "wall", **timing.row(name), **more}


def compile_sharpening() -> Callable[[np.ndarray, int], np.ndarray]:
    """Sharpening where there are edges, as often as asked; it does not hold the interpreter's lock."""
    import numba

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def sharpen(frame: np.ndarray, passes: int) -> np.ndarray:
        source, target = frame.copy(), frame.copy()
        for _ in range(passes):
            for y in range(1, frame.shape[0] - 1):
                for x in range(1, frame.shape[1] - 1):
                    across = source[y, x + 1] - source[y, x - 1]
                    down = source[y + 1, x] - source[y - 1, x]
                    edge = across * across + down * down
                    around = source[y - 1, x] + source[y + 1, x] + source[y, x - 1] + source[y, x + 1]
                    target[y, x] = source[y, x] + edge / (1 + edge) * (source[y, x] - 0.25 * around)
            source, target = target, source
        return source

    sharpen(np.zeros((4, 4), np.float32), 1)
    return sharpen  # type: ignore[no-any-return]


def main(arguments: Sequence[str]) -> int:
    """Print the rows of one kind, each a line of JSON."""
    import torch

    torch.set_num_threads(1)
    kind, quick = arguments
    if kind == "modelled":
        from fmstream import emulator

        emulator.install()
    rows = (modelled_rows if kind == "modelled" else wall_rows)(quick=quick == "1")
    for row in rows:
        print(MARK + json.dumps(row, allow_nan=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
