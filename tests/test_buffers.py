"""Buffers of streamed modules: they are never lost, and what a forward writes into them stays."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.kit import agree, mlp, noise, same, same_state, streamed

X = noise(6, 32)


class Scaled(nn.Module):
    """A linear layer times a buffer that the state dict does not hold."""

    def __init__(self, seed: int, shared: Tensor | None = None) -> None:
        super().__init__()
        self.linear = mlp(1, seed=seed)[0]
        self.register_buffer("scale", noise(32, seed=seed), persistent=False)
        if shared is not None:
            self.register_buffer("positions", shared, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale
        return x + self.positions if hasattr(self, "positions") else x


def test_buffers_that_are_not_in_the_state_dict() -> None:
    module = nn.Sequential(*(Scaled(seed) for seed in range(6))).eval()
    twin = copy.deepcopy(module)
    buffers = dict(module.named_buffers())
    with streamed(module):
        agree(module, twin, X, times=4)
        assert dict(module.named_buffers()).keys() == buffers.keys()
        assert not any("scale" in key for key in module.state_dict())
    assert all(value is buffers[name] for name, value in module.named_buffers())


def test_one_buffer_object_in_several_layers() -> None:
    shared = noise(6, 32, seed=40)
    module = nn.Sequential(*(Scaled(seed, shared) for seed in range(6))).eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=3)
        module[0].positions.mul_(2.0)
        twin[0].positions.mul_(2.0)
        assert all(layer.positions is shared for layer in module)
        agree(module, twin, X, times=2)
    assert all(layer.positions is shared for layer in module)


def test_buffer_that_is_a_parameters_own_memory() -> None:
    class Viewing(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.linear = mlp(1, seed=seed)[0]
            self.register_buffer("first", self.linear.weight.detach()[0], persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.first

    module = nn.Sequential(*(Viewing(seed) for seed in range(6))).eval()
    twin = copy.deepcopy(module)
    with streamed(module), torch.no_grad():
        agree(module, twin, X, times=3)
        module[2].linear.weight.add_(1.0)
        twin[2].linear.weight.add_(1.0)
        same(module[2].first, module[2].linear.weight[0])
        module[3].first.fill_(0.5)
        # A deep copy keeps the two apart in the twin only if the memo does not know the storage: write both there.
        twin[3].first.fill_(0.5)
        twin[3].linear.weight[0].fill_(0.5)
        twin[2].first.copy_(twin[2].linear.weight[0])
        same(module[3].linear.weight, twin[3].linear.weight)
        agree(module, twin, X, times=3)


def test_batch_norm_in_train_mode() -> None:
    layers = [layer for linear in mlp(6)[::2] for layer in (linear, nn.BatchNorm1d(32))]
    module = nn.Sequential(*layers).train()
    twin = copy.deepcopy(module)
    with streamed(module):
        for seed in range(5):
            agree(module, twin, noise(6, 32, seed=seed))
            same_state(module, twin)
        assert int(module[1].num_batches_tracked) == 5
    same_state(module, twin)
    module.eval()
    twin.eval()
    agree(module, twin, X)


def test_buffer_replaced_and_changed_in_forward() -> None:
    class Counting(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.linear = mlp(1, seed=seed)[0]
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("memory", torch.zeros(32))
            self.register_buffer("late", None)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            self.calls += 1
            self.memory = 0.5 * self.memory + x.detach().mean(0)
            if self.late is None:
                self.late = self.linear.weight.detach().sum(1)
            return x + self.memory * self.calls + self.late

    module = nn.Sequential(*(Counting(seed) for seed in range(6))).eval()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        for _ in range(5):
            agree(module, twin, X)
            same_state(module, twin)
    same_state(module, twin)
    agree(module, twin, X)


def test_buffer_kept_as_a_view_of_a_weight_in_forward() -> None:
    class Caching(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.linear = mlp(1, seed=seed)[0]
            self.register_buffer("transposed", None, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.transposed is None:
                self.transposed = self.linear.weight.detach().t()
            return self.linear(x) + x @ self.transposed

    module = nn.Sequential(*(Caching(seed) for seed in range(6))).eval()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=5)
    agree(module, twin, X)
    for ours, theirs in zip(module, twin, strict=True):
        same(ours.transposed, theirs.transposed)


def test_buffers_to_another_dtype_while_streaming() -> None:
    module = nn.Sequential(*(Scaled(seed) for seed in range(6))).eval()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=2)
        module.double()
        twin.double()
        agree(module, twin, X.double(), times=3)
        assert all(buffer.dtype is torch.float64 for buffer in module.buffers())
    agree(module, twin, X.double())
