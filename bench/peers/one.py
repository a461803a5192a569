"""`python -m bench.peers.one FAMILY C_OVER_S TABLE [EXECUTION]`: one package's rows, each a line of JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from bench.peers import MARK
from bench.peers.contract import Peer, Row

if TYPE_CHECKING:
    from fmstream.emulator.backlog import Execution


def main(arguments: Sequence[str]) -> int:
    """Measure a family; returns the exit status."""
    family, ratio, table, *rest = arguments
    word = rest[0] if rest else "eager"
    execution = int(word) if word.isdigit() else cast("Execution", word)  # the machine refuses what is not one
    for row in family_rows(family, float(ratio), table, execution):
        print(MARK + json.dumps(row, allow_nan=False), flush=True)
    return 0


def family_rows(family: str, c_over_s: float, table: str, execution: Execution) -> Iterator[Row]:
    """Rows of the peers of ``bench.peers.adapters.<family>``; installs the emulated device in this process."""
    # Before any other import that might ask torch which devices there are.
    from fmstream import emulator

    emulator.install()
    import torch

    from bench.peers.ground import make_ground
    from bench.peers.measure import measure

    torch.set_num_threads(1)  # small operators; and sums are the same on any machine
    peers: list[Peer] = importlib.import_module(f"bench.peers.adapters.{family}").PEERS
    ground = make_ground(c_over_s, table)
    for peer in peers:
        yield {"c_over_s": c_over_s, "table": table, **measure(peer, ground, execution)}


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Packages leave threads and exit handlers that would ask for a device that is gone.
    sys.stdout.flush()
    os._exit(status)
