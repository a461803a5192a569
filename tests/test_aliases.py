"""Tensors and objects that reach a weight by another way: aliases, stand-ins that were kept, copies of modules."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fmstream
from tests.kit import agree, mlp, noise, same, streamed
from tests.kit_runtime import map_weights

X = noise(4, 32)


class Stash(nn.Module):
    """Keeps a view of its weight from its first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(32, 32, seed=5), requires_grad=False)
        self.turned: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.turned is None:
            self.turned = self.weight.t()
        return torch.tanh(x @ self.turned)


def test_a_view_that_a_module_stashes_goes_on_to_show_the_weight() -> None:
    module = nn.Sequential(*(Stash() for _ in range(6)))
    twin = copy.deepcopy(module)
    with streamed(module, edited=True) as handle, torch.no_grad():
        for step in range(5):
            agree(module, twin, X)
            if step == 2:
                for part in (*module, *twin):
                    part.weight.mul_(0.9)
        assert handle._session._executor is None or handle._session._executor.num_loaded == 0
    agree(module, twin, X)


@pytest.mark.parametrize("alias", [lambda w: w.data, lambda w: w.detach().numpy(), lambda w: w.detach()])
def test_an_alias_made_before_the_handle_is_written(alias: Any) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    aliases = [alias(part.weight) for sequence in (module, twin) for part in sequence if isinstance(part, nn.Linear)]
    with streamed(module, 0.6), torch.no_grad():
        for _ in range(5):
            agree(module, twin, X)
            for tensor in aliases:
                tensor *= 0.9


def test_a_stand_in_that_is_kept_over_a_new_survey_stays_true(tmp_path: Path) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    map_weights(module, tmp_path / "w.safetensors")
    with streamed(module, edited=True), torch.no_grad():
        agree(module, twin, X)
        kept, other = module[0].weight, twin[0].weight
        for part in (module, twin):
            part[4].bias = nn.Parameter(noise(32, seed=8))
        agree(module, twin, X)
        for part in (module, twin):
            part[0].weight.mul_(2.0)
        assert torch.equal(kept.clone(), other)
        kept.add_(1.0)
        other.add_(1.0)
        agree(module, twin, X, times=2)
    assert torch.equal(kept.clone(), other)
    agree(module, twin, X)


def test_a_copy_by_the_modules_own_state_does_not_stream() -> None:
    class Own(nn.Sequential):
        def __getstate__(self) -> dict[str, Any]:
            return dict(self.__dict__)

    module = Own(*mlp())
    with streamed(module), torch.no_grad():
        module(X)
        clone = copy.deepcopy(module)
        for param in clone.parameters():
            param.zero_()
        assert not clone(X).any()


def test_an_array_of_a_weight_that_is_written_in_its_forward() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.numpy()[0] *= 0.9
            return super().forward(x)

    module = nn.Sequential(*(Writes(32, 32) for _ in range(6))).requires_grad_(False)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=4)


def test_a_default_device_of_the_caller_is_not_where_masters_are_read() -> None:
    class Halves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(0.5)
            return super().forward(x)

    module = nn.Sequential(*(Halves(32, 32) for _ in range(6)))
    twin = copy.deepcopy(module)
    with streamed(module, 0.4), torch.no_grad():
        for _ in range(3):
            with torch.device("meta"):
                output = module(X)
            same(output, twin(X))


def test_a_flat_buffer_of_gradients_is_added_to_in_place() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    flat = {id(part): torch.zeros(sum(p.numel() for p in part.parameters())) for part in (module, twin)}
    for part in (module, twin):
        start = 0
        for param in part.parameters():
            param.grad = flat[id(part)][start : start + param.numel()].view_as(param)
            start += param.numel()
    with streamed(module):
        for _ in range(3):
            module(X).square().sum().backward()
            twin(X).square().sum().backward()
    assert flat[id(module)].any()
    assert torch.equal(flat[id(module)], flat[id(twin)])


def test_gradients_of_parameters_that_were_listed_before_the_handle() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    listed = list(module.parameters())
    with streamed(module):
        module(X)
        for ours, theirs in zip(
            torch.autograd.grad(module(X).sum(), listed),
            torch.autograd.grad(twin(X).sum(), list(twin.parameters())),
            strict=True,
        ):
            assert torch.equal(ours, theirs)
        inside = torch.autograd.grad(module(X).sum(), list(module.parameters()))
        assert all(grad is not None for grad in inside)


def test_a_lazy_parameter_stays_in_place() -> None:
    module = nn.Sequential(*mlp(), nn.LazyLinear(8))
    assert fmstream.smallest_memory(module) > 0
    gc.collect()


class Pair(nn.Module):
    """Two weights, of which the second is written in each call."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first = nn.Parameter(noise(32, 32, seed=seed) / 6, requires_grad=False)
        self.second = nn.Parameter(noise(32, 32, seed=-seed) / 6, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.second.mul_(0.875)
        return torch.tanh(x @ self.first + x @ self.second)


class Arrays(nn.Module):
    """Writes an array over a parameter of a pair that is still to come, in one call."""

    def __init__(self, target: int, at: int) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair(seed) for seed in range(1, 9))
        self.target, self.at, self.calls = target, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number, pair in enumerate(self.pairs):
            if number == self.at and self.calls == 4:
                self.pairs[self.target].first.numpy()[:] += 0.25
            x = pair(x)
        return x


@pytest.mark.parametrize(("target", "at"), [(2, 1), (4, 3), (4, 4), (6, 5), (7, 1)])
def test_an_array_over_a_parameter_of_which_a_copy_is_on_its_way(target: int, at: int) -> None:
    module = Arrays(target, at).eval()
    twin = copy.deepcopy(module)
    with streamed(module, 0.5, edited=True):
        agree(module, twin, X, times=6)
    agree(module, twin, X)


class KeepsNothing(nn.Linear):
    """Keeps a view of no elements of each of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight[:0]
        return super().forward(x)


@pytest.mark.parametrize("at", [0, 6, 14])
def test_an_empty_view_that_is_kept_concerns_its_own_weight(at: int) -> None:
    module = mlp(8)
    module[at].__class__ = KeepsNothing
    twin = copy.deepcopy(module)
    with streamed(module, edited=True) as handle:
        agree(module, twin, X, times=6)
        in_place = handle._session.weights.in_place
        assert in_place <= {id(module[at].weight)}


def test_what_was_left_in_place_is_forgotten_when_it_leaves_its_module() -> None:
    module = nn.Sequential(Stash(), *mlp(8))
    twin = copy.deepcopy(module)
    with streamed(module, edited=True) as handle:
        agree(module, twin, X, times=3)
        weights = handle._session.weights
        assert weights.in_place == {id(module[0].weight)}
        for part in (module, twin):
            part[0] = mlp(1)
        agree(module, twin, X, times=2)
        assert not weights.in_place
