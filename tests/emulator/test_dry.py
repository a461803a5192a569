"""Dry runs: the same times, bytes and peaks as real ones, and no value that is not known."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bench.emulator import measure_flux
from fmstream import emulator
from fmstream.emulator import DryValueError
from fmstream.emulator.dry import is_dry
from tests.emulator.test_autograd import Decoder, Denoiser, Video

SIDE = 512


@pytest.fixture
def dry(installed: None) -> torch.device:
    emulator.reset(execution="dry")
    return torch.device("emu", 0)


def big_layers() -> nn.Module:
    layers = [nn.Linear(SIDE, SIDE), nn.GELU(), nn.LayerNorm(SIDE)]
    return nn.Sequential(*layers, *layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "layers": (big_layers, lambda: torch.ones(256, SIDE)),
    "decoder": (Decoder, lambda: torch.arange(10).view(2, 5)),
    "denoiser": (Denoiser, lambda: torch.ones(1, 3, 128, 128)),
    "video": (Video, lambda: torch.ones(1, 2, 8, 16, 16)),
}


def run(execution: str, name: str, *, train: bool) -> tuple[object, ...]:
    machine = emulator.reset(execution=execution, check="raise")
    make, given = MODELS[name]
    module = make().to("emu")
    machine.reset_statistics()
    with torch.set_grad_enabled(train):
        y = module(given().pin_memory().to("emu", non_blocking=True))
        if train:
            y.float().mean().backward()
        y.cpu()
    torch.emu.synchronize()
    found = machine.statistics()
    return machine.now, found.busy, found.bytes_in, found.bytes_out, found.num_kernels, found.peak_allocated


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_a_dry_run_takes_the_time_bytes_and_memory_of_a_real_one(installed: None, name: str, train: bool) -> None:
    assert run("dry", name, train=train) == run("eager", name, train=train)


def test_a_race_shows_in_a_dry_run(dry: torch.device) -> None:
    emu = torch.emu
    source, target, side = torch.ones(1 << 20).pin_memory(), torch.zeros(1 << 20, device=dry), emu.Stream()
    side.wait_stream(emu.current_stream())
    with emu.stream(side):
        target.copy_(source, non_blocking=True)
    with pytest.raises(emulator.SyncError):
        target + 1


def test_small_values_that_follow_from_known_ones_are_known(dry: torch.device) -> None:
    steps = torch.linspace(0, 1, 5, device=dry)
    assert (torch.arange(10).to(dry) == 7).nonzero().item() == 7
    assert steps[2].item() == 0.5
    assert torch.cat([steps, steps * 2])[-1].item() == 2.0
    steps[1] = 7.0
    assert steps.tolist() == [0.0, 7.0, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[0].item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.empty(3, device=x.device)[0].item(),
    ],
    ids=["item", "bool", "nonzero", "mask", "equal", "uninitialised"],
)
def test_a_value_that_a_dry_run_does_not_have_is_refused(
    dry: torch.device, ask: Callable[[torch.Tensor], object]
) -> None:
    with pytest.raises(DryValueError, match="dry run"):
        ask(torch.ones(1 << 20, device=dry))


def test_a_small_tensor_that_takes_an_unknown_value_is_unknown(dry: torch.device) -> None:
    known, unknown = torch.zeros(4, device=dry), torch.ones(1 << 20, device=dry).sum()
    known[1] = unknown
    with pytest.raises(DryValueError):
        known.tolist()
    known.fill_(3.0)
    assert known.tolist() == [3.0] * 4


def test_memory_that_is_used_again_is_unknown(dry: torch.device) -> None:
    first = torch.ones(100, device=dry)
    address = first.data_ptr()
    del first
    second = torch.empty(100, device=dry)
    assert second.data_ptr() == address
    with pytest.raises(DryValueError):
        second.sum().item()


def test_a_known_slab_that_is_written_through_a_part_is_unknown(dry: torch.device) -> None:
    slab = torch.zeros(1024, device=dry)
    part = torch.from_dlpack(slab[:256])
    part.copy_(torch.ones(1 << 20, device=dry)[:256])
    with pytest.raises(DryValueError):
        slab.sum().item()


def test_a_module_larger_than_memory_runs_dry(dry: torch.device) -> None:
    emulator.reset("h200", execution="dry")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(16384, 16384, dtype=torch.bfloat16) for _ in range(40)))
    emulator.dry_parameters(module)
    assert all(is_dry(p) for p in module.parameters())
    module.to(dry)
    assert torch.emu.memory_allocated() > 20e9
    with torch.no_grad():
        y = module(torch.empty(4096, 16384, dtype=torch.bfloat16, device=dry))
    assert y.shape == (4096, 16384)
    assert emulator.machine().statistics().busy["compute"] > 0.1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_flux_at_its_real_size_takes_a_dry_pass(installed: None) -> None:
    timing, row = measure_flux(rounds=1)
    assert len(timing.samples) == 1
    assert row["weights_gb"] == pytest.approx(23.8, rel=0.01)
    assert row["kernels"] > 2000
    assert 0.1 < row["modelled_s"] < 0.2
    assert row["activations_gb"] < 1.0


def test_shared_parameters_stay_shared_and_small_buffers_get_values(dry: torch.device) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    module[1].weight = module[0].weight
    emulator.dry_parameters(module)
    assert module[1].weight is module[0].weight
    assert module[2].running_mean.tolist() == [0.0] * 8


def test_the_host_computes_with_shapes_of_dry_tensors(dry: torch.device) -> None:
    module = emulator.dry_parameters(big_layers())
    with emulator.dry_host(), torch.no_grad():
        weight = module[0].weight
        assert weight.half().t().contiguous().shape == (SIDE, SIDE)
        assert is_dry(weight.float().sum(1))
        assert weight.pin_memory().is_pinned()
        assert is_dry((weight.to(dry) * 2).cpu() + 1)
        assert module(torch.randn(4, SIDE)).shape == (4, SIDE)
        assert is_dry(torch.empty(10_000_000_000, dtype=torch.bfloat16).zero_())
        assert not is_dry(torch.zeros(3))
        assert (torch.arange(3) + 1).tolist() == [1, 2, 3]
        module.load_state_dict(module.state_dict())
        assert module.half()[0].weight.dtype == torch.float16


@pytest.mark.parametrize(
    "ask",
    [
        lambda w: w.sum().item(),
        lambda w: (w > 0).nonzero(),
        lambda w: torch.zeros(SIDE).copy_(w[0]),
        lambda w: w.equal(w),
    ],
    ids=["item", "nonzero", "write", "equal"],
)
def test_values_of_dry_host_tensors_are_refused(dry: torch.device, ask: Callable[[torch.Tensor], object]) -> None:
    weight = emulator.dry_parameters(big_layers())[0].weight.detach()
    with emulator.dry_host(), pytest.raises(DryValueError):
        ask(weight)


def test_a_dry_host_tensor_goes_to_a_device_that_is_named(dry: torch.device) -> None:
    weight = emulator.dry_parameters(big_layers())[0].weight
    with emulator.dry_host(), torch.no_grad():
        assert weight.to(dry).device == dry
        assert weight.to("emu").device == dry
        assert weight.to("meta").is_meta
        assert torch.empty(1 << 20, device=dry).device == dry


def test_memory_that_is_registered_takes_weights_as_shapes_until_it_is_let_go(dry: torch.device) -> None:
    """The runtime moves weights to memory of its own that it pins in place."""
    memory, runtime = torch.zeros(4 * SIDE * SIDE, dtype=torch.uint8), torch.emu.cudart()
    weight = emulator.dry_parameters(big_layers())[0].weight.detach()
    assert runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0
    part = memory[64:].view(torch.float32)[: SIDE * 8]
    with emulator.dry_host():
        assert is_dry(memory)
        part.copy_(weight.flatten()[: SIDE * 8])
        with pytest.raises(DryValueError):
            part.sum().item()
    assert runtime.cudaHostUnregister(memory.data_ptr()) == 0
    assert not is_dry(memory)
    assert part.sum().item() == 0.0
