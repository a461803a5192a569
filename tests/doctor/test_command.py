"""The commands, called as functions and as a user calls them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fmstream.cli import main
from fmstream.core.reading import Unread
from fmstream.doctor import command
from fmstream.doctor.environment import describe, render, without_names
from fmstream.doctor.examine import examine
from fmstream.doctor.page import print_checkup, render_checkup
from fmstream.doctor.system import System, Wanted
from fmstream.doctor.torch_facts import TorchFacts
from fmstream.doctor.verdict import SCHEMA, Checkup, Verdict
from fmstream.errors import ConfigError
from tests.doctor.machine import GIB, Machine
from tests.doctor.scenarios import SCENARIOS
from tests.tree import ROOT

KEYS = {"number", "check", "topic", "subject", "verdict", "read", "limit", "next_step", "applies"}


def checkup_of(name: str, folder: Path) -> Checkup:
    machine = Machine(folder)
    next(scenario for scenario in SCENARIOS if scenario.name == name).build(machine)
    return examine(machine.system)


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Let the commands see a made-up machine."""
    machine = Machine(tmp_path)

    def make(probes: object, wanted: Wanted | None = None) -> System:
        machine.wanted = wanted or Wanted()
        return machine.system

    monkeypatch.setattr(command, "System", make)
    return machine


