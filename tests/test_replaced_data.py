"""Parameters that come to hold other data while copies of what they held are in fast memory, or on their way there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmstream.device.device import Part
from tests.kit import agree, assert_streams_fully, mlp, noise, same, same_state, streamed

X = noise(4, 32)


def _same_size(layers: nn.Sequential) -> None:
    layers[6].weight.data = noise(32, 32, seed=41)


def _wider(layers: nn.Sequential) -> None:
    layers[6].weight.data = noise(160, 32, seed=41)
    layers[6].bias.data = noise(160, seed=42)
    layers[8].weight.data = noise(32, 160, seed=43)


def _narrower(layers: nn.Sequential) -> None:
    layers[6].weight.data = noise(7, 32, seed=41)
    layers[6].bias.data = noise(7, seed=42)
    layers[8].weight.data = noise(32, 7, seed=43)


def _strided(layers: nn.Sequential) -> None:
    layers[6].weight.data = noise(32, 96, seed=41)[:, ::3]


def _the_last(layers: nn.Sequential) -> None:
    layers[-2].weight.data = noise(320, 32, seed=41)
    layers[-2].bias.data = noise(320, seed=42)


def _then_written(layers: nn.Sequential) -> None:
    _the_last(layers)
    layers[-2].weight.add_(0.5)
    layers[-2].bias[200:].fill_(1.5)


def _swapped(layers: nn.Sequential) -> None:
    layers[6].weight.data, layers[8].weight.data = layers[8].weight.data, layers[6].weight.data
    layers[8].weight.mul_(0.5)


def _set_to_others(layers: nn.Sequential) -> None:
    layers[-2].weight.set_(noise(320, 32, seed=41))
    layers[-2].bias.set_(noise(320, seed=42))
    layers[-2].weight.mul_(0.5)


def _transposed(layers: nn.Sequential) -> None:
    layers[6].weight.t_()
    layers[8].weight.transpose_(0, 1).mul_(0.5)


def _cut(layers: nn.Sequential) -> None:
    layers[-2].weight.as_strided_((16, 32), (32, 1))
    layers[-2].bias.as_strided_((16,), (1,))


def _tensors_swapped(layers: nn.Sequential) -> None:
    torch.utils.swap_tensors(layers[6].weight, nn.Parameter(noise(32, 32, seed=41)))


def _converted_by_swapping(layers: nn.Sequential) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layers.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "same size": _same_size,
    "wider": _wider,
    "narrower": _narrower,
    "strided": _strided,
    "the last": _the_last,
    "then written": _then_written,
    "swapped": _swapped,
    "set to others": _set_to_others,
    "transposed": _transposed,
    "cut": _cut,
}
BETWEEN: dict[str, Callable[[nn.Sequential], Any]] = {
    **CHANGES,
    "tensors swapped": _tensors_swapped,
    "converted by swapping": _converted_by_swapping,
}


class Reaching(nn.Module):
    """Its layers' data are changed between two of them, once."""

    def __init__(self, change: Callable[[nn.Sequential], Any], at: int, in_call: int) -> None:
        super().__init__()
        self.layers = mlp(8)
        self.change, self.at, self.in_call, self.call = change, at, in_call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.call += 1
        for number, layer in enumerate(self.layers):
            if number == self.at and self.call == self.in_call:
                self.change(self.layers)
            x = layer(x)
        return x


@pytest.mark.parametrize("memory", [0.35, 0.9])
@pytest.mark.parametrize("in_call", [1, 3])
@pytest.mark.parametrize("at", [2, 5, 12])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_data_replaced_in_the_midst_of_a_pass(change: Any, at: int, in_call: int, memory: float) -> None:
    module = Reaching(change, at, in_call).eval()
    twin = copy.deepcopy(module)
    with streamed(module, memory, edited=True):
        agree(module, twin, X, times=5)
        same_state(module, twin)
    same_state(module, twin)
    agree(module, twin, X)


