"""The device comes into PyTorch and leaves it, and says what is missing where it cannot."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys

import pytest
import torch
from torch import nn

from fmstream import emulator
from fmstream.emulator import installation
from fmstream.errors import ConfigError
from tests.tree import ROOT

PATCHED = [
    *((torch, name) for name in ("Stream", "Event", "Generator", "empty", "zeros", "randn", "tensor")),
    *((torch.Tensor, name) for name in ("new_empty", "new_zeros", "__dlpack_device__")),
    *((torch.UntypedStorage, name) for name in ("__new__", "__init__", "clone")),
    *((torch.accelerator, name) for name in ("synchronize", "memory_allocated", "current_stream")),
]


def names_now() -> list[object]:
    return [getattr(owner, name) for owner, name in PATCHED]


def test_uninstalling_leaves_pytorch_as_it_was() -> None:
    before = names_now()
    emulator.install()
    emulator.install()
    during = names_now()
    emulator.uninstall()
    emulator.uninstall()
    assert all(now is not then for now, then in zip(during, before, strict=True))
    assert names_now() == before
    with pytest.raises(NotImplementedError):
        torch.ones(2, device="emu")


def test_the_device_works_again_after_it_was_taken_out() -> None:
    emulator.install()
    emulator.uninstall()
    emulator.install()
    emulator.reset()
    assert (torch.ones(3, device="emu") * 2).tolist() == [2.0, 2.0, 2.0]
    emulator.uninstall()


def test_every_private_name_that_is_needed_is_there() -> None:
    assert installation.missing_names() == [], "this PyTorch has moved what the emulator stands on"


def test_a_pytorch_that_lacks_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "NEEDED", ((torch._C, "_no_such_thing"),))
    with pytest.raises(ConfigError, match=r"has no torch\._C\._no_such_thing.*2\.10 to 2\.13"):
        emulator.install()


def test_another_custom_device_is_not_displaced() -> None:
    program = (
        "import torch; torch.utils.rename_privateuse1_backend('other')\n"
        "from fmstream import emulator\n"
        "try: emulator.install()\n"
        "except ValueError as error: print(error)"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert "'other'" in said
    assert "process" in said


def test_there_is_no_machine_before_one_is_asked_for() -> None:
    program = "from fmstream import emulator\ntry: emulator.machine()\nexcept ValueError as error: print(error)"
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert "emulator.install()" in said


def test_a_machine_made_in_inference_mode_works_outside_of_it(installed: None) -> None:
    with torch.inference_mode():
        emulator.reset(capacity=64 << 20)
        assert torch.ones(3, device="emu").is_inference()
    x = torch.ones(3, device="emu", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_memory_goes_back_with_the_last_reference(device: torch.device) -> None:
    gc.collect()
    x = torch.ones(1000, device=device)
    before = torch.emu.memory_allocated()
    gc.disable()
    try:
        for use in (
            lambda: x + 1,
            lambda: (x > 0).nonzero(),
            lambda: x.topk(3),
            lambda: torch.add(x, 1, out=torch.empty(0, device=device)),
            lambda: x.clone().mul_(2),
            lambda: nn.functional.dropout(x),
            lambda: nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 10, 100)] * 3),
            lambda: (x.clone().requires_grad_() * 2).sum().backward(),
        ):
            use()
            assert torch.emu.memory_allocated() == before
    finally:
        gc.enable()


def test_a_tensor_of_an_earlier_machine_is_dead(device: torch.device) -> None:
    old = torch.ones(3, device=device)
    emulator.reset(capacity=64 << 20)
    with pytest.raises(RuntimeError, match="replaced"):
        old + 1


def test_a_device_tensor_is_saved_and_loaded(device: torch.device) -> None:
    x = torch.arange(6.0, device=device)
    saved = io.BytesIO()
    torch.save({"whole": x, "part": x[2:4]}, saved)
    for place, expected in ((None, "emu"), ("cpu", "cpu"), ("emu:0", "emu")):
        saved.seek(0)
        loaded = torch.load(saved, map_location=place)
        assert loaded["whole"].device.type == loaded["part"].device.type == expected
        assert loaded["part"].tolist() == [2.0, 3.0]


def test_host_tensors_are_loaded_to_the_device(device: torch.device) -> None:
    saved = io.BytesIO()
    torch.save(torch.ones(3), saved)
    saved.seek(0)
    loaded = torch.load(saved, map_location=device)
    assert loaded.device == device
    assert loaded.tolist() == [1.0, 1.0, 1.0]


def test_a_module_is_copied_with_its_device(device: torch.device) -> None:
    module = nn.Linear(4, 3).to(device)
    twin = copy.deepcopy(module)
    assert twin.weight.device == device
    assert twin.weight.data_ptr() != module.weight.data_ptr()
    assert torch.equal(twin.weight, module.weight)


def test_a_parameter_takes_data_of_the_device(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.data = torch.zeros(3, device=device)
    assert parameter.device == device
    assert parameter.tolist() == [0.0, 0.0, 0.0]


def test_the_device_may_be_the_default(device: torch.device) -> None:
    with device:
        module = nn.Linear(3, 3)
        y = module(torch.ones(2, 3))
    assert y.device == module.weight.device == device
    assert torch.ones(2).device.type == "cpu"


def test_a_part_by_dlpack_has_a_storage_of_its_own_over_the_same_bytes(device: torch.device) -> None:
    slab = torch.zeros(4096, dtype=torch.uint8, device=device)
    for take in (torch.from_dlpack, lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t))):
        part = take(slab[512:1024])
        assert part.data_ptr() == slab.data_ptr() + 512
        assert part.untyped_storage().nbytes() == 512
        part.view(torch.float32).fill_(1.0)
        assert slab.view(torch.float32).sum().item() == 128.0


def test_a_part_keeps_the_slab_alive(device: torch.device) -> None:
    slab = torch.zeros(4096, dtype=torch.uint8, device=device)
    part = torch.from_dlpack(slab[512:1024])
    del slab
    assert torch.emu.memory_allocated() == 4096
    del part
    assert torch.emu.memory_allocated() == 0


def test_memory_is_counted_and_limited(device: torch.device) -> None:
    emu = torch.emu
    x = torch.empty(1000, device=device)
    assert emu.memory_allocated() == torch.accelerator.memory_allocated() == 4096
    assert emu.memory_reserved() == 2 << 20
    free, total = emu.mem_get_info()
    assert (free, total) == ((256 << 20) - (2 << 20), 256 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(300 << 20, dtype=torch.uint8, device=device)
    del x
    assert emu.max_memory_allocated() == 4096
    emu.reset_peak_memory_stats()
    emu.empty_cache()
    assert (emu.max_memory_allocated(), emu.memory_reserved()) == (0, 0)
    assert emu.memory_stats()["num_ooms"] == 1


def test_the_device_module_answers_as_cuda_does(device: torch.device) -> None:
    emu = torch.get_device_module(device)
    assert emu.is_available()
    assert (emu.device_count(), emu.current_device()) == (1, 0)
    properties = emu.get_device_properties(device)
    assert (properties.name, properties.total_memory) == (emu.get_device_name(), 256 << 20)
    assert "4070" in properties.name
    with emu.device(0), emu.device("emu"):
        emu.set_device(device)
    with pytest.raises(ValueError, match="one device"):
        emu.set_device(1)


def test_kernels_are_seen_with_their_operators_and_bytes(device: torch.device) -> None:
    machine = emulator.machine()
    x = torch.ones(1 << 20, device=device)
    machine.reset_statistics()
    torch.emu.synchronize()
    x.mul_(2)
    torch.emu.synchronize()
    (span,) = [span for span in machine.timeline() if span.lane == "compute"]
    card = machine.card
    assert span.name == "aten::mul.out" or span.name.startswith("aten::mul_")
    # Read once and written once; the same tensor counts for both.
    assert span.end - span.start == pytest.approx(card.kernel_seconds + (4 << 20) / card.memory_bytes_per_second, rel=1)
