"""The memory under parameters moves, is shared or is given up while their modules stream."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.kit import agree, mlp, noise, same_state, streamed
from tests.kit_runtime import masters_of

WIDE = 1024
"""Weights of such layers are copied by the workers, and given back to the system when they are freed."""
X = noise(4, WIDE)


def flat_mlp() -> nn.Sequential:
    """Layers whose parameters all lie in one storage."""
    module = mlp(6, 64)
    flat = torch.cat([param.data.flatten() for param in module.parameters()])
    start = 0
    for param in module.parameters():
        param.data = flat[start : start + param.numel()].view_as(param)
        start += param.numel()
    return module


def test_a_storage_of_many_parameters_that_is_moved_to_shared_memory() -> None:
    module, x = flat_mlp(), noise(4, 64)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True), torch.no_grad():
        agree(module, twin, x, times=3)
        for part in (module, twin):
            part[0].weight.share_memory_()
        filled = [torch.full((16384,), 7.0) for _ in range(8)]  # where they lay
        agree(module, twin, x, times=3)
        for part in (module, twin):
            part[4].weight.mul_(0.5)
        agree(module, twin, x, times=3)
        same_state(module, twin)
    del filled


class Sending(nn.Module):
    """Its layers are sent to another process in the midst of one pass."""

    def __init__(self, in_call: int) -> None:
        super().__init__()
        self.layers = mlp(6, WIDE)
        self.in_call, self.call = in_call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.call += 1
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 2 and self.call == self.in_call:
                ForkingPickler.dumps(self.layers)
        return x


def _send_module(module: nn.Module) -> None:
    ForkingPickler.dumps(module)


def _send_state(module: nn.Module) -> None:
    ForkingPickler.dumps(module.state_dict())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sending needs the other process")
@pytest.mark.parametrize("send", [_send_module, _send_state])
def test_modules_sent_to_another_process(send: Callable[[nn.Module], None]) -> None:
    module = mlp(6, WIDE)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True), torch.no_grad():
        agree(module, twin, X, times=3)
        send(module)
        assert all(param.is_shared() for param in module.parameters())
        agree(module, twin, X, times=2)
        for part in (module, twin):
            part[4].weight.mul_(0.5)
        agree(module, twin, X, times=2)
    same_state(module, twin)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sending needs the other process")
@pytest.mark.parametrize("in_call", [1, 3])
def test_modules_sent_in_the_midst_of_a_pass(in_call: int) -> None:
    module = Sending(in_call).eval()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=4)
    same_state(module, twin)


def seen_again(tensor: Tensor) -> Tensor:
    """Another tensor over the same shared memory, as another process has it."""
    fd, num_bytes = tensor.untyped_storage()._share_fd_cpu_()[:2]
    with torch.no_grad():
        return torch.empty(0).set_(torch.UntypedStorage._new_shared_fd_cpu(fd, num_bytes))


@pytest.mark.skipif(sys.platform != "linux", reason="how to look into shared memory a second time is a system's own")
@pytest.mark.parametrize("before", [True, False])
def test_parameters_that_another_process_writes(before: bool) -> None:
    module, x = mlp(6, 64), noise(4, 64)
    twin = copy.deepcopy(module)
    if before:
        module.share_memory()
        there = [seen_again(param) for param in module.parameters()]
    with streamed(module, edited=True) as handle, torch.no_grad():
        agree(module, twin, x, times=2)
        if not before:
            module.share_memory()
            there = [seen_again(master.original) for master in masters_of(handle)]
        for factor in (0.5, 3.0):
            for tensor, param in zip(there, twin.parameters(), strict=True):
                tensor.mul_(factor)
                param.mul_(factor)
            agree(module, twin, x, times=2)
    same_state(module, twin)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_storage_that_is_given_up_and_comes_back(is_held: bool) -> None:
    module = mlp(6, WIDE)
    twin = copy.deepcopy(module)
    held = [part[6].weight for part in (module, twin)] if is_held else []
    kept = twin[6].weight.detach().clone()
    with streamed(module, edited=True), torch.no_grad():
        agree(module, twin, X, times=3)
        for number, part in enumerate((module, twin)):
            storage = held[number].untyped_storage() if is_held else part[6].weight.untyped_storage()
            num_bytes = storage.nbytes()
            storage.resize_(0)
            with pytest.raises(RuntimeError, match="storage of size 0"):
                part(X)
            storage.resize_(num_bytes)
            (held[number] if is_held else part[6].weight).copy_(kept)
        agree(module, twin, X, times=3)
    same_state(module, twin)


def test_memory_that_somebody_looks_into_is_not_spilled(tmp_path: Path) -> None:
    module, x = mlp(8, 64), noise(4, 64)
    twin = copy.deepcopy(module)
    alias, other = module[6].weight.data, twin[6].weight.data
    with streamed(module, edited=True, spill_dir=tmp_path):
        agree(module, twin, x, times=3)
        for tensor in (alias, other):
            tensor.mul_(0.5)
        agree(module, twin, x, times=2)
        same_state(module, twin)
    for tensor in (alias, other):
        tensor.mul_(0.5)
    same_state(module, twin)