def test_the_table(on_machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    on_machine.gpu(now=(4, 4), slot=(4, 4))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ 9  link width +WARN +x4 of x16", text, re.MULTILINE)
    assert "limit: x16; the slot has x4" in text
    assert "-> move the card to a slot with more lanes" in text
    assert "1 WARN" in text


def test_a_failure_is_status_1(on_machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    on_machine.gpu(RemappedRows=(3, 5, 0, 1))
    assert main(["doctor"]) == 1
    assert "1 FAIL" in capsys.readouterr().out


def test_json_has_a_schema(on_machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    on_machine.gpu(RemappedRows=(3, 5, 0, 1))
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == SCHEMA == 1
    assert document["status"] == 1
    assert document["counts"]["FAIL"] == 1
    assert {finding["number"] for finding in document["findings"]} == set(range(1, 35))
    assert all(set(finding) == KEYS for finding in document["findings"])
    assert {finding["verdict"] for finding in document["findings"]} <= {str(verdict) for verdict in Verdict}
    assert sum(document["counts"].values()) == sum(finding["applies"] for finding in document["findings"])


def test_what_is_to_be_run(on_machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    (model / "unet").mkdir(parents=True)
    (model / "unet/a.safetensors").write_bytes(bytes(3000))
    (model / "b.safetensors").write_bytes(bytes(1000))
    (model / "b.bin").write_bytes(bytes(7000))
    assert main(["doctor", "--path", str(model), "--memory", "50%", "--pinned", "1GiB", "--no-load"]) == 0
    wanted = on_machine.wanted
    assert wanted == Wanted(model.resolve(), 4000, 2000, GIB, is_measured=False)
    assert wanted.pins == GIB
    assert "ext4 on /" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path", "no/such/model"], "there is no such file or folder"),
        (["--memory", "much"], "--memory='much' is no size"),
        (["--memory", "50%"], "percentage"),
        (["--pinned", "0GiB"], "--pinned='0GiB' is 0 bytes"),
    ],
)
def test_bad_options_are_status_2(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_counts_as_it_is_and_a_folder_without_weights_as_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert command.make_wanted(str(tmp_path), None, None, loads=True).model_bytes is None
    file = tmp_path / "weights"
    file.write_bytes(bytes(5))
    assert command.make_wanted(str(file), None, None, loads=True).model_bytes == 5
    with pytest.raises(ConfigError, match="no such file or folder"):
        command.make_wanted(str(tmp_path / "none"), None, None, loads=True)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_keep_within_the_width(width: int, tmp_path: Path) -> None:
    for number, name in enumerate(("a_sound_desktop", "wsl2", "windows_with_wddm", "two_cards", "no_card_no_package")):
        text = render_checkup(checkup_of(name, tmp_path / str(number)), width=width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text


def test_several_cards_are_told_apart(tmp_path: Path) -> None:
    text = render_checkup(checkup_of("two_cards", tmp_path))
    assert "link width, GPU 0" in text
    assert "link width, GPU 1" in text
    assert "WSL2, " not in text


def test_what_does_not_apply_is_one_line(tmp_path: Path) -> None:
    text = render_checkup(checkup_of("no_card_no_package", tmp_path))
    assert "VC runtime" not in text
    assert re.search(r"left out: \d+ \(no card\)", text)
    assert len(text.splitlines()) < 30


def test_print_to_something_that_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkup = checkup_of("a_sound_desktop", tmp_path)
    print_checkup(checkup)
    assert capsys.readouterr().out == render_checkup(checkup) + "\n"


def test_the_environment(on_machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    on_machine.gpu()
    (on_machine.proc / "cpuinfo").write_text("processor : 0\nmodel name : Example CPU 9000\n")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    card = r"NVIDIA GeForce RTX 4090, 24.0 GiB, sm_89, link gen 4 x16 of gen 4 x16, cuda:0"
    assert re.search(rf"^GPU 0 +{card}$", text, re.M)
    assert re.search(r"^driver +580.95.05$", text, re.M)
    assert re.search(r"^processor +Example CPU 9000, \d+ CPUs$", text, re.M)
    assert "for CUDA 13.0 sm_75 sm_80" in text
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fmstream"]


def test_the_environment_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "marys-laptop")
    machine = Machine(tmp_path)
    machine.gpu(name="card of marys-laptop")
    home = str(tmp_path / "mary")
    machine.torch = TorchFacts("2.13.0", cuda="13.0", warned=(f"in {home}/lib/torch.py\nof marys-laptop: old",))
    environment = {
        "HOME": home,
        "CUDA_VISIBLE_DEVICES": "GPU-8f5a7b3c-1111",
        "OMP_NUM_THREADS": "4",
        "SECRET": "x",
        "PYTORCH_ALLOC_CONF": f"a:{home}",
    }
    text = render(describe(machine.system, environment))
    assert "mary" not in text
    assert "8f5a7b3c" not in text
    assert "SECRET" not in text
    assert "in ~/lib/torch.py of HOST: old" in text
    assert re.search(r"^OMP_NUM_THREADS +4$", text, re.M)


def test_names_are_taken_out_only_where_they_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "vm")
    assert without_names("vmlinux at / of /home/a/b", {"HOME": "/"}) == "vmlinux at / of /home/a/b"
    assert without_names("at C:/Users/a/x", {"USERPROFILE": "C:/Users/a"}) == "at ~/x"


def test_no_torch_no_package_no_proc(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.torch = Unread("torch cannot be imported: ImportError: no module")
    machine.proc = machine.sysfs = tmp_path / "none"
    facts = describe(machine.system, {})
    assert facts["torch's build"].startswith("torch cannot be imported")
    assert "meminfo" in facts["memory"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "fmstream", *arguments]
    return subprocess.run(
        command_line, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | environment
    )


def test_this_machine_is_examined() -> None:
    done = run("doctor", "--no-load", "--json")
    assert done.stderr == ""
    document = json.loads(done.stdout)
    by_number = {finding["number"]: finding for finding in document["findings"]}
    assert by_number[34]["verdict"] in ("OK", "UNKNOWN")
    assert [finding for finding in document["findings"] if "check itself failed" in finding["read"]] == []
    if by_number[9]["read"] == "no card":
        assert done.returncode == 0
        assert {f["verdict"] for f in document["findings"]} <= {"OK", "INFO", "UNKNOWN", "WARN"}


def test_this_machine_is_described_without_its_user() -> None:
    done = run("env", HOME=str(Path.home()))
    assert (done.returncode, done.stderr) == (0, "")
    assert str(Path.home()) + os.sep not in done.stdout
    assert re.search(r"^fmstream +\S", done.stdout, re.M)


def test_the_doctor_loads_torch_when_it_is_needed_only() -> None:
    code = (
        "import sys, fmstream.doctor, fmstream.doctor.system, fmstream.doctor.checks, fmstream.doctor.command\n"
        "import fmstream.doctor.page\n"
        "print('torch' in sys.modules, 'pynvml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"]
