"""Faults that others met in systems of this kind, each as the behaviour that is wanted here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import fmstream
from bench.scenarios import watched_reads
from fmstream import emulator
from fmstream.device import pinned
from fmstream.device.pinned import PORTABLE, Pins
from fmstream.errors import ConfigError
from tests.accelerator.cases import WIDTH, Writing, call, x
from tests.accelerator.kit import ORDERS, equal, fresh, here, on_host, stream_and_compare, streaming, twin_on
from tests.kit import mlp, weights_bytes
from tests.kit_runtime import FailAt

MIB = 1 << 20


# Compiled modules


def test_a_compiled_module_makes_no_more_graphs_with_more_steps() -> None:
    torch._dynamo.reset()
    fresh()
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)))
    twin = twin_on(module)
    counter = CompileCounter()
    with torch.no_grad(), streaming(module, edited=True, keeps=True):
        compiled = torch.compile(module, backend=counter)
        counts = []
        for number in range(9):
            y = x(2 + number % 3, WIDTH, seed=number)
            equal(on_host(compiled(y)), on_host(twin(y)))
            counts.append(counter.frame_count)
    assert counts[-1] == counts[5]
    torch._dynamo.reset()


# Order


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("policy", ["one_ahead", "overlap_async"])
def test_a_slot_is_used_again_only_after_it_was_computed_with(policy: str, execution: Any) -> None:
    fresh(execution)
    module = mlp(4, WIDTH)
    stream_and_compare(module, call, 20, 0.1, policy=policy)


@pytest.mark.parametrize("execution", ORDERS)
def test_a_weight_that_is_cast_where_it_is_used(execution: Any) -> None:
    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.float(), self.bias.float())

    fresh(execution)
    module = nn.Sequential(*(Casting(WIDTH, WIDTH, dtype=torch.float16) for _ in range(6)))
    stream_and_compare(module, call, 6)


@pytest.mark.parametrize("execution", ORDERS)
def test_what_the_host_reads_has_come_from_the_device(execution: Any) -> None:
    fresh(execution)
    module = nn.Sequential(*(Writing(number) for number in range(4)))
    with emulator.host_guard(), watched_reads():
        stream_and_compare(module, call, 20)


# Memory


def test_a_host_that_runs_ahead_takes_no_more_memory() -> None:
    machine = fresh()
    module = mlp(40, WIDTH)
    peaks = []
    with torch.no_grad(), streaming(module, 0.05):
        for number in range(5):
            machine.allocator.reset_peaks()
            call(module, number)
            peaks.append(machine.allocator.statistics().peak_allocated)
    assert peaks[4] == peaks[1]


def test_pinned_memory_is_charged_as_it_is_however_the_system_rounds() -> None:
    module = nn.Sequential(*(nn.Linear(260, 260, bias=False) for _ in range(4)))
    num_bytes = weights_bytes(module)
    charged = []
    for _ in range(3):
        machine = fresh(pinned_rounding="power2")
        with torch.no_grad(), streaming(module):
            module(x(2, 260))
            charged.append(machine.pinned.charged_bytes)
    assert charged[0] <= 1.1 * num_bytes
    assert set(charged) == {charged[0]}


# Pins that are refused


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_nth_refusal_to_pin_changes_no_result(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from fmstream.payloads import pinning

    monkeypatch.setattr(pinning, "BLOCK_BYTES", 40_000)
    register, count = pinned._register, [0]

    def refusing(*args: Any) -> bool:
        count[0] += 1
        return count[0] < n and register(*args)

    monkeypatch.setattr(pinned, "_register", refusing)
    fresh()
    for _ in range(2):
        handle, _ = stream_and_compare(mlp(8, WIDTH), call, 4)
        assert sum("pin" in note for note in handle.telemetry.notes) == 1
        count[0] = 0


def test_the_drivers_memory_of_a_refusal_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(pinned_cap=0)
    zeros = FailAt(torch.zeros, 1, lambda: RuntimeError("CUDA error: out of memory"))
    monkeypatch.setattr(torch, "zeros", zeros)
    block = Pins(here.module, torch.device("emu", 0), lambda: None).allocate(100)
    assert zeros.fired
    assert not block.pinned


def test_a_note_on_pins_says_what_becomes_slower_and_what_helps() -> None:
    fresh(pinned_cap=50_000)
    handle, _ = stream_and_compare(mlp(8, WIDTH), call, 4)
    (note,) = [note for note in handle.telemetry.notes if "pin" in note]
    assert "slower" in note
    assert "limit of locked memory" in note
    assert "-" not in note.split("refused to pin")[1].split()[0]  # never a negative number


def test_no_card_is_an_error_that_names_the_remedy() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    for _ in range(2):
        with pytest.raises(ConfigError, match="not available on this machine; use device='cpu'"):
            fmstream.stream(mlp(2, WIDTH), device="cuda", memory="50%")


# The device of each thread


class Driver:
    """A module of streams with two devices, which notes the current device of each thread that calls its driver."""

    __name__ = "torch.emu"

    def __init__(self) -> None:
        self.local = threading.local()
        self.calls: list[tuple[str, int, int]] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = getattr(self.local, "index", 0)
        self.local.index = device.index
        yield
        self.local.index = before

    def synchronize(self) -> None:
        self.calls.append(("synchronize", getattr(self.local, "index", 0), 0))

    def cudart(self) -> Any:
        index = getattr(self.local, "index", 0)

        def register(_address: int, _num_bytes: int, flags: int) -> int:
            self.calls.append(("register", index, flags))
            return 0

        def unregister(_address: int) -> int:
            self.calls.append(("unregister", index, 0))
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


def test_memory_is_pinned_for_the_chosen_device_in_any_thread() -> None:
    driver = Driver()
    pins = Pins(driver, torch.device("emu", 1), lambda: None)
    blocks = [pins.allocate(100)]
    thread = threading.Thread(target=lambda allocate: blocks.append(allocate(200)), args=(pins.allocate,))
    thread.start()
    thread.join()
    pins.free(blocks.pop())
    blocks.clear()
    assert [name for name, _, _ in driver.calls] == ["register", "register", "unregister"]
    assert {index for _, index, _ in driver.calls} == {1}
    assert driver.calls[0][2] == PORTABLE
    del pins  # the block that nobody closed may still be read by copies
    assert [(name, index) for name, index, _ in driver.calls[3:]] == [("synchronize", 1), ("unregister", 1)]
    assert not hasattr(driver.local, "index") or driver.local.index == 0


def test_a_device_without_a_number_is_resolved_once(machine: emulator.Machine) -> None:
    module = mlp(4, WIDTH)
    for _ in range(2):
        with torch.no_grad(), streaming(module) as handle:
            call(module, 0)
            assert handle._session.device.torch_device == torch.device("emu", 0)
            assert handle.telemetry.device == "emu:0"
