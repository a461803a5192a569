"""Other packages on the emulated card: the names that they are given, and the rows that come of it."""

from __future__ import annotations

import importlib
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.func import functional_call

import bench.peers
from bench.peers.contract import Adapter, Row, Running, Unavailable
from bench.peers.ground import Ground, make_ground
from bench.peers.measure import measure
from bench.peers.model import Net, Shape
from bench.peers.shim import cuda_names
from bench.peers.shim.devices import translate
from fmstream import emulator
from fmstream.emulator.backlog import Execution

SMALL = Shape(num_blocks=4)
REQUIREMENTS = Path(bench.peers.__file__).parents[1] / "requirements-peers.txt"


@pytest.fixture
def emulated() -> Iterator[None]:
    emulator.install()
    emulator.reset("rtx4070-laptop")
    yield
    emulator.uninstall()


@pytest.fixture
def ground(emulated: None) -> Ground:
    return make_ground(1.0, "0.2us", SMALL)


def stranger() -> ModuleType:
    """A module that asks for CUDA, as packages do."""
    module = ModuleType("stranger.part")
    source = "import torch\ndef kind(tensor): return tensor.device.type\n"
    exec(compile(source, "stranger", "exec"), module.__dict__)
    return module


def peers_of(*families: str) -> list[Adapter]:
    found = [importlib.import_module(f"bench.peers.adapters.{family}").PEERS for family in families]
    return [peer for peers in found for peer in peers]


def whole(model: Net, budget: int) -> Running:
    return Running(model.to("emu"))


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda", "emu"), ("cuda:0", "emu:0"), ("cpu", "cpu"), ("cudart", "cudart"), (None, None), (True, True)],
)
def test_only_cuda_is_translated(device: object, expected: object) -> None:
    assert translate(device) == expected


def test_cuda_is_the_emulated_device_meanwhile(emulated: None) -> None:
    other = stranger()
    with cuda_names(("stranger",)):
        tensors = [
            torch.ones(2, device="cuda"),
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda:0"),
            torch.nn.Linear(2, 2).to("cuda").weight,
            torch.ones(2, device=torch.device("cuda", 0)),
            torch.ones(2).to(torch.device("cuda:0")),
        ]
        assert all(tensor.is_cuda for tensor in tensors)
        assert {other.kind(tensor) for tensor in tensors} == {"cuda"}
        assert {tensor.device.type for tensor in tensors} == {"emu"}  # this module is not one of the packages
        assert isinstance(tensors[0].device, torch.device)
        assert torch.cuda.is_available()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            assert torch.cuda.current_stream() != torch.cuda.default_stream()


def test_names_are_undone(emulated: None) -> None:
    places: list[Any] = [torch, torch.cuda, torch.cuda.streams, torch.version, torch.Tensor, torch._C._nn]
    places += [torch.device, queue.Queue, threading.Thread]
    before = [dict(vars(place)) for place in places]

    def fail() -> None:
        with cuda_names(("stranger",)):
            assert [dict(vars(place)) for place in places] != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [dict(vars(place)) for place in places] == before
    assert stranger().kind(torch.ones(1, device="emu")) == "emu"


def test_a_clock_travels_through_queues_and_threads(emulated: None) -> None:
    machine = emulator.machine()
    line: queue.Queue[float] = queue.Queue()

    def sender() -> None:
        assert machine.now >= 1.0  # it was started after that
        machine.charge(2.0)
        line.put(machine.now)
        machine.charge(4.0)

    with cuda_names(()):
        machine.charge(1.0)
        thread = threading.Thread(target=sender)
        thread.start()
        sent = line.get(timeout=10)
        assert sent <= machine.now < 7.0
        thread.join()
        assert machine.now >= 7.0


def test_every_family_has_peers_and_pins() -> None:
    peers = peers_of(*bench.peers.FAMILIES)
    named = [(peer.name, peer.settings, peer.share) for peer in peers]
    assert len(set(named)) == len(named)
    pinned = set(re.findall(r"^([a-z-]+)==\d", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE))
    asked = {peer.distribution for peer in peers if peer.packages}
    assert asked <= pinned


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_the_card_balances_compute_and_link(emulated: None, ratio: float) -> None:
    ground = make_ground(ratio, "2us", SMALL)
    row = measure(Adapter("resident", "torch", 2.0, whole), ground)
    assert row["compute_ms"] == pytest.approx(ratio * ground.stream_seconds * 1e3, rel=1e-3)
    assert row["h2d_over_w"] < 0.01


@pytest.mark.parametrize("execution", ["eager", "late"])
def test_peers_that_the_tests_have_installed(ground: Ground, execution: Execution) -> None:
    def measured() -> list[Row]:
        return [measure(peer, ground, execution) for peer in peers]

    streamed = {"offload_type": "block_level", "use_stream": True, "record_stream": True}
    installed = peers_of("accelerate_offload", "diffusers_group")
    peers = [replace(peer, share=2.0) for peer in installed if peer.options in ({}, streamed)]
    rows = measured()
    for row in rows:
        assert "skipped" not in row, row["skipped"]
        assert row["equal"]
        assert row["races"] == 0
        assert row["h2d_over_w"] == pytest.approx(1.0, rel=0.02)
        assert row["step_ms"] >= row["link_ms"]
    assert rows[1]["step_ms"] < 0.6 * rows[0]["step_ms"]  # the one that overlaps, and from pinned memory
    assert measured() == rows


def test_a_peer_that_does_not_wait_for_its_copies_is_reported(ground: Ground) -> None:
    def hasty(model: Net, budget: int) -> Running:
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()

        def call(x: torch.Tensor) -> torch.Tensor:
            state = {}
            with torch.emu.stream(torch.emu.Stream()):  # type: ignore[attr-defined]
                for name, parameter in model.named_parameters():
                    state[name] = parameter.to("emu", non_blocking=True)
            out: torch.Tensor = functional_call(model, state, (x,))
            return out

        return Running(call)

    assert measure(Adapter("hasty", "torch", 8.0, hasty), ground)["races"] > 0


def test_a_peer_that_cannot_run_is_a_row_with_the_reason(ground: Ground) -> None:
    def refuse(model: Net, budget: int) -> Running:
        raise Unavailable("not here")

    assert measure(Adapter("a", "torch", 1.0, refuse), ground)["skipped"] == "Unavailable: not here"
    assert "not installed" in measure(Adapter("b", "no-such-package", 1.0, refuse), ground)["skipped"]
    assert "OutOfMemory" in measure(Adapter("c", "torch", 0.5, whole), ground)["skipped"]


def test_a_family_whose_process_fails_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "bench.peers.one"]
        return subprocess.CompletedProcess(command, 3, 'noise\nrow: {"peer": "x"}\n', "Traceback\nValueError: no\n")

    monkeypatch.setattr(subprocess, "run", run)
    done, failed = bench.peers.rows(1.0, "2us", families=("some",))
    assert done == {"peer": "x"}
    assert failed["skipped"] == "its process ended with 3: ValueError: no"
