"""Detached tensors of streamed parameters that are given a gradient, or made parameters themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.kit import mlp, noise, same, streamed
from tests.test_gradients import backward, same_grads

X = noise(4, 32)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_detached_tensor_that_requires_a_gradient_is_a_leaf_of_its_own(frozen: bool) -> None:
    module = mlp(8).requires_grad_(not frozen)
    twin = copy.deepcopy(module)
    with streamed(module):
        same(backward(module), backward(twin))
        leaves = [part[4].weight.detach().requires_grad_() for part in (module, twin)]
        for leaf in leaves:
            assert leaf.requires_grad
            (X @ leaf).square().sum().backward()
            (X @ leaf.t()).sin().sum().backward()
        same(leaves[0].grad, leaves[1].grad)
        grads = [torch.autograd.grad((X @ leaf).exp().sum(), leaf) for leaf in leaves]
        same(*grads)
        same_grads(module, twin)
        assert module[4].weight.requires_grad is not frozen
        same(backward(module), backward(twin))
    leaves[0].requires_grad_(False)
    assert module[4].weight.requires_grad is not frozen


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_made_of_anothers_data(frozen: bool, wanted: bool) -> None:
    module = mlp(8).requires_grad_(not frozen)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        for _ in range(2):
            same(backward(module), backward(twin))
            for part in (module, twin):
                part[4].weight = nn.Parameter(part[4].weight.data, requires_grad=wanted)
            assert module[4].weight.requires_grad is wanted
            for _ in range(2):
                same(backward(module), backward(twin))
                same_grads(module, twin)
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in twin.parameters()]
