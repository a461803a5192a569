"""Benchmarks keep to their contract; no speed is asserted, and every size is tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import contract, hooks
from bench.__main__ import main
from bench.contract import Bar, BenchError, Findings, Timing, Workplace
from tests.tree import ROOT

KEYS = {"bench", "claim", "command", "machine", "figures", "rows"}


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A registered benchmark "fake" that notes its folder; its files go to ``tmp_path``."""
    seen: list[Path] = []

    def run(place: Workplace) -> Findings:
        seen.append(place.folder)
        (place.folder / "weights").write_bytes(b"x")
        place.say("half of it")
        return Findings(
            {"gap": 1, "speed": 2.5}, [{"contender": "a", "median_s": 0.5}, {"contender": "b", "note": "-"}]
        )

    monkeypatch.setattr(contract, "registry", {})
    monkeypatch.setattr(contract, "SCRATCH", tmp_path)
    monkeypatch.setattr("bench.__main__.load_benches", lambda: contract.registry)
    monkeypatch.setattr(contract, "file_system", lambda path: "ext4")
    contract.register("fake", "Two is more than one.", {"gap": Bar(at_most=0.5), "speed": Bar(at_least=2.0)})(run)
    return seen


def test_the_list_names_every_benchmark() -> None:
    command = [sys.executable, "-m", "bench", "--list"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [line.partition(":")[0] for line in listed]
    assert {"hooks", "weights_disk"} <= set(names)
    assert names == sorted(names)
    assert all(line.partition(": ")[2].endswith(".") for line in listed)


def test_the_last_line_is_the_result(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake", "--quick", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert set(result) == KEYS
    assert result["figures"] == {"gap": 1.0, "speed": 2.5}
    assert result["command"] == "python -m bench fake --quick"
    assert result["rows"][1] == {"contender": "b", "note": "-"}
    assert printed.err.splitlines() == ["half of it"]
    assert [folder.exists() for folder in folders] == [False]


def test_the_table_says_which_bars_were_cleared(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake"]) == 0
    printed = capsys.readouterr().out
    figures = {line.split("│")[1].strip(): line for line in printed.splitlines() if line.startswith("│")}
    assert "missed" in figures["gap"]
    assert "cleared" in figures["speed"]
    assert len(folders) == 1


def test_an_unknown_name_is_refused(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fakes"])
    assert "fake" in capsys.readouterr().err
    assert folders == []


def test_memory_is_no_disk(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contract, "file_system", lambda path: "tmpfs")
    assert main(["fake"]) == 2
    assert "tmpfs" in capsys.readouterr().err
    assert folders == []


def test_a_failure_leaves_no_files(folders: list[Path], tmp_path: Path) -> None:
    def run(place: Workplace) -> Findings:
        (place.folder / "weights").write_bytes(b"x")
        raise BenchError("no room")

    contract.register("broken", "Nothing.", {})(run)
    assert main(["broken"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def contender(name: str, seconds: list[float]) -> list[float]:
        order.append(name)
        return seconds

    times = contract.in_turn({"a": lambda: contender("a", [1.0]), "b": lambda: contender("b", [2.0, 4.0])}, rounds=2)
    assert order == ["a", "b", "a", "b"]
    assert times == {"a": Timing((1.0, 1.0)), "b": Timing((2.0, 4.0, 2.0, 4.0))}
    assert times["b"].row("b") == {"contender": "b", "median_s": 3.0, "min_s": 2.0, "max_s": 4.0, "runs": 4}


def test_the_hooks_are_measured() -> None:
    findings = hooks.measure(hooks.Size(num_layers=8, width=64, num_tokens=2, rounds=2, passes=3))
    assert set(hooks.BARS) <= set(findings.figures)
    assert all(type(value) is float for value in findings.figures.values())
    assert [row["runs"] for row in findings.rows] == [6] * 6
    assert not torch.is_inference_mode_enabled()
