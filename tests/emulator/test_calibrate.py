"""A card that is fitted to the emulated device is the one that the device was made from."""

from __future__ import annotations

import pytest
import torch

from bench import calibrate
from bench.contract import BenchError, Workplace
from fmstream import emulator
from fmstream.device.accelerator import Accelerator
from fmstream.emulator.cards import CARDS

pytestmark = pytest.mark.usefixtures("installed")

RATES = (
    "h2d_bytes_per_second",
    "d2h_bytes_per_second",
    "pageable_bytes_per_second",
    "gemm_flops",
    "attention_flops",
    "memory_bytes_per_second",
    "launch_seconds",
    "kernel_seconds",
)


@pytest.mark.parametrize("name", sorted(CARDS))
def test_a_fit_finds_the_card(name: str) -> None:
    emulator.reset(name, execution="dry", check=None)
    fitted, card = calibrate.fit(Accelerator(torch.device("emu"))), CARDS[name]
    assert fitted.name == card.name
    assert fitted.memory_bytes == card.memory_bytes
    for field in RATES:
        assert getattr(fitted, field) == pytest.approx(getattr(card, field), rel=0.05), field
    assert fitted.copy_engine_seconds == pytest.approx(card.copy_engine_seconds, rel=0.05)
    # What is seen of one copy alone includes its launch.
    assert fitted.copy_seen_seconds == pytest.approx(card.copy_seen_seconds + card.copy_launch_seconds, rel=0.05)


def test_copies_of_each_size_are_timed_both_ways() -> None:
    emulator.reset("rtx4090", execution="dry", check=None)
    rows = list(calibrate.copies(Accelerator(torch.device("emu"))))
    assert len(rows) == 4 * len(calibrate.SIZES)
    pinned = [row["gb_per_s"] for row in rows if row["pinned"] and row["copy"] == "to the device"]
    assert pinned == sorted(pinned)
    assert pinned[-1] > max(row["gb_per_s"] for row in rows if not row["pinned"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA card is here")
def test_without_a_card_the_bench_says_so(tmp_path: object) -> None:
    with pytest.raises(BenchError, match="no CUDA card"):
        calibrate.run(Workplace(True, tmp_path, print))  # type: ignore[arg-type]
