"""What is taken of device memory and of pinned memory stays within what was given."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

import fmstream
from fmstream import emulator
from fmstream.actors import uploads
from tests.accelerator.cases import CASES, WIDTH, call, grow, x
from tests.accelerator.kit import (
    FRACTIONS,
    POLICIES,
    equal,
    fresh,
    here,
    on_host,
    stream_and_compare,
    streaming,
    twin_on,
)
from tests.kit import budget, mlp, weights_bytes
from tests.kit_runtime import map_weights

ROUNDING = 512
"""Of one allocation."""


def peak_of_twin(module: torch.nn.Module, step: Any) -> int:
    """Bytes that the twin's calls take beside its weights."""
    machine = fresh()
    twin = twin_on(module)
    weights = machine.allocator.statistics().allocated
    with torch.no_grad():
        for number in range(5):
            step(twin, number)
    return machine.allocator.statistics().peak_allocated - weights


@pytest.mark.parametrize("pinned", ["auto", 0])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["mlp", "blocks"])
def test_peak_is_that_of_the_activations_and_the_memory(name: str, policy: str, pinned: Any) -> None:
    case = next(case for case in CASES if case.name == name)
    activations = peak_of_twin(case.build(), case.step)
    for fraction in FRACTIONS:
        module = case.build()
        memory = budget(module, fraction)
        machine = fresh()
        with torch.no_grad(), streaming(module, memory=memory, policy=policy, pinned=pinned):
            for number in range(5):
                case.step(module, number)
        assert machine.allocator.statistics().peak_allocated <= activations + memory + ROUNDING


def test_peak_does_not_grow_when_the_host_runs_ahead(machine: emulator.Machine) -> None:
    module = mlp(40, WIDTH)
    memory = budget(module, 0.0) * 2
    peaks = []
    with torch.no_grad(), streaming(module, memory=memory):
        for number in range(6):
            machine.allocator.reset_peaks()
            call(module, number)
            peaks.append(machine.allocator.statistics().peak_allocated)
    assert peaks[-1] == peaks[-2] == peaks[1]
    assert peaks[-1] <= memory + 4 * 3 * WIDTH * 4 + 4 * ROUNDING


@pytest.mark.parametrize("pinned", [8192, 20_000, "64KiB", "1MiB"])
def test_pinned_weights_stay_within_the_option(pinned: Any, machine: emulator.Machine) -> None:
    module = mlp(8, WIDTH)
    limit = fmstream.config.parse_size(pinned, name="pinned")
    with torch.no_grad(), streaming(module, pinned=pinned) as handle:
        for number in range(4):
            call(module, number)
            session = handle._session
            staging = session._executor.loads.staging.num_bytes
            assert session._annex.pinned_bytes <= limit
            assert machine.pinned.charged_bytes <= limit + staging
            assert staging <= uploads.STAGED_RUNS * memory_of(handle) + mmap.PAGESIZE
            assert (staging > 0) == (limit < weights_bytes(module))


def memory_of(handle: fmstream.Stream) -> int:
    """Bytes of device memory for weights: no run is larger."""
    return int(handle._session._executor.arena.num_bytes)


def test_nothing_is_pinned_for_weights_without_leave(machine: emulator.Machine) -> None:
    module = mlp(8, WIDTH)
    handle, _ = stream_and_compare(module, call, pinned=0)
    assert not any("pin" in note for note in handle.telemetry.notes)
    assert not any(param.is_pinned() for param in module.parameters())


@pytest.mark.parametrize("cap", [0, 40_000])
def test_refusal_to_pin_costs_speed_only_and_one_note(cap: int) -> None:
    machine = fresh(pinned_cap=cap)
    module = mlp(8, WIDTH)
    handle, _ = stream_and_compare(module, call, 6)
    notes = [note for note in handle.telemetry.notes if "refused to pin" in note]
    assert len(notes) == 1
    assert str(sum(-(-p.numel() * 4 // 64) * 64 for p in module.parameters())) in notes[0]
    assert machine.pinned.charged_bytes == 0


def test_replaced_parameters_are_not_kept_pinned(machine: emulator.Machine) -> None:
    module = mlp(6, WIDTH)
    with torch.no_grad(), streaming(module, edited=True):
        call(module, 0)
        before = machine.pinned.charged_bytes
        for number in range(18):
            layer = module[2 * (number % 6)]
            layer.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
            layer.bias = torch.nn.Parameter(torch.randn(WIDTH))
            call(module, number)
        assert machine.pinned.charged_bytes <= 2 * before + 12 * mmap.PAGESIZE


def test_a_new_survey_takes_no_master_for_one_that_somebody_looks_into(machine: emulator.Machine) -> None:
    module = mlp(8, WIDTH)
    with torch.no_grad(), streaming(module, edited=True) as handle:
        for number in range(6):
            if number == 3:
                module[4].weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
            call(module, number)
        assert not handle._session.weights._exposed


@pytest.mark.parametrize("memory", ["40%", None])
def test_staging_is_bounded_for_runs_of_any_size(
    memory: Any, machine: emulator.Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "CHUNK_BYTES", 8192)
    monkeypatch.setattr(uploads, "STAGING_BYTES", 32768)
    module = map_weights(mlp(8, WIDTH), tmp_path / "w.safetensors")
    twin = twin_on(module)
    with torch.no_grad(), streaming(module, memory=memory, pinned=0, idle=True) as handle:
        outputs = []
        for number in range(4):
            outputs.append(call(module, number))
            assert 0 < handle._session._executor.loads.staging.num_bytes <= 32768
        for number, output in enumerate(outputs):
            equal(on_host(output), on_host(call(twin, number)))
        del outputs, output


def test_memory_is_back_without_the_garbage_collector(machine: emulator.Machine) -> None:
    module = mlp(8, WIDTH)
    inputs = x(3, WIDTH)
    before = machine.allocator.statistics().allocated
    with torch.no_grad(), fmstream.stream(module, memory="40%", device=here.name) as handle:
        for _ in range(3):
            module(inputs)
        assert handle is not None
    assert machine.allocator.statistics().allocated == before


def test_weights_that_fit_are_loaded_once(machine: emulator.Machine) -> None:
    module = torch.nn.Sequential(*(b for b in CASES[1].build()))
    handle, _ = stream_and_fit(module)
    assert all(record.streamed_bytes == 0 for record in handle.telemetry.passes)
    assert machine.statistics().bytes_in >= weights_bytes(module)


def stream_and_fit(module: torch.nn.Module) -> tuple[fmstream.Stream, int]:
    """Stream with all the memory that there could be, and compare."""
    twin = twin_on(module)
    with torch.no_grad():
        expected = [on_host(grow(twin, number)) for number in range(3)]
        with streaming(module, memory=None, idle=True) as handle:
            found = [on_host(grow(module, number)) for number in range(3)]
    for ours, theirs in zip(found, expected, strict=True):
        equal(ours, theirs)
    return handle, len(found)
