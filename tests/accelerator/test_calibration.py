"""Calibrations: files, refusals, and what runs and plans make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fmstream
from fmstream import emulator
from fmstream.core.calibration import Calibration, load_calibration
from fmstream.core.plan import Costs
from fmstream.device.accelerator import Accelerator
from fmstream.device.opening import device_name, open_device
from fmstream.doors.dry_run import calibrated, emulated_card
from fmstream.emulator.cards import CARDS
from fmstream.errors import ConfigError
from fmstream.payloads.planner import FIRST_RATE, LATENCY_SECONDS
from tests.accelerator.kit import fresh
from tests.kit import mlp

LAPTOP = "NVIDIA GeForce RTX 4070 Laptop GPU"
MEASURED = Calibration(LAPTOP, 20e9, 11e9, 12e9, 4e9, 3e-6, 15e-6, 2e9)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    MEASURED.save(tmp_path / "link.json")
    return tmp_path / "link.json"


def test_what_is_saved_is_read(saved: Path) -> None:
    assert load_calibration(saved) == load_calibration(str(saved), LAPTOP) == MEASURED
    assert MEASURED.link == Costs(11e9, 3e-6, 15e-6, shared=True)
    assert MEASURED.host_rate(from_files=True) == 2e9
    assert MEASURED.host_rate(from_files=False) == 20e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"what": "a poem"}, "no calibration"),
        ({"schema": 2}, "schema 2"),
        ({"device": 3}, "device=3"),
        ({"h2d_bytes_per_second": "fast"}, "h2d_bytes_per_second='fast'"),
        ({"h2d_bytes_per_second": 0}, "h2d_bytes_per_second=0"),
        ({"ram_bytes_per_second": True}, "ram_bytes_per_second=True"),
        ({"latency_seconds": -1e-6}, "latency_seconds=-1e-06"),
        ({"seen_seconds": None}, "seen_seconds=None"),
        ({"d2h_bytes_per_second": float("inf")}, "d2h_bytes_per_second=inf"),
    ],
)
def test_damaged_files_are_refused(saved: Path, change: dict[str, Any], message: str) -> None:
    saved.write_text(json.dumps(json.loads(saved.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_calibration(saved)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_what_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ConfigError, match="is no calibration"):
        load_calibration(tmp_path / "x")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make one with fmstream bandwidth --save"):
        load_calibration(tmp_path / "none")


@pytest.mark.parametrize("value", ["", 3])
def test_the_option_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="name one that fmstream bandwidth"):
        fmstream.StreamConfig(calibration=value)


def test_a_run_plans_with_what_was_measured(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    module, x = mlp(6, 64), torch.randn(2, 64)
    expected = module(x)

    def refuse(self: Accelerator, memory: torch.Tensor) -> Costs:
        raise AssertionError("the link is known")

    monkeypatch.setattr(Accelerator, "probe", refuse)
    with torch.no_grad(), fmstream.stream(module, memory="60%", device="emu", calibration=saved) as streamed:
        for _ in range(4):
            got = streamed(x.to("emu")).cpu()
        assert streamed._session._meter.costs == MEASURED.link
        assert streamed._session.device.costs == MEASURED.link
    torch.testing.assert_close(got, expected)


def test_a_calibration_of_another_device_is_refused(saved: Path) -> None:
    emulator.reset("h200")
    module = mlp(2, 64)
    with pytest.raises(ConfigError, match="was measured on 'NVIDIA GeForce RTX 4070 Laptop GPU', and this is 'NVIDIA"):
        fmstream.stream(module, device="emu", calibration=saved).__enter__()
    assert not module[0].weight.is_meta
    fresh()


@pytest.mark.parametrize(("in_files", "disk", "rate"), [(False, 2e9, 20e9), (True, 2e9, 2e9), (True, None, FIRST_RATE)])
def test_the_first_plan_on_the_cpu(tmp_path: Path, in_files: bool, disk: float | None, rate: float) -> None:
    path = tmp_path / "host.json"
    Calibration(device_name(open_device("cpu")), 20e9, disk_bytes_per_second=disk).save(path)
    module = mlp(6, 256)
    options = {"spill_dir": tmp_path} if in_files else {}
    with fmstream.stream(module, memory="60%", device="cpu", calibration=path, **options) as streamed:
        assert streamed._session._meter.costs == Costs(rate, LATENCY_SECONDS)


def test_a_card_with_the_link_that_was_measured(tmp_path: Path, saved: Path) -> None:
    card = CARDS["rtx4070-laptop"]
    found = calibrated(card, MEASURED)
    assert (found.h2d_bytes_per_second, found.d2h_bytes_per_second) == (11e9, 12e9)
    assert found.pageable_bytes_per_second == 4e9
    assert found.copy_engine_seconds == 3e-6
    assert found.copy_seen_seconds == pytest.approx(15e-6 - card.copy_launch_seconds)
    assert found.gemm_flops == card.gemm_flops
    with pytest.raises(ConfigError, match="was measured on"), emulated_card("h200", str(saved)):
        pass
