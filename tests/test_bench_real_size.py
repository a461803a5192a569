"""The benchmark of real-size models, with small ones."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from bench.contract import Findings
from bench.weights_real_size import BARS, Case, Model, floor_bytes, measure
from fmstream import emulator
from fmstream.core.trace import Call, Trace
from fmstream.doors.inputs import Size

BUSY = """
import torch
from torch import nn

def busy():
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(12)))
        return module, torch.empty(1 << 15, 1024, dtype=torch.bfloat16)
"""
FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "num_layers": 4,
    "num_single_layers": 8,
    "attention_head_dim": 64,
    "num_attention_heads": 8,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 256,
    "in_channels": 64,
    "axes_dims_rope": [16, 24, 24],
}


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Case, ...]:
    """One that compute bounds, and a small Flux that the link bounds beside diffusers' own offloading."""
    module = types.ModuleType("busy_model")
    exec(BUSY, module.__dict__)
    monkeypatch.setitem(sys.modules, "busy_model", module)
    (tmp_path / "config.json").write_text(json.dumps(FLUX))
    flux = Model("small Flux", str(tmp_path), Size(height=128, width=128))
    return (
        Case(Model("busy", "busy_model:busy", Size()), "rtx4070-laptop", (50,)),
        Case(flux, "rtx4090", (50,), auto=False),
    )


def played(cases: tuple[Case, ...]) -> Findings:
    emulator.install()
    try:
        return measure(cases, lambda line: None)
    finally:
        emulator.uninstall()


def test_figures_are_the_same_in_every_run(cases: tuple[Case, ...]) -> None:
    findings = played(cases)
    assert set(BARS) <= set(findings.figures)
    assert findings == played(cases)
    assert [(row["model"], row["contender"], row["memory"]) for row in findings.rows] == [
        ("busy", "fmstream", "50%"),
        ("busy", "fmstream", "auto"),
        ("small Flux", "fmstream", "50%"),
        ("small Flux", "diffusers leaf", "its own"),
        ("small Flux", "fmstream", "as leaf"),
    ]
    assert all(row["step_s"] >= 0.999 * row["c_s"] for row in findings.rows)
    assert findings.figures["auto_over_compute"] <= 1.02


@pytest.mark.parametrize(
    ("starts", "rate", "floor"),
    [
        ([0.0, 1.0, 2.0], 100.0, 30),  # the link brings each in time: the largest alone
        ([0.0, 0.0, 0.0], 100.0, 60),  # all at once
        ([0.0, 1.0, 2.0], 5.0, 50),  # ten bytes come before the last one begins
    ],
)
def test_the_floor_is_what_the_link_cannot_bring_in_time(starts: list[float], rate: float, floor: int) -> None:
    calls = tuple(Call(i, (i,), start, start + 1.0) for i, start in enumerate(starts))
    assert floor_bytes(Trace(calls, (10, 20, 30), 3.0), rate, 0.0) == floor
