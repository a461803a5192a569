"""Other packages that stream weights, unmodified, on the emulated card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

FAMILIES: Final = (
    "accelerate_offload",
    "diffusers_group",
    "cache_dit_layers",
    "block_streamer",
    "mmgp_budgets",
    "dynamic_offloader",
    "layer_prefetch",
)
"""Modules of `bench.peers.adapters`: one package each."""
TIMEOUT_SECONDS: Final = 300
"""For one package's rows, in wall time; they take some 20."""
MARK: Final = "row: "
"""Before each row on its process's output, for packages print lines of their own."""

_ROOT: Final = Path(__file__).resolve().parents[2]


def rows(
    c_over_s: float, table: str, *, execution: str | int = "eager", families: Sequence[str] = FAMILIES
) -> list[dict[str, Any]]:
    """What each peer's steady step costs where computing takes ``c_over_s`` times as long as streaming all weights.

    ``table`` is a key of `bench.peers.ground.TABLES`; ``execution`` as `fmstream.emulator.reset` takes it. A row has
    the keys that `bench.peers.measure.measure` names; a peer that cannot run has ``skipped``: the reason. Each package
    runs in a process of its own, for it patches what it needs, and the same arguments give the same rows.
    """
    return [row for family in families for row in _family(family, c_over_s, table, execution)]


def _family(family: str, c_over_s: float, table: str, execution: str | int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.peers.one", family, str(c_over_s), table, str(execution)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    blank = {"c_over_s": c_over_s, "table": table, "peer": family, "version": "", "settings": ""}
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [{**blank, "skipped": f"it had not ended after {TIMEOUT_SECONDS} s"}]
    found = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        found.append({**blank, "skipped": f"its process ended with {done.returncode}: {last}"})
    return found
