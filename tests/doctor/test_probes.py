"""The real trials: on the CPU, and on the emulated accelerator as on a card."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from fmstream import emulator
from fmstream.core.reading import Unread
from fmstream.doctor import probes
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.measured import LinkRates, MemoryCheck, Pinned, RoundTrip
from fmstream.doctor.probes import MachineProbes
from fmstream.doctor.torch_facts import TorchDevice

MIB = 1 << 20
GPU = Gpu(0, "emulated", torch=TorchDevice(0, "emulated", kind="emu"))


@pytest.fixture
def emulated() -> Iterator[None]:
    emulator.install()
    emulator.reset("rtx4090")
    yield
    emulator.uninstall()


def test_a_small_model_streams_on_the_cpu() -> None:
    trip = MachineProbes().round_trip(None)
    assert isinstance(trip, RoundTrip)
    assert trip.is_equal
    assert trip.streamed_bytes > MIB


def test_a_small_model_streams_on_a_card(emulated: None) -> None:
    trip = MachineProbes().round_trip(GPU)
    assert isinstance(trip, RoundTrip)
    assert trip.is_equal
    assert trip.streamed_bytes > MIB
    assert not emulator.machine().reports


def test_a_device_that_is_not_there_is_a_reason(emulated: None) -> None:
    missing = Gpu(0, "card", torch=TorchDevice(7, "card", kind="emu"))
    assert isinstance(MachineProbes().round_trip(missing), Unread)
    assert isinstance(MachineProbes().memory_check(missing), Unread)


def test_output_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    # Each call gives another value, so that the twin's and the streamed one differ.
    calls = iter(range(100))
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: torch.full_like(x, float(next(calls))))
    trip = MachineProbes().round_trip(None)
    assert isinstance(trip, RoundTrip)
    assert not trip.is_equal


@pytest.mark.parametrize(("cap", "expected"), [(None, Pinned(8 * MIB, False)), (5 * MIB, Pinned(4 * MIB, True))])
def test_pins_are_counted_and_given_back(
    emulated: None, monkeypatch: pytest.MonkeyPatch, cap: int | None, expected: Pinned
) -> None:
    monkeypatch.setattr(probes, "BLOCK", 2 * MIB)
    machine = emulator.reset("rtx4090", pinned_cap=cap)
    assert MachineProbes().pin(GPU, 8 * MIB) == expected
    assert machine.pinned.charged_bytes == 0


@pytest.mark.parametrize("card", ["rtx4060", "rtx4090", "usb-dock"])
def test_rates_are_those_of_the_link(emulated: None, monkeypatch: pytest.MonkeyPatch, card: str) -> None:
    machine = emulator.reset(card, execution="dry")
    looks: list[float] = []
    rates = MachineProbes().link_rates(GPU, lambda: looks.append(machine.now))
    assert isinstance(rates, LinkRates)
    assert rates.pinned_in == pytest.approx(machine.card.h2d_bytes_per_second, rel=0.02)
    assert rates.pinned_out == pytest.approx(machine.card.d2h_bytes_per_second, rel=0.02)
    assert rates.pageable_in == pytest.approx(machine.card.pageable_bytes_per_second, rel=0.1)
    assert rates.both_in == pytest.approx(machine.card.h2d_bytes_per_second, rel=0.02)
    assert rates.both_out == pytest.approx(machine.card.d2h_bytes_per_second, rel=0.02)
    assert len(looks) >= 6
    assert machine.pinned.charged_bytes == 0


def test_rates_need_pinned_memory(emulated: None) -> None:
    emulator.reset("rtx4090", pinned_cap=MIB)
    assert MachineProbes().link_rates(GPU, lambda: None) == Unread("the driver pins no memory")
    assert emulator.machine().pinned.charged_bytes == 0


def test_memory_of_a_card_is_checked(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MEMORY_TRIAL", 4 * MIB)
    check = MachineProbes().memory_check(GPU)
    assert isinstance(check, MemoryCheck)
    assert (check.num_bytes, check.errors) == (4 * MIB, 0)


def test_memory_that_is_taken_is_a_reason(emulated: None) -> None:
    emulator.reset("rtx4090", capacity=MIB)
    assert isinstance(MachineProbes().memory_check(GPU), Unread)


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from fmstream.device import nvrtc

    nvrtc._compile.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert MachineProbes().build("sm_89") == Unread("the packages of the extra cuda are not installed")


@pytest.mark.parametrize("architecture", ["sm_75", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_the_kernels_build_without_a_card(architecture: str) -> None:
    pytest.importorskip("cuda.core", reason="the extra cuda is not installed")
    build = MachineProbes().build(architecture)
    assert not isinstance(build, Unread), build.why
    assert build.sources == ("page_select.cu", "page_unpack.cu")
    assert build.compiler.startswith("NVRTC")


def test_an_architecture_that_is_none_is_a_reason() -> None:
    pytest.importorskip("cuda.core", reason="the extra cuda is not installed")
    assert isinstance(MachineProbes().build("sm_11"), Unread)
