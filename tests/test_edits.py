"""Weights that the user changes while they stream: every way in reaches the master once, and the next call sees it."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit import agree, assert_streams_fully, mlp, noise, same, same_state, streamed

X = noise(4, 32)


def _optimizer_step(module: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


def _adam_step(module: nn.Sequential) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for param in module.parameters():
        param.grad = torch.full(param.shape, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def _replace(module: nn.Sequential) -> None:
    module[4].weight = nn.Parameter(noise(32, 32, seed=21))


def _data_is_other_tensor(module: nn.Sequential) -> None:
    module[4].weight.data = noise(32, 32, seed=21)


def _data_is_strided_tensor(module: nn.Sequential) -> None:
    module[4].weight.data = noise(32, 32, seed=21).t()


def _data_has_another_size(module: nn.Sequential) -> None:
    module[4].weight.data = noise(48, 32, seed=21)
    module[4].bias.data = noise(48, seed=21)
    module[6].weight.data = noise(32, 48, seed=22)


def _in_state_dict(module: nn.Sequential) -> None:
    module.state_dict()["4.weight"].copy_(noise(32, 32, seed=23))


def _swap_two(module: nn.Sequential) -> None:
    module[2].weight, module[6].weight = module[6].weight, module[2].weight


def _swap_layers(module: nn.Sequential) -> None:
    module[2], module[6] = module[6], module[2]


def _swap_data(module: nn.Sequential) -> None:
    module[2].weight.data, module[6].weight.data = module[6].weight.data, module[2].weight.data


def _through_a_view(module: nn.Sequential) -> None:
    view = module[4].weight.view(-1)
    view[7:40] = 3.0


def _through_numpy(module: nn.Sequential) -> None:
    module[4].weight.numpy()[2] = 5.0


def _through_detach(module: nn.Sequential) -> None:
    module[4].weight.detach().view(-1).mul_(2.0)


def _load_state_dict(module: nn.Sequential) -> None:
    module.load_state_dict(mlp(seed=31).state_dict())


def _load_assigning(module: nn.Sequential) -> None:
    module.load_state_dict(mlp(seed=31).state_dict(), assign=True)


def _apply_reset(module: nn.Sequential) -> None:
    torch.manual_seed(4)
    module.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)


def _init(module: nn.Sequential) -> None:
    nn.init.constant_(module[4].weight, 0.01)
    nn.init.eye_(module[6].weight)


def _new_layer(module: nn.Sequential) -> None:
    module.append(mlp(1, seed=13)[0])


def _delete_layer(module: nn.Sequential) -> None:
    del module[4]


def _no_bias(module: nn.Sequential) -> None:
    module[4].bias = None


def _prune(module: nn.Sequential) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(module[4], "weight", amount=0.3)


def _prune_for_good(module: nn.Sequential) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(module[4], "weight", amount=0.3)
    prune.remove(module[4], "weight")


def _parametrize(module: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(module[4])


def _foreach(module: nn.Sequential) -> None:
    torch._foreach_mul_(list(module.parameters()), 0.75)


def _vector(module: nn.Sequential) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, module.parameters())


EDITS: dict[str, Callable[[nn.Sequential], Any]] = {
    "weight.add_": lambda m: m[4].weight.add_(1.0),
    "weight.data.add_": lambda m: m[4].weight.data.add_(1.0),
    "weight.mul_ by another weight": lambda m: m[4].weight.mul_(m[2].weight),
    "weight.copy_ of another weight": lambda m: m[4].weight.copy_(m[2].weight.t()),
    "row fill_": lambda m: m[4].weight[0].fill_(2.0),
    "data row fill_": lambda m: m[4].weight.data[0].fill_(2.0),
    "setitem": lambda m: m[4].weight.__setitem__((slice(3), 1), 2.0),
    "setitem of a mask": lambda m: m[4].weight.__setitem__(m[4].weight > 0, 0.0),
    "out=": lambda m: torch.mul(m[2].weight, 2.0, out=m[4].weight),
    "clamp_ and zero_": lambda m: (m[4].weight.clamp_(-0.05, 0.05), m[6].bias.zero_()),
    "state dict": _in_state_dict,
    "through a view": _through_a_view,
    "through numpy": _through_numpy,
    "through detach": _through_detach,
    "data replaced": _data_is_other_tensor,
    "data replaced by a strided tensor": _data_is_strided_tensor,
    "data of another size": _data_has_another_size,
    "parameter replaced": _replace,
    "two weights swapped": _swap_two,
    "two layers swapped": _swap_layers,
    "two data swapped": _swap_data,
    "load_state_dict": _load_state_dict,
    "load_state_dict assign": _load_assigning,
    "reset_parameters": _apply_reset,
    "init": _init,
    "layer added": _new_layer,
    "layer removed": _delete_layer,
    "bias removed": _no_bias,
    "pruned": _prune,
    "pruned for good": _prune_for_good,
    "weight norm": _parametrize,
    "foreach": _foreach,
    "parameters from a vector": _vector,
    "SGD with momentum": _optimizer_step,
    "AdamW": _adam_step,
    "half and back": lambda m: m.half().float(),
    "bfloat16 bits": lambda m: m.bfloat16().float(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "to contiguous": lambda m: m.to(memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_edit_between_passes(edit: Callable[[nn.Sequential], Any]) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=3)
        with torch.no_grad():
            edit(module)
            edit(twin)
        agree(module, twin, X, times=3)
        same_state(module, twin)
    same_state(module, twin)
    agree(module, twin, X)


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_edit_before_the_first_pass_and_just_before_closing(edit: Callable[[nn.Sequential], Any]) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        with torch.no_grad():
            edit(module)
            edit(twin)
        agree(module, twin, X, times=2)
        if edit is not _delete_layer and edit is not _parametrize:
            with torch.no_grad():
                edit(module)
                edit(twin)
    same_state(module, twin)
    agree(module, twin, X)


class Editing(nn.Module):
    """A layer whose forward changes its weight first."""

    def __init__(self, edit: Callable[[nn.Linear], Any], seed: int) -> None:
        super().__init__()
        self.edit = edit
        self.linear = mlp(1, seed=seed)[0]

    def forward(self, x: Tensor) -> Tensor:
        self.edit(self.linear)
        return self.linear(x).tanh()


class SelfEditing(nn.Linear):
    """A linear layer that changes its own bound weight in forward, after using it."""

    edit: Callable[[nn.Linear], Any]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        type(self).edit(self)
        return x


INSIDE: dict[str, Callable[[nn.Linear], Any]] = {
    "weight.add_": lambda m: m.weight.add_(0.125),
    "weight.data.add_": lambda m: m.weight.data.add_(0.125),
    "row fill_": lambda m: m.weight[0].fill_(0.5),
    "data row add_": lambda m: m.weight.data[1].add_(0.5),
    "data replaced": lambda m: setattr(m.weight, "data", m.weight * 0.5),
    "data replaced by a new tensor": lambda m: setattr(m.weight, "data", noise(32, 32, seed=50)),
    "parameter replaced": lambda m: setattr(m, "weight", nn.Parameter(noise(32, 32, seed=50))),
    "both": lambda m: (m.weight.mul_(0.5), m.bias.data.add_(1.0)),
    "state dict": lambda m: m.state_dict()["weight"].mul_(0.5),
    "detach": lambda m: m.weight.detach()[3].add_(0.5),
    "copy_": lambda m: m.weight.copy_(m.weight.t().clone()),
}


@pytest.mark.parametrize("edit", INSIDE.values(), ids=INSIDE.keys())
def test_edit_in_a_parents_forward(edit: Callable[[nn.Linear], Any]) -> None:
    def nothing(_linear: nn.Linear) -> None:
        pass

    module = nn.Sequential(*(Editing(edit if i == 2 else nothing, i) for i in range(6))).eval()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        for _ in range(5):
            agree(module, twin, X)
            same_state(module, twin)
    same_state(module, twin)
    agree(module, twin, X)


@pytest.mark.parametrize("edit", INSIDE.values(), ids=INSIDE.keys())
def test_edit_in_the_owners_forward(edit: Callable[[nn.Linear], Any]) -> None:
    class Own(SelfEditing):
        pass

    Own.edit = staticmethod(edit)
    module = mlp(6)
    owner = Own(32, 32)
    owner.load_state_dict(module[4].state_dict())
    module[4] = owner
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        for _ in range(5):
            agree(module, twin, X)
            same_state(module, twin)
    same_state(module, twin)
    agree(module, twin, X)


def test_weight_edited_while_prefetched_for_the_next_pass() -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module, 0.4):
        for step in range(8):
            agree(module, twin, X)
            with torch.no_grad():
                for part in (module, twin):
                    part[2 * step].weight.add_(0.5)


def test_later_layer_edited_by_an_earlier_one() -> None:
    class Reaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(8)

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                if number == 2:
                    self.layers[4].weight.add_(0.25)
                    self.layers[14].weight.data.mul_(0.5)
                    self.layers[0].bias.add_(1.0)
                x = layer(x)
            return x

    module = Reaching().eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        for _ in range(5):
            agree(module, twin, X)
            same_state(module, twin)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
@pytest.mark.parametrize("taken_before", [True, False], ids=["taken before", "taken inside"])
def test_training_steps(kind: type[torch.optim.Optimizer], taken_before: bool) -> None:
    module = mlp().train()
    twin = copy.deepcopy(module)
    ours = kind(module.parameters(), lr=0.05) if taken_before else None
    theirs = kind(twin.parameters(), lr=0.05)
    with streamed(module):
        if ours is None:
            ours = kind(module.parameters(), lr=0.05)
        for step in range(5):
            for part, optimizer in ((module, ours), (twin, theirs)):
                optimizer.zero_grad()
                part(noise(4, 32, seed=step)).square().sum().backward()
                optimizer.step()
            same_state(module, twin)
            agree(module, twin, X)
    same_state(module, twin)


def test_edit_of_the_parameter_object_taken_before_opening() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    weight, bias = module[4].weight, module[2].bias
    with streamed(module) as handle, torch.no_grad():
        agree(module, twin, X, times=3)
        weight.add_(1.0)
        bias[3:].mul_(2.0)
        twin[4].weight.add_(1.0)
        twin[2].bias[3:].mul_(2.0)
        agree(module, twin, X)
        same(module[4].weight.clone(), twin[4].weight)
        agree(module, twin, X, times=3)
        assert_streams_fully(handle)
    same_state(module, twin)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9])
def test_edit_past_autograd_of_the_parameter_object_taken_before_opening(fraction: float) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    taken = list(module.parameters())
    with streamed(module, fraction):
        agree(module, twin, X, times=3)
        for ours, theirs in zip(taken, twin.parameters(), strict=True):
            ours.data.mul_(1.5)
            theirs.data.mul_(1.5)
        agree(module, twin, X, times=3)
    same_state(module, twin)


def test_weights_moved_to_shared_memory_while_streaming() -> None:
    # In a process of its own: where this goes wrong, the process dies.
    program = """
