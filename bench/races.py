"""Is every fence of the path to an accelerator needed, and is what stands in order never reported?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.contract import Bar, BenchError, Findings, Row, Workplace, register
from bench.weights_emulated import MARK

CLAIM: Final = (
    "The emulated accelerator's checker reports every fence that is taken away from the runtime, or from a loop that "
    "streams by hand, though the bytes happen to be right, and reports nothing where all stand."
)
BARS: Final = {"kinds": Bar(at_least=12), "missed": Bar(at_most=0), "false_reports": Bar(at_most=0)}
NUM_SEEDS: Final = 20
QUICK_SEEDS: Final = 3
PEER_POINT: Final = (0.5, "2us")


@register("races", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """In a process that installs the emulated device."""
    command = [sys.executable, "-m", "bench.races", str(int(place.quick))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        raise BenchError(f"the process ended with {done.returncode}: see what it printed above")
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    rows: list[Row] = [json.loads(line) for line in lines]
    broken = [row for row in rows if row["kind"] == "broken"]
    sound = [row for row in rows if row["kind"] != "broken"]
    figures = {
        "kinds": len(broken),
        "missed": sum(row["reports"] == 0 for row in broken),
        "false_reports": sum(row["reports"] for row in sound if "skipped" not in row),
        "peers": sum(row["kind"] == "peer" and "skipped" not in row for row in rows),
    }
    return Findings(figures, rows)


def broken_rows() -> Iterator[Row]:
    """Each fence taken away, in the order of execution that hides most."""
    from bench.breakers import BREAKERS
    from bench.scenarios import reports_of

    for breaker in BREAKERS:
        yield {
            "kind": "broken",
            "what": breaker.name,
            "order": "eager",
            "reports": len(reports_of(breaker.scenario, breaker.broken)),
        }


def sound_rows(num_seeds: int) -> Iterator[Row]:
    """All fences in place, in every order of execution."""
    from bench.scenarios import SCENARIOS, reports_of

    orders: list[Any] = ["eager", "late", *range(num_seeds)]
    for scenario in SCENARIOS:
        for order in orders:
            num_reports = len(reports_of(scenario, execution=order))
            yield {"kind": "sound", "what": scenario.__name__, "order": str(order), "reports": num_reports}


def peer_rows(*, quick: bool) -> Iterator[Row]:
    """Other packages on the same device."""
    from bench.peers import FAMILIES, rows

    for row in rows(*PEER_POINT, families=FAMILIES[1:2] if quick else FAMILIES):
        found: Row = {"kind": "peer", "what": f"{row['peer']} {row.get('settings', '')}".strip(), "order": "eager"}
        if "skipped" in row:
            yield {**found, "reports": 0, "skipped": row["skipped"]}
        else:
            yield {**found, "reports": row["races"]}


def main(arguments: Sequence[str]) -> int:
    """Print the rows, each a line of JSON."""
    from fmstream import emulator

    emulator.install()
    import torch

    torch.set_num_threads(1)
    quick = arguments[0] == "1"
    for rows in (broken_rows(), sound_rows(QUICK_SEEDS if quick else NUM_SEEDS), peer_rows(quick=quick)):
        for row in rows:
            print(MARK + json.dumps(row, allow_nan=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
