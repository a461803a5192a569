"""The memory test: what it finds in memory that is broken on purpose, how it ends, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from bench.faulty_memory import PERMANENT
from bench.memtest_detection import detect, sound_alarms
from fmstream import emulator
from fmstream.cli import main
from fmstream.doctor import memtest
from fmstream.doctor.memtest import Memtest, Seen, run_memtest
from fmstream.doctor.memtest_page import render
from fmstream.doctor.patterns import DEFAULT, PATTERNS, Pattern, Sweep, find_patterns, make_sweeps
from fmstream.doctor.region import Region
from fmstream.doctor.sweeping import write_sweep
from fmstream.doctor.words import Words, one_bit, one_in, own_address, random_words, rotating_address
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


class Lined(Region):
    """Memory of the host whose bits 3 and 20 touch: each is read as one where either is."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        words = super().read(start, stop)
        both = 1 << 3 | 1 << 20
        return torch.where((words & both) != 0, words | both, words)


class Aliased(Region):
    """Memory of the host whose address line 12 is always zero."""

    def write(self, start: int, stop: int, step: int, words: torch.Tensor) -> None:
        places = torch.arange(start, stop, step) & ~(1 << 12)
        (block,) = self._blocks
        for late in (False, True):
            chosen = (torch.arange(start, stop, step) & (1 << 12) != 0) == late
            block[places[chosen]] = words[chosen]

    def read(self, start: int, stop: int) -> torch.Tensor:
        (block,) = self._blocks
        return block[torch.arange(start, stop) & ~(1 << 12)]


@pytest.mark.parametrize(("broken", "kind"), [(Lined, "data line"), (Aliased, "address line"), (Broken, "cell")])
def test_kinds_are_told_apart(monkeypatch: pytest.MonkeyPatch, broken: type[Region], kind: str) -> None:
    monkeypatch.setattr(memtest, "Region", broken)
    result = run_memtest("cpu", size=SIZE // 8, rounds=1, seed=2)
    assert result.kind == kind
    found = result.findings
    assert found.num_errors > 0
    assert {fault.expected == fault.actual for fault in found.faults} == {False}
    if broken is Lined:
        assert {bit for bit, count in enumerate(found.bits) if count} == {3, 20}
        assert {number for number, count in enumerate(found.flips) if count} == {1}
    if broken is Aliased:
        assert found.flips[8:].sum() > 0.1 * found.flips.sum()
    if broken is Broken:
        assert {(fault.offset, fault.expected ^ fault.actual) for fault in found.faults} == {(4000, 1 << 7)}
        # The memory itself is sound here, so that a second read is right.
        assert found.second_reads == {"expected": found.num_errors, "same": 0, "other": 0}


def test_words_by_hand() -> None:
    cpu = torch.device("cpu")

    def hexadecimal(words: torch.Tensor) -> list[str]:
        return [f"{int(word) & 0xFFFFFFFF:08x}" for word in words]

    assert hexadecimal(own_address().at(65534, 4, cpu)) == ["0000fffe", "0000ffff", "00010000", "00010001"]
    assert hexadecimal(own_address().at((1 << 32) + 5, 1, cpu)) == [f"{0x9E3779B1 ^ 5:08x}"]
    assert hexadecimal(own_address().complement().at(1, 1, cpu)) == ["fffffffe"]
    assert hexadecimal(one_bit(30).at(0, 4, cpu)) == ["40000000", "80000000", "00000001", "00000002"]
    assert hexadecimal(one_bit(30).at(65536, 1, cpu)) == ["40000000"]
    # 5 turned by 5, then 63488 words on: the next block's number in the upper half, turned by as much.
    assert hexadecimal(rotating_address(0).at(5, 1, cpu)) == ["000000a0"]
    assert hexadecimal(rotating_address(0).at(63488 + 5, 1, cpu)) == ["002000a0"]
    assert hexadecimal(one_in(20, 1, 0xF).at(0, 3, cpu)) == ["fffffff0", "0000000f", "fffffff0"]


@pytest.mark.parametrize("make", [own_address, lambda: rotating_address(77), lambda: random_words(3)])
def test_words_do_not_depend_on_the_chunk(make: Callable[[], Words]) -> None:
    whole = make().at(0, 200_000, torch.device("cpu"))
    pieces = [make().at(start, 999, torch.device("cpu")) for start in range(0, 199_800, 999)]
    assert torch.equal(torch.cat(pieces), whole[:199_800])
    assert whole.unique().numel() > 199_000


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
def test_patterns_have_as_many_sweeps_as_they_say(pattern: Pattern) -> None:
    sweeps = list(make_sweeps(pattern, 1, 1))
    assert len(sweeps) == pattern.num_sweeps
    assert all(sorted(sweep.order) == list(range(len(sweep.order))) for sweep in sweeps)


def test_classes_come_one_after_the_other() -> None:
    """Of a sweep in three classes every address is written once, by class over all chunks, each chunk downward."""
    launches: list[list[int]] = []

    class Noted:
        num_words, chunk_words, device = 10, 4, torch.device("cpu")

        def write(self, start: int, stop: int, step: int, words: torch.Tensor) -> None:
            launches.append(list(range(start, stop, step)))
            assert words.tolist() == launches[-1]

        def read(self, start: int, stop: int) -> torch.Tensor:
            raise AssertionError

    write_sweep(Noted(), Sweep(own_address(), downward=True, order=(2, 0, 1)), lambda _: None)
    assert launches == [[8], [5], [2], [9], [6], [0, 3], [4, 7], [1]]


def test_memory_comes_back_on_the_emulated_card() -> None:
    emulator.install()
    try:
        emulator.reset("rtx4060", capacity=1 << 30)
        before = torch.get_device_module("emu").mem_get_info()[0]
        result = run_memtest("emu", size=SIZE, rounds=1, patterns=["own-address", "random"])
        assert result.ended == "complete"
        assert result.findings.num_errors == 0
        assert result.device_name == "NVIDIA GeForce RTX 4060"
        assert torch.get_device_module("emu").mem_get_info()[0] == before
    finally:
        emulator.uninstall()


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
