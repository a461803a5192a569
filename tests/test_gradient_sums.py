"""A weight with several uses in one graph: its gradients are summed in the same order as the twin's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fmstream
from tests.kit import agree, budget, mlp, noise, same, streamed
from tests.test_gradients import same_grads

X = noise(4, 32)
Y = noise(4, 32, seed=9)
BUDGETS = pytest.mark.parametrize("fraction", [0.0, 0.5])


class Twice(nn.Module):
    """A layer that uses its weight twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(32, 32, seed=seed) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


class Again(nn.Module):
    """Layers that are called several times, one after the other, in each forward."""

    def __init__(self, times: int = 3, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.times = times
        self.layers = nn.ModuleList(layers or (Twice(seed) for seed in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x) + x
        return x


def train(module: nn.Module, twin: nn.Module, loss: Callable[[Any], Tensor], times: int = 4) -> None:
    """Gradients of a loss, summed over some steps, equal the twin's."""
    for _ in range(times):
        loss(module).backward()
        loss(twin).backward()
        same_grads(module, twin)


def once(module: nn.Module) -> Tensor:
    return module(X).square().sum()


def two_passes(module: nn.Module) -> Tensor:
    return module(X).square().sum() + module(Y).sum()


def two_passes_in_a_row(module: nn.Module) -> Tensor:
    return module(module(X)).square().sum()


def with_penalty(module: nn.Module) -> Tensor:
    penalty = sum((p.square().sum() for p in module.parameters()), torch.zeros(()))
    return module(X).square().sum() + penalty + module(Y).sum() + module.layers[2].weight.t()[0].sum()


LOSSES = pytest.mark.parametrize("loss", [once, two_passes, two_passes_in_a_row, with_penalty])


@BUDGETS
@LOSSES
@pytest.mark.parametrize("times", [1, 3])
def test_weight_used_twice_in_a_module(loss: Callable[[Any], Tensor], times: int, fraction: float) -> None:
    module = Again(times)
    twin = copy.deepcopy(module)
    with streamed(module, fraction):
        train(module, twin, loss)
    same_grads(module, twin)


@BUDGETS
@LOSSES
def test_tied_weights(loss: Callable[[Any], Tensor], fraction: float) -> None:
    module = Again(2)
    module.layers[5].weight = module.layers[1].weight
    module.layers[3].weight = module.layers[1].weight
    twin = copy.deepcopy(module)
    with streamed(module, fraction):
        train(module, twin, loss)
    same_grads(module, twin)


@BUDGETS
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant: bool, fraction: float) -> None:
    class Checkpointed(Again):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant) + x
            return x

    module = Checkpointed()
    twin = copy.deepcopy(module)

    def loss(part: nn.Module) -> Tensor:
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        return part(x).square().sum() + part(y).sum()

    with streamed(module, fraction):
        train(module, twin, loss)


@BUDGETS
def test_read_by_another_module_too(fraction: float) -> None:
    class Reader(nn.Module):
        def __init__(self, of: list[nn.Module]) -> None:
            super().__init__()
            self.of = of
            self.own = nn.Parameter(noise(32, seed=40))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.own + x @ self.of[0].weight.t() * self.of[0].weight[0]

    layers: list[nn.Module] = [Twice(seed) for seed in range(6)]
    module = Again(2, [*layers, Reader(layers[1:2])])
    twin = copy.deepcopy(module)
    with streamed(module, fraction):
        train(module, twin, two_passes)


def test_file_backed_weights(tmp_path: Any) -> None:
    module = Again()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True, spill_dir=tmp_path):
        for loss in (with_penalty, two_passes, with_penalty):
            train(module, twin, loss, times=2)