import copy, torch
from tests.kit import agree, mlp, noise, streamed
module = mlp()
twin = copy.deepcopy(module)
x = noise(4, 32)
with streamed(module, edited=True):
    agree(module, twin, x, times=2)
    module.share_memory()
    agree(module, twin, x, times=3)
    with torch.no_grad():
        module[4].weight.add_(1.0)
        twin[4].weight.add_(1.0)
    agree(module, twin, x, times=2)
assert all(p.is_shared() for p in module.parameters())
agree(module, twin, x)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_stays_on_the_device_when_moved_to_it() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module.to("cpu"), twin, X, times=2)
        agree(module.cpu(), twin, X, times=2)


def test_train_and_eval_and_requires_grad() -> None:
    module = mlp()
    with streamed(module, edited=True, idle=True):
        module.train()
        module[2].requires_grad_(False)
        module[4].weight.requires_grad = False
        assert [p.requires_grad for p in module.parameters()][2:6] == [False, False, False, True]
        assert module[2].training
    assert [p.requires_grad for p in module.parameters()][2:6] == [False, False, False, True]
    assert module.training


def test_spilled_weights_take_edits(tmp_path: Any) -> None:
    module = mlp(6, 64)
    twin = copy.deepcopy(module)
    x = noise(2, 64)
    with streamed(module, edited=True, spill_dir=tmp_path), torch.no_grad():
        agree(module, twin, x, times=2)
        for part in (module, twin):
            part[4].weight.add_(1.0)
            part[6].weight[3].zero_()
            part[8].weight.data.mul_(2.0)
        agree(module, twin, x, times=3)
        for part in (module, twin):
            part[4].weight.numpy()[0] = 1.0
        agree(module, twin, x, times=2)
        same_state(module, twin)
    same_state(module, twin)
    agree(module, twin, x)
    assert list(tmp_path.iterdir()) == []
