"""Gradients through streamed modules equal those of the twin, to the bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fmstream
from tests.kit import agree, assert_streams_fully, budget, mlp, noise, same, streamed

X = noise(4, 32)


def same_grads(module: nn.Module, twin: nn.Module) -> None:
    """Every parameter's ``.grad`` equals the twin's."""
    for (name, ours), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad), name


def backward(module: Callable[[Tensor], Tensor], x: Tensor = X) -> tuple[Tensor, Tensor]:
    """The output of a call and the gradient of its square sum to the input."""
    x = x.clone().requires_grad_()
    output = module(x)
    output.square().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


def test_input_gradient_through_frozen_weights() -> None:
    module = mlp(8).requires_grad_(False)
    twin = copy.deepcopy(module)
    with streamed(module) as handle:
        for _ in range(4):
            same(backward(module), backward(twin))
        assert_streams_fully(handle)
    assert all(p.grad is None for p in module.parameters())


def test_parameter_gradients_accumulate_and_are_the_users() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    originals = list(module.parameters())
    with streamed(module):
        for _ in range(4):
            same(backward(module), backward(twin))
            same_grads(module, twin)
        module[4].weight.grad.mul_(0.5)
        twin[4].weight.grad.mul_(0.5)
        module[2].weight.grad = None
        twin[2].weight.grad = None
        same(backward(module), backward(twin))
        same_grads(module, twin)
        module.zero_grad()
        twin.zero_grad()
        same_grads(module, twin)
        same(backward(module), backward(twin))
    for original, theirs in zip(originals, twin.parameters(), strict=True):
        assert torch.equal(original.grad, theirs.grad)
    same_grads(module, twin)


def test_gradients_asked_for_by_autograd_grad() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        for _ in range(3):
            x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
            ours = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
            theirs = torch.autograd.grad(twin(y).sum(), [y, *twin.parameters()])
            same(list(ours), list(theirs))
        assert all(p.grad is None for p in module.parameters())


def test_gradient_of_a_gradient() -> None:
    module = mlp(6, 32)
    twin = copy.deepcopy(module)

    def penalty(part: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(part(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert x.grad is not None
        return x.grad

    with streamed(module):
        for _ in range(3):
            same(penalty(module), penalty(twin))
            same_grads(module, twin)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_checkpointed_blocks(reentrant: bool, frozen: bool) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(mlp(2, seed=seed) for seed in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    module = Blocks().requires_grad_(not frozen)
    twin = copy.deepcopy(module)
    with streamed(module):
        for _ in range(3):
            same(backward(module), backward(twin))
            same_grads(module, twin)


def test_checkpoint_around_the_whole_module() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        for reentrant in (False, True, False):
            same(
                backward(lambda x, r=reentrant: checkpoint(module, x, use_reentrant=r)),
                backward(lambda x, r=reentrant: checkpoint(twin, x, use_reentrant=r)),
            )
            same_grads(module, twin)


def test_grad_enabled_within_a_pass_without_gradients() -> None:
    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(4, seed=1), mlp(4, seed=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                loss = self.second(y).square().sum()
                (grad,) = torch.autograd.grad(loss, y)
            return x - grad

    module = Guided()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=4)


def test_backward_within_a_pass_reaches_the_parameters() -> None:
    class Learning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(4, seed=1), mlp(4, seed=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.enable_grad():
                self.second(x.detach()).square().sum().backward()
            return x

    module = Learning()
    twin = copy.deepcopy(module)
    with streamed(module):
        for _ in range(3):
            agree(module, twin, X)
            same_grads(module, twin)


def test_second_use_after_an_optimizer_step() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        ours, theirs = (torch.optim.AdamW(part.parameters(), lr=0.01) for part in (module, twin))
        for step in range(4):
            x = noise(4, 32, seed=step)
            same(backward(module, x), backward(twin, x))
            same_grads(module, twin)
            ours.step()
            theirs.step()
            ours.zero_grad()
            theirs.zero_grad()
    agree(module, twin, X)


def test_stale_backward_after_an_edit_is_refused_as_by_autograd() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=2)
        for part in (module, twin):
            x = X.clone().requires_grad_()
            loss = part(x).sum()
            with torch.no_grad():
                part[4].weight.add_(1.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_backward_of_several_passes_together() -> None:
    module = mlp()
    twin = copy.deepcopy(module)

    def twice(part: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        first = part(x)
        second = part(first)
        (first.sum() + second.square().sum()).backward()
        assert x.grad is not None
        return x.grad

    with streamed(module):
        for _ in range(3):
            same(twice(module), twice(twin))
            same_grads(module, twin)


def test_backward_after_closing() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    losses = {}
    with streamed(module):
        agree(module, twin, X, times=2)
        losses = {name: part(X).square().sum() for name, part in (("ours", module), ("theirs", twin))}
    losses["ours"].backward()
    losses["theirs"].backward()
    same_grads(module, twin)
    assert all(p.grad is not None for p in module.parameters())


def test_weights_read_outside_a_forward_take_gradients() -> None:
    module = mlp()
    twin = copy.deepcopy(module)

    def penalty(part: nn.Module) -> Tensor:
        return sum((p.square().sum() for p in part.parameters()), torch.zeros(()))

    with streamed(module):
        for _ in range(3):
            for part in (module, twin):
                (part(X).sum() + penalty(part)).backward()
            same_grads(module, twin)


def test_some_parameters_frozen_and_some_not() -> None:
    module = mlp()
    for number, param in enumerate(module.parameters()):
        param.requires_grad_(number % 3 == 0)
    twin = copy.deepcopy(module)
    with streamed(module):
        for _ in range(3):
            same(backward(module), backward(twin))
            same_grads(module, twin)
        for part in (module, twin):
            part[2].requires_grad_(True)
            part[0].requires_grad_(False)
            part.zero_grad()
        for _ in range(2):
            same(backward(module), backward(twin))
            same_grads(module, twin)


def test_tied_weights_sum_their_gradients() -> None:
    module = mlp()
    module[6].weight = module[2].weight
    twin = copy.deepcopy(module)
    with streamed(module):
        for _ in range(3):
            same(backward(module), backward(twin))
            same_grads(module, twin)


def test_weight_read_from_another_module_takes_gradients() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.proj.weight.t() * 0.5, self.proj.bias)

    module = nn.Sequential(*(Reader() for _ in range(6)))
    twin = copy.deepcopy(module)
    with streamed(module):
        for _ in range(4):
            same(backward(module), backward(twin))
            same_grads(module, twin)


@pytest.mark.parametrize("inside", [False, True], ids=["put on before", "put on while streaming"])
def test_parameter_hooks_of_the_user_run_once(inside: bool) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    calls = {"hook": 0, "accumulated": 0}

    def double(grad: Tensor) -> Tensor:
        calls["hook"] += 1
        return grad * 2

    def accumulated(param: Tensor) -> None:
        calls["accumulated"] += 1
        assert param.grad is not None

    def put_on() -> None:
        module[4].weight.register_hook(double)
        module[8].weight.register_post_accumulate_grad_hook(accumulated)

    twin[4].weight.register_hook(lambda grad: grad * 2)
    if not inside:
        put_on()
    handle = fmstream.stream(module, memory=budget(module))
    with handle:
        if inside:
            put_on()
        for number in range(1, 4):
            same(backward(module), backward(twin))
            same_grads(module, twin)
            assert calls == {"hook": number, "accumulated": number}
    same(backward(module), backward(twin))
    same_grads(module, twin)
    assert calls == {"hook": 4, "accumulated": 4}


@pytest.mark.parametrize("open_in_inference", [True, False])
@pytest.mark.parametrize("run_in_inference", [True, False])
def test_inference_mode_at_opening_or_first_call_does_no_harm_to_gradients(
    open_in_inference: bool, run_in_inference: bool
) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with torch.inference_mode(open_in_inference):
        handle = fmstream.stream(module, memory=budget(module))
    with handle:
        for _ in range(3):
            with torch.inference_mode(run_in_inference), torch.no_grad():
                same(module(X), twin(X))
        same(backward(module), backward(twin))
        same_grads(module, twin)
        with torch.inference_mode():
            same(module(X), twin(X))
            same(module[4].weight[0], twin[4].weight[0])
        same(backward(module), backward(twin))
        same_grads(module, twin)
        with torch.no_grad():
            module[4].weight.add_(1.0)
            twin[4].weight.add_(1.0)
        agree(module, twin, X)
    same(backward(module), backward(twin))
    assert not any(p.is_inference() for p in module.parameters())


def test_module_made_in_inference_mode() -> None:
    with torch.inference_mode():
        module = mlp()
        twin = copy.deepcopy(module)
    assert module[0].weight.is_inference()
    with streamed(module):
        with torch.inference_mode():
            for _ in range(3):
                same(module(X), twin(X))
            module[4].weight.add_(1.0)
            twin[4].weight.add_(1.0)
            module[6].weight.data.mul_(0.5)
            twin[6].weight.data.mul_(0.5)
            for _ in range(3):
                same(module(X), twin(X))
        agree(module, twin, X)
    agree(module, twin, X)
    assert module[0].weight.is_inference()


def test_functional_call_with_other_weights() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    other = {name: value.detach() * 0.5 for name, value in twin.named_parameters()}
    with streamed(module):
        agree(module, twin, X, times=2)
        for _ in range(2):
            with torch.no_grad():
                same(
                    torch.func.functional_call(module, other, (X,)),
                    torch.func.functional_call(twin, other, (X,)),
                )
            agree(module, twin, X)


def test_evaluation_between_a_forward_in_training_and_its_backward() -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module):
        for step in range(4):
            outputs = []
            for part in (module, twin):
                part.train()
                outputs.append(part(X))
                part.eval()
            agree(module, twin, noise(2, 32, seed=step), times=2)
            for output in outputs:
                output.square().sum().backward()
            for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
                same(ours.grad, theirs.grad)


def test_a_graph_that_is_dropped_is_freed_at_once() -> None:
    module = mlp(6, 32)
    with streamed(module):
        for _ in range(3):
            module(noise(2, 32)).sum().backward()
        gc.collect()
        gc.disable()
        try:
            output = module(noise(2, 32))
            kept = noise(1)
            alive = weakref.ref(kept)
            assert output.grad_fn is not None
            output.grad_fn.metadata["kept by the node"] = kept
            del kept, output
            assert alive() is None
        finally:
            gc.enable()