@LOSSES
def test_gradient_of_a_gradient(loss: Callable[[Any], Tensor]) -> None:
    module = Again(2)
    twin = copy.deepcopy(module)

    def slope(part: nn.Module) -> Tensor:
        slopes = torch.autograd.grad(loss(part), list(part.parameters()), create_graph=True)
        return sum((s.square().sum() for s in slopes), torch.zeros(()))

    with streamed(module):
        train(module, twin, slope, times=3)


def test_graphs_that_live_side_by_side() -> None:
    module = Again()
    twin = copy.deepcopy(module)
    with streamed(module):
        kept = [[once(part), two_passes(part), with_penalty(part)] for part in (module, twin)]
        agree(module, twin, X, times=3)
        for ours, theirs in zip(*kept, strict=True):
            ours.backward(retain_graph=True)
            theirs.backward(retain_graph=True)
            same_grads(module, twin)
    for ours, theirs in zip(*kept, strict=True):
        ours.backward()
        theirs.backward()
        same_grads(module, twin)


def test_weight_kept_by_an_operation_of_the_users() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.weight, ctx.x = weight, x
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] @ ctx.weight.t(), ctx.x.t() @ grads[0]

    class Keeping(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(Scale.apply(x, self.weight))

    module = Again(2, (Keeping(seed) for seed in range(6)))
    twin = copy.deepcopy(module)
    with streamed(module):
        train(module, twin, two_passes)


def test_a_living_graph_does_not_count_as_somebody_who_holds_the_parameters() -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module, 0.5) as handle:
        graph = module(X).sum()
        agree(module, twin, X, times=3)
        weights = handle._session.weights
        assert not any(master.is_held for master in weights.masters)
        assert not weights._exposed
        taken = module[4].weight.master.original
        assert weights.masters[module[4].weight.master.index].is_held
        taken.data.mul_(2.0)
        twin[4].weight.data.mul_(2.0)
        agree(module, twin, X)
    del graph, taken


def test_write_between_a_read_outside_a_forward_and_its_backward_is_refused_as_by_autograd() -> None:
    module = mlp()
    taken = module[4].weight
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=2)
        for part, weight in ((module, taken), (twin, twin[4].weight)):
            loss = part[4].weight.square().sum() + part[4].weight.t().exp().sum()
            with torch.no_grad():
                weight.add_(1.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_hooks_of_the_user_come_in_the_order_of_the_twin() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    orders: list[list[str]] = []
    for part in (module, twin):
        order: list[str] = []
        orders.append(order)
        for name, param in part.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _param, n=name, o=order: o.append(n))
    handle = fmstream.stream(module, memory=budget(module))
    with handle:
        for _ in range(3):
            same(once(module), once(twin))
            once(module).backward()
            once(twin).backward()
            assert orders[0] == orders[1]


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, as jvp is loaded
@pytest.mark.parametrize("kind", ["vmap", "jvp", "grad", "vjp", "vmap of grad"])
def test_torch_func_transforms(kind: str) -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)

    def transformed(part: nn.Module) -> Any:
        match kind:
            case "vmap":
                return torch.func.vmap(part)(X)
            case "jvp":
                return torch.func.jvp(part, (X,), (Y,))
            case "grad":
                return torch.func.grad(lambda x: part(x).square().sum())(X)
            case "vjp":
                output, pull = torch.func.vjp(part, X)
                return output, pull(Y)[0]
            case _:
                return torch.func.vmap(torch.func.grad(lambda x: part(x).square().sum()))(X)

    with streamed(module):
        for _ in range(3):
            same(transformed(module), transformed(twin))
        agree(module, twin, X, times=2)


def test_parameters_take_gradients_through_vmap() -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module):
        train(module, twin, lambda part: torch.func.vmap(part)(X).square().sum(), times=3)
        agree(module, twin, X, times=2)


def test_vmap_within_a_pass() -> None:
    class Inside(Again):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.func.vmap(layer)(x) + x
            return x

    module = Inside()
    twin = copy.deepcopy(module)
    with streamed(module):
        train(module, twin, two_passes, times=3)
        agree(module, twin, X, times=2)