@pytest.mark.parametrize("share", [0.35, 0.9])
@pytest.mark.parametrize("change", BETWEEN.values(), ids=BETWEEN.keys())
def test_data_replaced_and_written_before_the_next_pass(change: Any, share: float) -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module, share, edited=True), torch.no_grad():
        agree(module, twin, X, times=3)
        for part in (module, twin):
            change(part)
            for param in part.parameters():
                param.mul_(0.75)
        same_state(module, twin)
        agree(module, twin, X, times=3)
    agree(module, twin, X)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("width", [7, 32, 48])
def test_data_set_on_parameter_objects_that_were_taken_before_opening(width: int, written: bool) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    taken = [(part[2].weight, part[2].bias, part[4].weight) for part in (module, twin)]
    with streamed(module, edited=True), torch.no_grad():
        agree(module, twin, X, times=3)
        for weight, bias, following in taken:
            weight.data, bias.data = noise(width, 32, seed=6), noise(width, seed=7)
            following.data = noise(32, width, seed=9)
            for param in (weight, bias, following) if written else ():
                param.mul_(0.75)
        agree(module, twin, X, times=3)
    agree(module, twin, X)


def _transposed_data(weight: nn.Parameter, bias: nn.Parameter, following: nn.Parameter) -> None:
    weight.data = weight.data.t()


def _cut_data(weight: nn.Parameter, bias: nn.Parameter, following: nn.Parameter) -> None:
    weight.data, bias.data, following.data = weight.data[:16], bias.data[:16], following.data[:, :16]


def _other_data(weight: nn.Parameter, bias: nn.Parameter, following: nn.Parameter) -> None:
    weight.data, bias.data, following.data = noise(48, 32, seed=6), noise(48, seed=7), noise(32, 48, seed=9)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("change", [_transposed_data, _cut_data, _other_data])
def test_parameter_objects_taken_before_opening_and_changed(change: Callable[..., None], kept: bool) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    taken = [[part[2].weight, part[2].bias, part[4].weight] for part in (module, twin)]
    with streamed(module, edited=True):
        agree(module, twin, X, times=3)
        for params in taken:
            change(*params)
            if not kept:
                params.clear()
        agree(module, twin, X, times=3)
        same_state(module, twin)
    agree(module, twin, X)


@pytest.mark.parametrize("in_file", [False, True])
def test_what_stands_for_a_parameter_is_written_where_its_data_are_now(in_file: bool, tmp_path: Path) -> None:
    module = mlp(8, 64)
    twin = copy.deepcopy(module)
    taken = module[4].weight, module[4].bias, module[6].weight
    options = {"spill_dir": tmp_path} if in_file else {}
    with streamed(module, edited=True, **options), torch.no_grad():
        agree(module, twin, noise(4, 64), times=3)
        shown, detached, before = module[4].weight, module[4].weight.detach(), twin[4].weight.clone()
        for part, params in ((module, taken), (twin, (twin[4].weight, twin[4].bias, twin[6].weight))):
            params[0].data, params[1].data, params[2].data = noise(2, 64), noise(2, seed=1), noise(64, 2, seed=2)
            part[4].weight.mul_(0.5)
            part[4].bias.add_(0.25)
        same_state(module, twin)
        agree(module, twin, noise(4, 64), times=3)
        same(detached + 0, before)
        same(shown + 0, twin[4].weight)
    same(detached + 0, before)
    for part in (module, twin):
        part[4].weight.data = noise(3, 64, seed=5)
    same(shown + 0, twin[4].weight)


