"""Pinned memory: what is pinned, what it costs, and what it makes asynchronous."""

from __future__ import annotations

import pytest
import torch

from fmstream import emulator
from fmstream.emulator import PinError

MIB = 1 << 20


def test_a_pinned_copy_lies_in_pinned_memory(device: torch.device) -> None:
    x = torch.randn(100, 7)
    y = x.pin_memory()
    assert y.is_pinned()
    assert y[3:5, 1:].is_pinned()
    assert not x.is_pinned()
    assert torch.equal(x, y)
    assert y.data_ptr() % 4096 == 0


def test_factories_pin_as_they_do_with_cuda(device: torch.device) -> None:
    for made in (
        torch.empty(3, pin_memory=True),
        torch.zeros(3, pin_memory=True),
        torch.empty_like(torch.ones(3), pin_memory=True),
        torch.ones(2).new_empty(3, pin_memory=True),
    ):
        assert made.is_pinned()
    assert not torch.empty(3, pin_memory=False).is_pinned()


def test_pinned_memory_is_counted_until_its_last_view_dies(device: torch.device) -> None:
    pinned = emulator.machine().pinned
    x = torch.empty(1000).pin_memory()
    part = x[10:]
    assert pinned.charged_bytes == 4000
    del x
    assert pinned.charged_bytes == 4000
    del part
    assert pinned.charged_bytes == 0


@pytest.mark.parametrize(("rounding", "charge"), [("exact", 3 * MIB), ("power2", 4 * MIB)])
def test_the_cap_counts_as_the_machine_rounds(installed: None, rounding: str, charge: int) -> None:
    machine = emulator.reset(pinned_cap=4 * MIB, pinned_rounding=rounding)
    x = torch.empty(3 * MIB, dtype=torch.uint8).pin_memory()
    assert machine.pinned.charged_bytes == charge
    with pytest.raises(PinError, match=str(4 * MIB)):
        torch.empty(2 * MIB, dtype=torch.uint8, pin_memory=True)
    del x


def test_memory_is_registered_in_place_by_cudas_calls(device: torch.device) -> None:
    runtime = torch.emu.cudart()
    x = torch.randn(4096)
    assert runtime.cudaHostRegister(x.data_ptr(), x.nbytes, 0) == 0
    assert x.is_pinned()
    assert x[100:].is_pinned()
    assert runtime.cudaHostRegister(x.data_ptr(), x.nbytes, 0) != 0
    assert runtime.cudaHostUnregister(x.data_ptr()) == 0
    assert not x.is_pinned()
    assert runtime.cudaHostUnregister(x.data_ptr()) != 0


def test_registering_over_the_cap_gives_cudas_number(installed: None) -> None:
    emulator.reset(pinned_cap=1000)
    x = torch.randn(4096)
    assert torch.emu.cudart().cudaHostRegister(x.data_ptr(), x.nbytes, 0) == 2
    assert not x.is_pinned()


def seconds_of_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    machine = emulator.machine()
    torch.emu.synchronize()
    began = machine.now
    target.copy_(source, non_blocking=True)
    return machine.now - began


def test_only_pinned_memory_of_the_same_shape_is_copied_in_the_background(device: torch.device) -> None:
    card = emulator.machine().card
    target = torch.empty(4 * MIB, device=device)
    pageable = torch.ones(4 * MIB)
    pinned = pageable.pin_memory()
    slow, fast = (16 * MIB) / card.pageable_bytes_per_second, (16 * MIB) / card.h2d_bytes_per_second
    assert seconds_of_copy(target, pinned) == pytest.approx(card.copy_launch_seconds)
    assert seconds_of_copy(target, pageable) == pytest.approx(slow, rel=0.05)
    assert seconds_of_copy(target, pinned.double().pin_memory()) == pytest.approx(slow, rel=0.05)
    assert seconds_of_copy(target[::2], pinned[::2]) > fast / 2
    assert seconds_of_copy(pinned, target) == pytest.approx(card.copy_launch_seconds)
    assert seconds_of_copy(pageable, target) == pytest.approx(slow, rel=0.05)


def test_a_result_that_does_not_block_comes_in_pinned_memory(device: torch.device) -> None:
    x = torch.arange(5.0, device=device)
    y = x.to("cpu", non_blocking=True)
    torch.emu.synchronize()
    assert y.is_pinned()
    assert y.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_pinning_costs_the_host_time(device: torch.device) -> None:
    machine = emulator.machine()
    began = machine.now
    torch.empty(30 * MIB, dtype=torch.uint8).pin_memory()
    assert machine.now - began == pytest.approx(30 * MIB / 3e9 + 30 * MIB / 8e9)
