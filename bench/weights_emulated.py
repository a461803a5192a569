"""Streaming 40 blocks to an emulated card: how near to the bound, and beside other packages (modelled)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench.contract import Bar, BenchError, Findings, Row, Workplace, register

CLAIM: Final = (
    "In a model of link and card, a step takes hardly longer than the slower of computing and of bringing what the "
    "memory does not hold, at settings that the planner finds itself, and no package is faster with the same memory."
)
BARS: Final = {
    "gap_max": Bar(at_most=1.12),
    "gap_mean": Bar(at_most=1.03),
    "gap_mean_perturbed": Bar(at_most=1.06),
    "slower_than_a_peer": Bar(at_most=0),
}
RATIOS: Final = (0.5, 1.0, 2.0)
"""Seconds of computing for each second of link that all weights take."""
SHARES: Final = (0.1, 0.25, 0.5, 0.75)
"""Memory as a share of the weights."""
SPREAD: Final = 0.15
"""Share by which costs are off where the planner is misled."""
MARK: Final = "row: "
_ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a card and a memory.  ``seed`` misleads the planner where it is not None."""

    table: str
    ratio: float
    share: float
    uneven: bool = False
    seed: int | None = None


def cases(*, quick: bool) -> list[Case]:
    """All combinations; fewer where it must be quick: the hardest, and some of each kind."""
    even = [Case(table, ratio, share) for table in ("2us", "0.2us") for ratio in RATIOS for share in SHARES]
    uneven = [Case("2us", ratio, share, uneven=True) for ratio in RATIOS for share in SHARES]
    if quick:
        even = [Case("2us", ratio, share) for ratio, share in ((0.5, 0.5), (1.0, 0.25), (2.0, 0.1))]
        even += [Case("0.2us", 1.0, 0.5), Case("0.2us", 2.0, 0.25)]
        uneven = [Case("2us", 0.5, 0.25, uneven=True)]
    misled = [replace(case, seed=number) for number, case in enumerate([*even, *uneven])]
    return [*even, *uneven, *(misled[::3] if quick else misled)]


