"""Outermost modules that are called in turn: plans of large ones survive calls of small ones."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.kit import agree, mlp, noise, same, streamed

X = noise(4, 32)


def _last(handle: object, root: str) -> object:
    return [record for record in handle.telemetry.passes if record.root == root][-1]  # type: ignore[attr-defined]


def test_a_small_root_does_not_drive_out_the_plan_of_a_large_one() -> None:
    modules = {"large": mlp(40), "small": nn.Linear(8, 8)}
    twin = copy.deepcopy(modules)
    x = noise(4, 8)
    with streamed(modules, 0.5) as handle, torch.no_grad():
        for _ in range(9):
            same(modules["large"](X), twin["large"](X))
            same(modules["small"](x), twin["small"](x))
        small = _last(handle, "small")
        # What was staged ahead made room for the small one and was loaded again; the residents were not, but in a pass
        # that begins with a new plan.
        weights = handle.telemetry.weights_bytes
        steady = [record for record in handle.telemetry.passes if record.root == "large"][-4:]
        assert any(r.streamed_bytes <= weights - r.resident_bytes + r.window_bytes for r in steady)
        assert small.streamed_bytes <= 2 * sum(p.numel() * 4 for p in twin["small"].parameters())
        assert small.policy == "overlap_async"


def test_large_roots_take_the_memory_over_from_each_other() -> None:
    modules = {"one": mlp(10, seed=1), "two": mlp(12, seed=2)}
    twin = copy.deepcopy(modules)
    with streamed(modules, 0.4) as handle:
        for _ in range(3):
            agree(modules["one"], twin["one"], X, times=2)
            agree(modules["two"], twin["two"], X, times=2)
        given = handle.telemetry.memory_bytes
        assert all(r.resident_bytes + r.window_bytes <= given for r in handle.telemetry.passes)
        assert {r.policy for r in handle.telemetry.passes[-2:]} == {"overlap_async"}


def test_a_module_of_a_root_is_a_root_where_it_is_called_alone() -> None:
    module = mlp(12)
    twin = copy.deepcopy(module)
    with streamed(module, 0.4) as handle:
        for _ in range(3):
            agree(module, twin, X, times=2)
            agree(module[4], twin[4], X)
        assert {record.root for record in handle.telemetry.passes} == {"Sequential", "4"}
