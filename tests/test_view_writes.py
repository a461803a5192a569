"""Writes within a forward through views of a weight that autograd does not count: the master takes them all."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fmstream
from tests.kit import agree, assert_streams_fully, mlp, noise, same, same_state, streamed, weights_bytes
from tests.kit_runtime import map_weights
from tests.test_edits import Editing, SelfEditing

X = noise(4, 32)


def _zero(array: Any) -> None:
    array[...] = 0.25


METHODS: dict[str, Callable[[nn.Linear], Any]] = {
    "row": lambda m: m.weight[0].data.mul_(2.0),
    "flat": lambda m: m.weight.view(-1).data.add_(0.125),
    "t": lambda m: m.weight.t().data.mul_(0.5),
    "T": lambda m: m.weight.T.data[3].add_(0.5),
    "mT of a slice": lambda m: m.weight[4:9].mT.data.neg_(),
    "view of a view of data": lambda m: m.weight.unsqueeze(0).data.squeeze(0).view(-1).data[5:7].fill_(0.5),
    "chunk": lambda m: [part.data.mul_(0.5) for part in m.weight.chunk(3)[1:]],
    "iteration": lambda m: [row.data.add_(0.01) for row in m.weight],
    "detach of a view": lambda m: m.weight.narrow(0, 3, 5).detach().data.mul_(2.0),
    "other dtype": lambda m: m.weight.view(torch.int32).data[2].bitwise_xor_(1 << 20),
    "reshape": lambda m: m.weight.reshape(2, -1).data[1].add_(0.1),
    "the view itself": lambda m: m.weight.diagonal().add_(0.5),
    "data of a bias": lambda m: m.bias[2:].data.add_(0.5),
    "counted and not": lambda m: (m.weight.add_(0.125), m.weight[1].data.add_(0.5), m.weight.data.mul_(0.5)),
    "counted, then an array": lambda m: (m.weight.add_(0.125), _zero(m.weight.numpy()[1])),
    "array of a row": lambda m: _zero(m.weight[3].numpy()),
    "array of a transposed slice": lambda m: _zero(m.weight[2:5].t().detach().numpy()[1:]),
    "asarray of a view": lambda m: _zero(np.asarray(m.weight.view(-1).detach())[7:40]),
    "array of another dtype": lambda m: m.weight.view(torch.int32)[5].numpy().__setitem__(slice(None), 1 << 29),
    "dlpack": lambda m: _zero(np.from_dlpack(m.weight.detach())[2]),
    "dlpack of a view": lambda m: torch.from_dlpack(m.weight.view(-1).detach()[5:]).add_(0.5),
}
FUNCTIONS: dict[str, Callable[[nn.Linear], Any]] = {
    "torch.t": lambda m: torch.t(m.weight).data.mul_(0.5),
    "torch.flatten": lambda m: torch.flatten(m.weight).data[7].add_(0.5),
    "torch.chunk": lambda m: torch.chunk(m.weight, 2)[1].data.neg_(),
    "array of a function's": lambda m: _zero(torch.select(m.weight, 0, 3).numpy()),
    "function and counted": lambda m: (torch.t(m.weight).data.mul_(0.5), m.weight[0].add_(0.5)),
}


SETTINGS = pytest.mark.parametrize(
    ("fraction", "owner"), [(0.5, True), (0.0, False)], ids=["by its owner", "by a parent, little memory"]
)
"""Whose forward writes, and the memory: a parent binds a weight that it reads, where there is room for it."""


def _nothing(_linear: nn.Linear) -> None:
    pass


def _model(edit: Callable[[nn.Linear], Any], *, owner: bool) -> nn.Module:
    """Six linear layers, of which the third edits its own weight, or has it edited by its parent."""
    if not owner:
        return nn.Sequential(*(Editing(edit if i == 2 else _nothing, i) for i in range(6))).eval()

    class Own(SelfEditing):
        pass

    Own.edit = staticmethod(edit)
    module = mlp(6)
    layer = Own(32, 32)
    layer.load_state_dict(module[4].state_dict())
    module[4] = layer
    return module


@SETTINGS
@pytest.mark.parametrize("edit", [*METHODS.values(), *FUNCTIONS.values()], ids=[*METHODS, *FUNCTIONS])
def test_in_every_pass(edit: Callable[[nn.Linear], Any], fraction: float, owner: bool) -> None:
    module = _model(edit, owner=owner)
    twin = copy.deepcopy(module)
    with streamed(module, fraction, edited=True):
        for _ in range(4):
            agree(module, twin, X)
            same_state(module, twin)
    same_state(module, twin)
    agree(module, twin, X)


@SETTINGS
@pytest.mark.parametrize("edit", METHODS.values(), ids=METHODS)
def test_first_in_a_planned_pass(edit: Callable[[nn.Linear], Any], fraction: float, owner: bool) -> None:
    active = [False]
    module = _model(lambda linear: edit(linear) if active[0] else None, owner=owner)
    twin = copy.deepcopy(module)
    with streamed(module, fraction, edited=True) as handle:
        agree(module, twin, X, times=3)
        assert_streams_fully(handle)
        for on in (True, False, True):
            active[0] = on
            agree(module, twin, X, times=2)
            same_state(module, twin)
    same_state(module, twin)
    agree(module, twin, X)


@pytest.mark.parametrize("edit", [*METHODS.values(), *FUNCTIONS.values()], ids=[*METHODS, *FUNCTIONS])
def test_where_all_fits(edit: Callable[[nn.Linear], Any], tmp_path: Any) -> None:
    module = _model(edit, owner=True)
    twin = copy.deepcopy(module)
    map_weights(module, tmp_path / "w.safetensors")
    with fmstream.stream(module, memory=4 * weights_bytes(module)) as handle:
        assert handle._session.resident_plan is not None
        for _ in range(3):
            agree(module, twin, X)
            same_state(module, twin)
    same_state(module, twin)


@pytest.mark.parametrize("edit", [*METHODS.values(), *FUNCTIONS.values()], ids=[*METHODS, *FUNCTIONS])
def test_with_masters_in_a_file(edit: Callable[[nn.Linear], Any], tmp_path: Any) -> None:
    module = _model(edit, owner=True)
    twin = copy.deepcopy(module)
    with streamed(module, 0.3, edited=True, spill_dir=tmp_path):
        for _ in range(4):
            agree(module, twin, X)
            same_state(module, twin)
    same_state(module, twin)


@pytest.mark.parametrize("edit", METHODS.values(), ids=METHODS)
def test_in_a_graph(edit: Callable[[nn.Linear], Any]) -> None:
    def quietly(linear: nn.Linear) -> None:
        with torch.no_grad():
            edit(linear)

    module = _model(quietly, owner=True)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        for _ in range(3):
            for part in (module, twin):
                part(X)
            same_state(module, twin)
    same_state(module, twin)


def test_passes_without_writes_are_compared_to_no_effect() -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module, 0.5) as handle:
        agree(module, twin, X, times=4)
        weights = handle._session.weights
        assert not weights.in_place
        assert not weights.pinned
        assert not weights._watch.checksums
        assert_streams_fully(handle)


def test_views_print_copy_and_pickle_as_plain_tensors() -> None:
    class Looking(nn.Linear):
        seen: list[Any]

        def forward(self, x: Tensor) -> Tensor:
            row = self.weight[2]
            with torch.no_grad():
                type(self).seen.append((repr(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row)), row * 1))
            return super().forward(x)

    Looking.seen = []
    module = mlp(6)
    layer = Looking(32, 32)
    layer.load_state_dict(module[4].state_dict())
    module[4] = layer
    module.requires_grad_(False)
    twin = copy.deepcopy(module)
    with streamed(module):
        for _ in range(3):
            agree(module, twin, X)
            (text, *ours), (plain_text, *theirs) = Looking.seen[-2:]
            assert text == plain_text
            same(ours, theirs)
            assert {type(tensor) for tensor in ours} == {Tensor}


def test_a_view_that_is_handed_out_is_a_plain_tensor_afterwards() -> None:
    class Handing(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.weight[1:3].t()

    module = Handing(32, 32)
    root = nn.ModuleDict({"rest": mlp(6), "last": module})
    twin = copy.deepcopy(root)

    class Whole(nn.Module):
        def __init__(self, parts: nn.ModuleDict) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor) -> Any:
            return self.parts["last"](self.parts["rest"](x))

    ours, theirs = Whole(root), Whole(twin)
    with streamed(ours, edited=True), torch.no_grad():
        for _ in range(4):
            output = ours(X)
            same(output, theirs(X))
            assert type(output[1]) is Tensor


def test_a_compiled_function_takes_views() -> None:
    @torch.compile(backend="eager")
    def mix(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t() + weight[0] + weight.T.sum()

    class Mixing(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(noise(64, 32, seed=seed) / 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(mix(x, self.weight[:32]) + mix(x, self.weight.view(2, 32, 32)[1]))

    module = nn.Sequential(*(Mixing(seed) for seed in range(6)))
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=4)


@pytest.mark.parametrize("fraction", [0.0, 0.6])
def test_an_offset_into_the_storage_is_one_into_the_weight(fraction: float) -> None:
    class Strided(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            row = self.weight.as_strided((self.in_features,), (1,), 2 * self.in_features)
            return super().forward(x) + row + self.weight[1:].as_strided((4,), (2,), 8).sum()

    torch.manual_seed(0)
    module = nn.Sequential(*(Strided(32, 32) for _ in range(6))).eval()
    twin = copy.deepcopy(module)
    with streamed(module, fraction):
        agree(module, twin, noise(2, 32), times=4)