@register("weights_emulated", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Each kind of work in a process of its own: one that installs the emulated device."""
    quick = str(int(place.quick))
    with ThreadPoolExecutor() as pool:  # time is virtual: they do not disturb each other
        rows, peers = pool.map(lambda kind: list(_in_process(kind, quick)), ("gaps", "peers"))
    plain = [row for row in rows if row["seed"] is None]
    gaps = [row["gap"] for row in plain if not row["uneven"]]
    figures = {
        "gap_max": max(gaps),
        "gap_mean": mean(gaps),
        "gap_mean_perturbed": mean(row["gap"] for row in rows if row["seed"] is not None),
        "gap_mean_uneven": mean(row["gap"] for row in plain if row["uneven"]),
        "slower_than_a_peer": sum(row.get("ours_over_peer", 0.0) > 1.0 for row in peers),
        "peers_compared": sum("ours_over_peer" in row for row in peers),
    }
    return Findings(figures, [*rows, *peers])


def _in_process(kind: str, quick: str) -> Iterator[Row]:
    """Rows that a process prints."""
    command = [sys.executable, "-m", "bench.weights_emulated", kind, quick]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the process for {kind} ended with {done.returncode}: see what it printed above")
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))


def gap_rows(*, quick: bool) -> Iterator[Row]:
    """This runtime in each case; times are milliseconds of virtual time, memory is in shares of W."""
    from bench.peers.ground import Ground, calibrate, make_ground
    from bench.streamed import misled, streamed_step

    grounds: dict[tuple[str, float, bool], Ground] = {}
    for case in cases(quick=quick):
        key = (case.table, case.ratio, case.uneven)
        if key not in grounds:
            ground = make_ground(case.ratio, case.table)
            if case.uneven:
                ground = _uneven(ground)
                ground = replace(ground, card=calibrate(ground, case.ratio * ground.stream_seconds))
            grounds[key] = ground
        ground = grounds[key]
        memory = int(case.share * ground.weights_bytes)
        with misled(0.0 if case.seed is None else SPREAD, case.seed or 0):
            step = streamed_step(ground.card, ground.net, _call(ground), memory=memory)
        _check(ground, step.output)
        bound = max(case.ratio, 1 - case.share) * ground.stream_seconds
        yield {
            "contender": "overlap_async",
            "table": case.table,
            "c_over_s": case.ratio,
            "memory_over_w": case.share,
            "uneven": case.uneven,
            "seed": case.seed,
            "step_ms": step.seconds * 1e3,
            "bound_ms": bound * 1e3,
            "gap": step.seconds / bound,
            "h2d_over_w": step.bytes_in / ground.weights_bytes,
        }


def _call(ground: Any) -> Callable[[Any], Any]:
    """A step: the input goes to the card, the output comes back."""
    return lambda model: model(ground.x.to("emu")).cpu()


def _check(ground: Any, output: Any) -> None:
    import torch

    assert torch.allclose(output, ground.expected, rtol=1e-5, atol=1e-5), "a streamed step gave another result"


def _uneven(ground: Any) -> Any:
    import torch

    from bench import uneven
    from bench.peers.model import Shape

    net = uneven.build(Shape())
    with torch.no_grad():
        expected = net(ground.x)
    num_bytes = sum(p.numel() * p.element_size() for p in net.blocks.parameters())
    return replace(ground, net=net, expected=expected, weights_bytes=num_bytes)


def peer_rows(*, quick: bool) -> Iterator[Row]:
    """Each peer's rows, and this runtime beside them with no more reserved memory than the peer took.

    Nobody's host time is charged here, for the peers' is not known.
    """
    from bench.peers import FAMILIES, rows
    from bench.peers.ground import make_ground

    points = [(ratio, table) for table in ("2us", "0.2us") for ratio in RATIOS]
    for ratio, table in [(0.5, "2us")] if quick else points:
        ground = make_ground(ratio, table)
        for row in rows(ratio, table, families=FAMILIES[1:2] if quick else FAMILIES):
            if "skipped" not in row and not (quick and "use_stream=False" in row["settings"]):
                row |= _beside(ground, row)
            yield row


def _beside(ground: Any, row: Row) -> Row:
    """This runtime on a card with as much memory as the peer reserved."""
    import torch

    import fmstream
    from bench.streamed import streamed_step
    from fmstream.errors import MemoryBudgetError

    capacity = row["reserved_bytes"]
    least = fmstream.smallest_memory(ground.net)
    memory = max(least, capacity - _activation_bytes(ground))
    while memory >= least:
        try:
            step = streamed_step(
                ground.card, ground.net, _call(ground), memory=memory, capacity=capacity, charged=False
            )
        except torch.OutOfMemoryError:
            memory -= 2 * ground.card.segment_bytes
            continue
        except MemoryBudgetError as error:
            if "has no room" not in str(error):
                return {"beside": str(error)}
            memory -= 2 * ground.card.segment_bytes
            continue
        _check(ground, step.output)
        return {
            "ours_ms": step.seconds * 1e3,
            "ours_over_peer": step.seconds * 1e3 / row["step_ms"],
            "ours_reserved_bytes": step.reserved_bytes,
        }
    return {"beside": f"{capacity} bytes hold no layer beside the activations"}


def _activation_bytes(ground: Any) -> int:
    """What the allocator takes beside the weights."""
    from bench.streamed import resident_step

    step = resident_step(ground.card, ground.net, _call(ground))
    weights = sum(p.numel() * p.element_size() for p in ground.net.parameters())
    return max(0, step.allocated_bytes - weights)


def main(arguments: Sequence[str]) -> int:
    """Print the rows of one kind, each a line of JSON."""
    from fmstream import emulator

    emulator.install()
    import torch

    torch.set_num_threads(1)  # small operators; and sums are the same on any machine
    kind, quick = arguments
    for row in (gap_rows if kind == "gaps" else peer_rows)(quick=quick == "1"):
        print(MARK + json.dumps(row, allow_nan=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
