"""Gradients through a streamed module are those of the twin on the device; they lie with the parameters on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fmstream.emulator.backlog import Execution
from tests.accelerator.cases import WIDTH, Block, Tied, x
from tests.accelerator.kit import equal, fresh, here, streaming, twin_on
from tests.kit import mlp

Loss = Callable[[nn.Module, int], Tensor]


def once(module: nn.Module, number: int) -> Tensor:
    """One forward."""
    return module(x(3, WIDTH, seed=number)).square().sum()  # type: ignore[no-any-return]


def twice(module: nn.Module, number: int) -> Tensor:
    """Two forwards before one backward."""
    return once(module, number) + 0.5 * once(module, number + 50)


def checkpointed(module: nn.Module, number: int) -> Tensor:
    """Activations are computed again in the backward."""
    y = x(3, WIDTH, seed=number)
    y.requires_grad_()
    return checkpoint(module, y, use_reentrant=False).square().sum()  # type: ignore[no-any-return]


def in_parts(module: nn.Module, number: int) -> Tensor:
    """Each layer checkpointed."""
    y = x(3, WIDTH, seed=number)
    for layer in module.children():
        y = checkpoint(layer, y, use_reentrant=False)
    return y.square().sum()


def blocks() -> nn.Module:
    """Attention and MLPs."""
    return nn.Sequential(*(Block() for _ in range(4)))


class Sequenced(nn.Module):
    """Blocks over a sequence of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x[None])  # type: ignore[no-any-return]


class Words(nn.Module):
    """An embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()

    def forward(self, x: Tensor) -> Tensor:
        return self.tied((x[:, :6].abs() * 20).long())  # type: ignore[no-any-return]


def check(build: Callable[[], nn.Module], loss: Loss, **options: Any) -> None:
    """Three steps that accumulate; gradients equal the twin's after each."""
    module = build()
    twin = twin_on(module)
    with streaming(module, edited=True, keeps=True, **options):
        for number in range(3):
            for part in (module, twin):
                loss(part, number).backward()
            for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
                assert ours.grad is not None
                equal([ours.grad.cpu()], [theirs.grad.cpu()])
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert ours.grad.device.type == "cpu"
        equal([ours.grad], [theirs.grad.cpu()])


@pytest.mark.parametrize("execution", ["eager", "late", 1])
@pytest.mark.parametrize("loss", [once, twice, checkpointed])
@pytest.mark.parametrize("build", [lambda: mlp(6, WIDTH), Sequenced], ids=["mlp", "blocks"])
def test_gradients_equal_the_twins(build: Callable[[], nn.Module], loss: Loss, execution: Execution) -> None:
    fresh(execution)
    check(build, loss)


def test_gradients_of_tied_weights_equal_the_twins() -> None:
    fresh()
    check(Words, once)


def test_gradients_with_layers_that_are_checkpointed() -> None:
    fresh()
    check(lambda: mlp(6, WIDTH), in_parts)


def test_gradients_of_weights_that_are_not_pinned() -> None:
    fresh()
    check(lambda: mlp(6, WIDTH), once, pinned=0)


def test_gradient_of_the_input_where_weights_need_none() -> None:
    fresh()
    module = mlp(6, WIDTH).requires_grad_(False)
    twin = twin_on(module)
    inputs = [x(3, WIDTH).requires_grad_() for _ in range(2)]
    with streaming(module, keeps=True):
        for _ in range(3):
            for part, y in zip((module, twin), inputs, strict=True):
                part(y).square().sum().backward()
        equal([inputs[0].grad.cpu()], [inputs[1].grad.cpu()])
    assert all(param.grad is None for param in module.parameters())


def test_a_step_of_an_optimizer_reaches_the_device() -> None:
    fresh()
    module = mlp(6, WIDTH)
    twin = twin_on(module)
    with streaming(module, keeps=True):
        ours = torch.optim.SGD([p.master.original for p in module.parameters()], lr=0.1)  # type: ignore[attr-defined]
        theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
        for number in range(3):
            for part, optimizer in ((module, ours), (twin, theirs)):
                once(part, number).backward()
                optimizer.step()
                optimizer.zero_grad()
    for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, other.cpu(), rtol=1e-6, atol=1e-7)
    assert here.name == "emu"
