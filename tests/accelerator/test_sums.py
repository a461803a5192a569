"""Gradients of weights with several uses in one graph, on a device."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fmstream
from fmstream.emulator.backlog import Execution
from tests.accelerator.kit import fresh, here, on_host, twin_on
from tests.kit import budget, same
from tests.test_gradient_sums import Again, X, Y


def gradients(module: nn.Module) -> Any:
    """Gradients of two passes together, and the loss."""
    module.zero_grad()
    x, y = X.to(here.name), Y.to(here.name)
    loss = module(x).square().sum() + module(y).sum()
    loss.backward()
    return on_host([loss, *(param.grad for param in module.parameters())])


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("execution", ["eager", "late"])
def test_weight_used_twice_in_a_module_that_is_called_again(execution: Execution, fraction: float) -> None:
    fresh(execution)
    module = Again()
    twin = twin_on(module)
    with fmstream.stream(module, device=here.name, memory=budget(module, fraction)) as handle:
        for _ in range(3):
            same(gradients(module), gradients(twin))
        masters = handle._session.weights.masters
        kept = [master.in_graph for master in masters]
        same(gradients(module), gradients(twin))
        for master, known in zip(masters, kept, strict=True):
            assert master.in_graph is known
            assert known is not None
            assert known.numel() == 0
