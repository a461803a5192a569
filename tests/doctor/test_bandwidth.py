"""Rates by size of copy: the arithmetic, the emulated link, files, what is printed, drawn and saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import bandwidth_emulated
from fmstream import emulator
from fmstream.cli import main
from fmstream.core.calibration import Calibration, load_calibration
from fmstream.core.reading import Unread
from fmstream.device.opening import device_name, open_device
from fmstream.doctor.bandwidth import SIZES, BandwidthResult, run_bandwidth, sizes_up_to
from fmstream.doctor.bandwidth_page import render
from fmstream.doctor.host_rates import CACHED, RAM, UNCACHED, disk_rates, find_file
from fmstream.doctor.pci import Link
from fmstream.doctor.rates import Rate, percentile
from fmstream.doctor.timed_copies import BOTH_OUT, PAGEABLE_IN, PINNED_IN, num_copies
from fmstream.emulator.cards import CARDS
from fmstream.errors import ConfigError, MemoryBudgetError

MIB = 1 << 20


@pytest.fixture
def card() -> Iterator[None]:
    emulator.install()
    emulator.reset("rtx4060", execution="dry", check=None)
    with emulator.dry_host():
        yield
    emulator.uninstall()


def test_rates_by_hand() -> None:
    rate = Rate("a copy", 1000, (1.0, 2.0, 3.0, 4.0, 10.0))
    assert rate.median == 1000 / 3
    assert rate.p95 == pytest.approx(1000 / 8.8)  # four fifths of the way from 4 to 10
    assert rate.cv == pytest.approx(10**0.5 / 4)  # the variance is (9 + 4 + 1 + 0 + 36) / 5
    assert percentile([7.0], 0.95) == 7.0
    assert Rate("still", 8, (0.5, 0.5)).cv == 0.0


def test_shares_are_of_the_link_as_it_was_seen_last() -> None:
    copies = Rate(PINNED_IN, 1000, (1000 / 13e9,))
    ram = Rate(RAM, 1000, (1e-6,))
    links = (Link(1, 8), Link(4, 8))
    result = BandwidthResult("cuda:0", "A card", (copies, ram), (0.0, 0.0), links)
    # 16 GT/s on 8 lanes, 128 of 130 bits carrying data
    assert result.theoretical == pytest.approx(15.754e9, rel=1e-4)
    assert result.share(copies) == pytest.approx(13 / 15.754, rel=1e-4)
    assert result.share(ram) is None
    assert "gen 1 x8 at the first copies, gen 4 x8 at the last" in render(result)
    unread = BandwidthResult("cuda:0", "A card", (copies,), (0.0, 0.0), (Link(Unread("no"), 8),))
    assert unread.theoretical is None
    assert unread.to_dict()["link_after"] == {"generation": None, "width": 8}
    assert "of the link" not in render(unread)


def test_sizes_and_numbers_of_copies() -> None:
    assert sizes_up_to(4 * MIB) == SIZES[:4]
    assert sizes_up_to(100) == (100,)
    assert [num_copies(size) for size in (1 << 16, 4 * MIB, 512 * MIB)] == [64, 16, 2]


@pytest.mark.parametrize("name", sorted(CARDS))
def test_the_link_of_every_card_is_measured(name: str, card: None) -> None:
    result = bandwidth_emulated.measure(CARDS[name], "16MiB")
    rows = list(bandwidth_emulated.compare(name, CARDS[name], result))
    assert len(rows) == 6
    assert max(row["error"] for row in rows) <= 0.02
    assert result.costs[0] == pytest.approx(CARDS[name].copy_engine_seconds, rel=0.05)


def test_the_link_is_looked_at_while_copies_are_under_way(card: None) -> None:
    looks: list[float] = []

    def look() -> Link:
        looks.append(emulator.machine().now)
        return Link(1 if len(looks) == 1 else 4, 8)

    result = run_bandwidth("emu", largest="1MiB", look=look, host=False)
    assert len(looks) > 100
    assert result.links == (Link(1, 8), Link(4, 8))
    assert result.largest(BOTH_OUT) is not None
    pageable, pinned = result.largest(PAGEABLE_IN), result.largest(PINNED_IN)
    assert pageable is not None
    assert pinned is not None
    assert pageable.median < pinned.median


def test_all_memory_comes_back(card: None) -> None:
    free = torch.get_device_module("emu").mem_get_info()[0]
    run_bandwidth("emu", largest="1MiB", host=False)
    torch.get_device_module("emu").empty_cache()
    assert torch.get_device_module("emu").mem_get_info()[0] == free
    assert emulator.machine().pinned.charged_bytes == 0


def test_a_driver_that_pins_nothing_is_told(card: None) -> None:
    emulator.reset("rtx4060", execution="dry", check=None, pinned_cap=0)
    with pytest.raises(MemoryBudgetError, match="raise the limit of locked memory"):
        run_bandwidth("emu", largest="1MiB", host=False)


def test_the_largest_file_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(5000))
    (tmp_path / "deeper").mkdir()
    large = tmp_path / "deeper" / "large"
    large.write_bytes(bytes(9 * MIB + 5))
    assert find_file(tmp_path) == large
    rates = disk_rates(large)
    assert [rate.what for rate in rates] == [UNCACHED, CACHED]
    assert all(rate.num_bytes == 9 * MIB for rate in rates)


@pytest.mark.parametrize("name", ["empty", "none"])
def test_nothing_to_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="give a checkpoint"):
        find_file(tmp_path / name)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "weights").write_bytes(bytes(MIB))
    saved, picture = tmp_path / "saved.json", tmp_path / "rates.png"
    wanted = ["bandwidth", "--device", "cpu", "--largest", "256KiB"]
    files = ["--path", str(tmp_path), "--save", str(saved), "--png", str(picture)]
    assert main([*wanted, *files]) == 0
    shown = capsys.readouterr().out
    for part in ("bandwidth", "64 KiB", "256 KiB", RAM, UNCACHED, CACHED):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= 110
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    found = load_calibration(saved)
    assert found.device == device_name(open_device("cpu"))
    assert found.link is None
    assert found.disk_bytes_per_second is not None
    assert main([*wanted, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert [rate["bytes"] for rate in document["rates"]] == [1 << 16, 1 << 18]
    assert set(document["rates"][0]) == {"what", "bytes", "median", "p95", "cv", "samples", "share_of_theoretical"}


def test_a_calibration_of_a_card(card: None) -> None:
    found = run_bandwidth("emu", largest="64MiB", host=False).calibration()
    assert found.device == "NVIDIA GeForce RTX 4060"
    assert found.h2d_bytes_per_second == pytest.approx(13e9, rel=0.02)
    assert found.pageable_bytes_per_second == pytest.approx(5.2e9, rel=0.02)
    assert found.ram_bytes_per_second is None
    assert isinstance(found, Calibration)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--largest", "9 apples"], "largest='9 apples'"),
        (["--device", "moon"], "moon"),
        (["--path", "/nowhere/at/all"], "give a checkpoint"),
        (["--save", "/nowhere/at/all.json"], "no such folder"),
    ],
)
def test_options_that_cannot_be_used(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments if "--device" in arguments else ["--device", "cpu", *arguments]
    assert main(["bandwidth", *given]) == 2
    assert message in capsys.readouterr().err
