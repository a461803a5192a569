"""The memory test: what it finds in memory that is broken on purpose, how it ends, and what it prints."""

from __future__ import annotations

import json

import pytest
import torch

from bench.faulty_memory import PERMANENT
from bench.memtest_detection import detect, sound_alarms
from fmstream.cli import main
from fmstream.doctor import memtest
from fmstream.doctor.memtest import Memtest, Seen, run_memtest
from fmstream.doctor.memtest_page import render
from fmstream.doctor.patterns import DEFAULT, find_patterns
from fmstream.doctor.region import Region
from fmstream.errors import ConfigError, MemoryBudgetError

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_sound_memory_has_no_errors() -> None:
    result = run_memtest("cpu", size=SIZE, rounds=1, seed=5)
    assert result.ended == "complete"
    assert result.done == 1.0
    assert result.findings.num_errors == 0
    assert result.kind is None
    assert result.status == 0
    assert result.written_bytes == result.checked_bytes >= SIZE * 100
    assert "no error" in render(result)


@pytest.mark.parametrize("kind", list(PERMANENT))
def test_planted_faults_are_found(kind: str) -> None:
    source = torch.Generator().manual_seed(3)
    found = detect(PERMANENT[kind], 100, 256, source)
    assert torch.stack([found[name] for name in DEFAULT]).any(0).float().mean() >= 0.99


def test_sound_memories_raise_no_alarm() -> None:
    assert sound_alarms(100, 256, torch.Generator().manual_seed(4))[0] == 0


class Broken(Region):
    """Memory of the host, one bit of which reads as zero."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        words = super().read(start, stop)
        if start <= 1000 < stop:
            words[1000 - start] &= ~(1 << 7)
        return words


def test_a_cell_that_is_stuck_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memtest, "Region", Broken)
    assert main(["memtest", "--device", "cpu", "--size", "1MiB", "--rounds", "1", "--seed", "1"]) == 1
    shown = capsys.readouterr().out
    assert "a fault on the memory path" in shown
    assert "looks like: cell" in shown
    assert "bits flipped: bit 7:" in shown
    assert "again with: --seed 1" in shown


def test_ctrl_c_gives_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(seen: Seen) -> None:
        if seen.done_words > 10 * SIZE // 4:
            raise KeyboardInterrupt

    result = run_memtest("cpu", size=SIZE, rounds=1, show=show)
    assert result.ended == "interrupted"
    assert 0 < result.done < 1
    assert result.status == 130
    assert "ended early (interrupted)" in render(result)
    monkeypatch.setattr(memtest, "Region", Broken)
    assert run_memtest("cpu", size=SIZE, rounds=1, show=show).status == 1


def test_the_time_limit_ends_it() -> None:
    result = run_memtest("cpu", size=SIZE, rounds=1, time_limit=1e-9)
    assert result.ended == "time limit"
    assert result.done < 1
    assert result.status == 0


def test_the_same_seed_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memtest, "Region", Broken)
    found = [run_memtest("cpu", size=SIZE, rounds=1, seed=9).findings.num_errors for _ in range(2)]
    assert found[0] == found[1] > 0


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memtest", "--device", "cpu", "--size", "1MiB", "--patterns", "solid, own-address", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert document["patterns"] == ["solid", "own-address"]
    assert document["errors"] == 0
    assert document["tested_bytes"] == SIZE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--patterns", "foo"], "no pattern is called 'foo'"),
        (["--rounds", "0"], "rounds=0"),
        (["--time-limit", "-1"], "time_limit=-1"),
        (["--size", "900000GiB"], "are free"),
        (["--size", "150%"], "the free memory"),
    ],
)
def test_options_that_cannot_be_used(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memtest", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_errors_are_of_this_package() -> None:
    with pytest.raises(ConfigError):
        find_patterns(["none"])
    with pytest.raises(MemoryBudgetError):
        run_memtest("cpu", size=1)


def test_words_are_counted() -> None:
    from fmstream.device.opening import open_device

    region = Region(open_device("cpu"), SIZE)
    test = Memtest(region, find_patterns(DEFAULT), 1, 1)
    assert test.run() == "complete"
    assert test.done_words == test.total_words == 2 * test.written_words
    region.close()
