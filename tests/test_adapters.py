"""Adapters beside and within streamed weights: put on, merged, unmerged, exchanged and taken off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit import agree, assert_streams_fully, mlp, noise, same, same_state, streamed
from tests.kit_runtime import map_weights

X = noise(4, 32)


class LoRALinear(nn.Module):
    """A linear layer and a low-rank term beside it."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(noise(4, 32, seed=seed))
        self.B = nn.Parameter(noise(32, 4, seed=seed + 1) / 10)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return out if self.merged else out + x @ self.A.t() @ self.B.t()

    def merge(self, sign: float = 1.0) -> None:
        self.base.weight.data += sign * (self.B @ self.A)
        self.merged = sign > 0


def test_adapter_put_on_merged_unmerged_swapped_and_taken_off() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    original = module[4].weight

    def both(do: Callable[[nn.Sequential], Any]) -> None:
        with torch.no_grad():
            do(module)
            do(twin)

    def put_on(part: nn.Sequential, seed: int = 70) -> None:
        part[4] = LoRALinear(part[4], seed)

    def take_off(part: nn.Sequential) -> None:
        part[4] = part[4].base

    adapters = []
    with streamed(module, edited=True) as handle:
        agree(module, twin, X, times=2)
        before = twin[4].weight.clone()
        both(put_on)
        adapters.append(module[4])
        agree(module, twin, X, times=3)
        both(lambda part: part[4].merge())
        agree(module, twin, X, times=3)
        same(module[4].base.weight.clone(), twin[4].base.weight)
        both(lambda part: part[4].merge(-1.0))
        agree(module, twin, X, times=3)
        both(take_off)
        agree(module, twin, X, times=2)
        both(lambda part: put_on(part, 80))
        adapters.append(module[4])
        agree(module, twin, X, times=3)
        both(take_off)
        both(lambda part: part[4].weight.copy_(before))
        agree(module, twin, X, times=3)
        same(module[4].weight.clone(), before)
        assert_streams_fully(handle)
    assert module[4].weight is original
    for adapter in adapters:
        assert "_compiled_call_impl" not in adapter.__dict__
        assert all(type(p) is nn.Parameter for p in adapter.parameters())


@pytest.mark.parametrize("home", ["memory", "file", "spilled"])
@pytest.mark.parametrize("merge_in_place", [True, False])
def test_one_adapter_taken_off_and_another_put_on_every_layer(home: str, merge_in_place: bool, tmp_path: Path) -> None:
    module = mlp()
    if home == "file":
        map_weights(module, tmp_path / "w.safetensors")
    options = {"spill_dir": tmp_path} if home == "spilled" else {}
    twin = copy.deepcopy(module)
    plain = copy.deepcopy(module)

    def merge(layer: LoRALinear, sign: float) -> None:
        if merge_in_place:
            layer.base.weight.add_(layer.B @ layer.A, alpha=sign)
            layer.merged = sign > 0
        else:
            layer.merge(sign)

    with streamed(module, edited=True, **options), torch.no_grad():
        agree(module, twin, X, times=3)
        for seed in (70, 80):
            for part in (module, twin):
                for at in range(0, len(part), 2):
                    part[at] = LoRALinear(part[at], seed + at)
            agree(module, twin, X, times=3)
            for part in (module, twin):
                for layer in part[::2]:
                    merge(layer, 1.0)
            agree(module, twin, X, times=3)
            # Once in the master, and not once for each time that it was loaded since.
            for ours, theirs in zip(module[::2], twin[::2], strict=True):
                same(ours.base.weight.clone(), theirs.base.weight)
            for part, original in ((module, plain), (twin, plain)):
                for at in range(0, len(part), 2):
                    part[at] = part[at].base
                    part[at].weight.copy_(original[at].weight)
            agree(module, twin, X, times=3)
        same_state(module, plain)
    same_state(module, plain)
    agree(module, plain, X)


def test_adapter_that_is_merged_in_mid_pass() -> None:
    class Merging(nn.Module):
        """Merges its last layer's adapter when half of the layers are done, and unmerges it in the next call."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(LoRALinear(layer, 60 + at) for at, layer in enumerate(mlp(8)[::2]))

        def forward(self, x: Tensor) -> Tensor:
            for at, layer in enumerate(self.layers):
                if at == 4:
                    self.layers[7].merge(-1.0 if self.layers[7].merged else 1.0)
                x = torch.tanh(layer(x))
            return x

    module = Merging().eval()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=6)
    same_state(module, twin)


def test_adapter_that_never_ran_is_no_stranger_to_the_state_dict() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=2)
        for part in (module, twin):
            part[4] = LoRALinear(part[4], 70)
        same_state(module, twin)
        for part in (module, twin):
            part[4] = part[4].base
        same_state(module, twin)
        agree(module, twin, X, times=2)
    same_state(module, twin)


def test_scale_of_an_adapter_changes_from_call_to_call() -> None:
    class Scaled(LoRALinear):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.scale * (x @ self.A.t() @ self.B.t()) if self.scale else self.base(x)

    module = mlp()
    for at in range(0, len(module), 2):
        module[at] = Scaled(module[at], 70 + at)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        for scale in (1.0, 1.0, 0.0, 0.5, 0.0, 2.0):
            for part in (module, twin):
                for layer in part[::2]:
                    layer.scale = scale
            agree(module, twin, X)