class Own(nn.Linear):
    """Does something with its own parameters before it computes, once."""

    act: Callable[[Own], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        act, self.act = self.act, None
        if act is not None:
            act(self)
        return super().forward(x)


def _own_cut(linear: Own) -> None:
    linear.weight.set_(noise(8, 32, seed=1))
    linear.bias.set_(noise(8, seed=2))
    linear.weight.data.mul_(0.5)


def _own_wider(linear: Own) -> None:
    linear.weight.set_(noise(64, 32, seed=1))
    linear.bias.set_(noise(64, seed=2))
    linear.weight.data.mul_(0.5)


def _own_transposed(linear: Own) -> None:
    linear.weight.t_()
    linear.weight.detach().mul_(0.5)


def _own_tensors_swapped(linear: Own) -> None:
    torch.utils.swap_tensors(linear.weight, nn.Parameter(noise(32, 32, seed=4)))


@pytest.mark.parametrize("change", [_own_cut, _own_wider, _own_transposed, _own_tensors_swapped])
@pytest.mark.parametrize("share", [0.35, 0.9])
def test_a_layer_that_changes_its_own_parameters(change: Callable[[Own], None], share: float) -> None:
    module = mlp(8)
    module[14].__class__ = Own
    twin = copy.deepcopy(module)
    with streamed(module, share, edited=True):
        agree(module, twin, X, times=3)
        module[14].act = twin[14].act = change
        agree(module, twin, X, times=3)
        same_state(module, twin)
    same_state(module, twin)


@pytest.mark.parametrize("at", [2, 5, 8])
def test_tensors_swapped_in_the_midst_of_a_pass(at: int) -> None:
    module = Reaching(_tensors_swapped, at, 3).eval()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=5)
        same_state(module, twin)
    same_state(module, twin)


def test_copies_of_a_parameter_that_was_written_in_this_pass() -> None:
    module = mlp(8)
    module[6].__class__ = Own
    twin = copy.deepcopy(module)
    copies: list[Any] = []

    def change(linear: Own) -> None:
        linear.weight.mul_(0.5)
        linear.bias.add_(1.0)
        copies.append((copy.deepcopy(linear.weight), pickle.loads(pickle.dumps(linear.bias)), linear.bias.tolist()))

    with streamed(module, edited=True):
        agree(module, twin, X, times=3)
        module[6].act = twin[6].act = change
        agree(module, twin, X, times=2)
    ours, theirs = copies
    same(ours[:2], theirs[:2])
    assert ours[2] == theirs[2]


def test_parameter_replaced_after_opening_streams_too() -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True) as handle:
        agree(module, twin, X, times=2)
        for part in (module, twin):
            for seed, linear in enumerate(part[::2]):
                linear.weight = nn.Parameter(noise(32, 32, seed=seed) / 6)
        agree(module, twin, X, times=4)
        assert_streams_fully(handle)
    replaced = [linear.weight for linear in module[::2]]
    assert all(type(weight) is nn.Parameter for weight in replaced)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_values_read_between_a_conversion_and_the_next_pass(dtype: torch.dtype) -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True), torch.no_grad():
        agree(module, twin, X, times=2)
        module.to(dtype)
        twin.to(dtype)
        same_state(module, twin)
        same(module[4].weight[0], twin[4].weight[0])
        same(module[4].weight.sum(), twin[4].weight.sum())
        same(copy.deepcopy(module).state_dict(), twin.state_dict())
        module[4].weight.add_(1.0)
        twin[4].weight.add_(1.0)
        agree(module, twin, X.to(dtype), times=2)
    agree(module, twin, X.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_conversion_to_another_dtype_while_streaming(dtype: torch.dtype) -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=3)
        assert module.to(dtype) is module
        twin.to(dtype)
        assert {p.dtype for p in module.parameters()} == {dtype}
        agree(module, twin, X.to(dtype), times=3)
        same_state(module, twin)
    same_state(module, twin)
    agree(module, twin, X.to(dtype))


def test_a_detached_tensor_keeps_its_shape() -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module), torch.no_grad():
        agree(module, twin, X)
        with pytest.raises(RuntimeError, match=r"t_.*detached tensor of 4\.weight.*clone"):
            module[4].weight.data.t_()
        agree(module, twin, X, times=2)


def test_a_part_takes_no_bytes_past_its_end() -> None:
    part = Part(torch.zeros(64, dtype=torch.uint8), 0)
    with pytest.raises(ValueError, match="65 bytes at 0 do not fit in a part of 64"):
        part.overwrite(0, torch.zeros(65, dtype=torch.uint8))
    with pytest.raises(ValueError, match="8 bytes at 60 do not fit"):
        part.overwrite(60, torch.zeros(8, dtype=torch.uint8))
