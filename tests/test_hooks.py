"""Hooks, signatures and arguments of streamed modules are the user's own."""

from __future__ import annotations

import copy
import inspect
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream.errors import ConfigError
from tests.kit import agree, budget, mlp, noise, same, streamed, streamed_bytes

X = noise(4, 32)


def test_forward_hooks_run_once_and_see_true_weights() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    counts = {"pre": 0, "post": 0, "always": 0, "pre kwargs": 0}

    def pre(part: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        counts["pre"] += 1
        assert torch.equal(part.weight, twin[4].weight)
        return (args[0] + part.bias,)

    def pre_kwargs(_part: nn.Module, args: Any, kwargs: Any) -> Any:
        counts["pre kwargs"] += 1
        return args, kwargs

    def post(part: nn.Module, _args: Any, output: Tensor) -> Tensor:
        counts["post"] += 1
        assert torch.equal(part.weight, twin[4].weight)
        return output * part.weight.sum()

    def always(_part: nn.Module, _args: Any, _output: Any) -> None:
        counts["always"] += 1

    module[4].register_forward_pre_hook(pre)
    module[4].register_forward_pre_hook(pre_kwargs, with_kwargs=True)
    module[4].register_forward_hook(post)
    module[4].register_forward_hook(always, always_call=True)
    with torch.no_grad():
        expected = module(X)
    counts.update(dict.fromkeys(counts, 0))
    with streamed(module), torch.no_grad():
        for number in range(1, 5):
            same(module(X), expected)
            assert counts == dict.fromkeys(counts, number)
    assert len(module[4]._forward_hooks) == 2
    assert len(module[4]._forward_pre_hooks) == 2


def test_hooks_put_on_and_taken_off_while_streaming() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    seen: list[Tensor] = []
    with streamed(module):
        agree(module, twin, X, times=2)
        handles = [part.register_forward_hook(lambda _m, _a, out: seen.append(out)) for part in module]
        agree(module, twin, X, times=2)
        for handle in handles:
            handle.remove()
        agree(module, twin, X)
    assert len(seen) == 2 * len(module)
    x = X
    for layer, ours in zip(twin, seen, strict=False):
        x = layer(x)
        same(ours, x)


def test_global_hooks_run_once_for_each_module() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    names: list[str] = []
    with streamed(module):
        agree(module, twin, X, times=2)
        handle = nn.modules.module.register_module_forward_hook(lambda part, *_: names.append(type(part).__name__))
        try:
            with torch.no_grad():
                module(X)
            ours = names.copy()
            names.clear()
            with torch.no_grad():
                twin(X)
        finally:
            handle.remove()
    assert ours == names


def test_full_backward_hooks_run_once_with_the_true_gradients() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    def watch(part: nn.Sequential, into: list[Tensor]) -> None:
        def backward(layer: nn.Linear, grad_input: Any, grad_output: Any) -> None:
            into.extend((grad_input[0], grad_output[0], layer.weight.detach().clone()))

        part[4].register_full_backward_hook(backward)
        part[8].register_full_backward_pre_hook(lambda _layer, grad: into.append(grad[0]))

    watch(module, seen[0])
    watch(twin, seen[1])
    with streamed(module):
        for _ in range(3):
            for part in (module, twin):
                part(X).sum().backward()
    assert len(seen[0]) == len(seen[1]) == 12
    for ours, theirs in zip(seen[0], seen[1], strict=True):
        same(ours, theirs)


def test_state_dict_hooks_and_load_hooks_run_once() -> None:
    module = mlp()
    counts = [0, 0]

    def on_save(_module: nn.Module, _state: Any, _prefix: str, _meta: Any) -> None:
        counts[0] += 1

    def on_load(_module: nn.Module, _keys: Any) -> None:
        counts[1] += 1

    module.register_state_dict_post_hook(on_save)
    module.register_load_state_dict_post_hook(on_load)
    with streamed(module, idle=True):
        module.load_state_dict(module.state_dict())
    assert counts == [1, 1]


def test_user_hook_that_raises_leaves_the_next_call_right() -> None:
    module = mlp()
    twin = copy.deepcopy(module)

    def fail(*_args: Any) -> None:
        raise LookupError("the hook fails")

    with streamed(module):
        agree(module, twin, X, times=2)
        for part, register in (
            (module[4], module[4].register_forward_pre_hook),
            (module[6], module[6].register_forward_hook),
            (module, module.register_forward_pre_hook),
            (module, module.register_forward_hook),
        ):
            handle = register(fail)
            with pytest.raises(LookupError, match="the hook fails"), torch.no_grad():
                module(X)
            handle.remove()
            assert not part._forward_hooks
            agree(module, twin, X, times=2)


class Signed(nn.Module):
    """A forward with names, and a doc."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, hidden: Tensor, timestep: int, enc: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Add things."""
        out = self.body(hidden) * scale + timestep
        return out if enc is None else out + enc


def test_signature_name_and_doc_of_forward_stay() -> None:
    module = Signed().eval()
    twin = copy.deepcopy(module)
    forward, whole = inspect.signature(module.forward), inspect.signature(module)
    seen: list[Any] = []
    module.body[0].register_forward_hook(lambda *_: seen.append(inspect.signature(module.forward)))

    def check() -> None:
        assert inspect.signature(module.forward) == forward
        assert inspect.signature(module) == whole
        assert module.forward.__name__ == "forward"
        assert module.forward.__doc__ == "Add things."
        assert module.forward.__func__ is Signed.forward
        assert "forward" not in module.__dict__
        assert type(module) is Signed

    memory = budget(module)
    with streamed(module, memory=memory):
        check()
        agree(module, twin, X, 3, times=2)
        agree(module, twin, hidden=X, timestep=2, enc=X, scale=0.5, times=2)
        with fmstream.stream(module, memory=memory):
            check()
            agree(module, twin, X, timestep=3)
        check()
        with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
            module(X, 3, nope=1)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'timestep'"):
            module(X)
        agree(module, twin, X, 3)
    check()
    assert all(signature == forward for signature in seen)


def test_keywords_are_checked_against_the_signature_as_ever() -> None:
    def validate(part: nn.Module, **kwargs: Any) -> None:
        unknown = set(kwargs) - set(inspect.signature(part.forward).parameters)
        if unknown:
            raise ValueError(f"not used by the model: {sorted(unknown)}")

    module = Signed().eval()
    with streamed(module, idle=True), fmstream.stream(module, memory=budget(module)):
        validate(module, hidden=X, timestep=1, enc=None, scale=2.0)
        with pytest.raises(ValueError, match="nope"):
            validate(module, hidden=X, nope=1)


def test_export_after_streaming_gives_the_program_of_the_plain_module() -> None:
    module = mlp(3)
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=3)
    ours, theirs = torch.export.export(module, (X,)), torch.export.export(twin, (X,))
    assert [str(node) for node in ours.graph.nodes] == [str(node) for node in theirs.graph.nodes]
    agree(ours.module(), twin, X)


RECORDERS: dict[str, Callable[..., Any]] = {
    "export": partial(torch.export.export, strict=False),
    "trace": torch.jit.trace,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_program_of_what_streams_is_refused_with_the_remedy(recorder: str) -> None:
    module = mlp(4).requires_grad_(False)
    twin = copy.deepcopy(module)
    with streamed(module), torch.no_grad():
        agree(module, twin, X, times=2)
        with pytest.raises(ConfigError, match=r"Sequential streams.*close the handle first"):
            RECORDERS[recorder](module, (X,))
        agree(module, twin, X, times=2)


def test_what_fits_where_it_lies_is_exported_as_ever() -> None:
    module = mlp(4)
    twin = copy.deepcopy(module)
    with streamed(module, memory=None, idle=True):
        agree(torch.export.export(module, (X,), strict=False).module(), twin, X)
        agree(module, twin, X)


Point = namedtuple("Point", "left right")


@dataclass
class Output:
    """What a layer returns."""

    sample: Tensor
    note: str


class Passing(nn.Module):
    """Writes what it computes into the containers it is given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = mlp(1, seed=seed)[0]

    def forward(self, x: Tensor, store: dict[str, Any], cache: Any = None) -> Any:
        out = self.linear(x)
        store["calls"] = store.get("calls", 0) + 1
        store.setdefault("ids", []).append(id(store))
        if cache is not None:
            cache.items.append(out)
        return out


def test_containers_pass_by_identity() -> None:
    class Cache:
        def __init__(self) -> None:
            self.items: list[Tensor] = []

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Passing(seed) for seed in range(6))

        def forward(self, x: Tensor, store: dict[str, Any], cache: Any) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x, store, cache=cache) if number % 2 else layer(x, store=store, cache=cache)
            return x

    module = Chain().eval()
    twin = copy.deepcopy(module)
    with streamed(module), torch.no_grad():
        for _ in range(3):
            ours: tuple[dict[str, Any], Any] = ({}, Cache())
            theirs: tuple[dict[str, Any], Any] = ({}, Cache())
            same(module(X, ours[0], cache=ours[1]), twin(X, theirs[0], cache=theirs[1]))
            assert ours[0]["calls"] == 6
            assert set(ours[0]["ids"]) == {id(ours[0])}
            same(ours[1].items, theirs[1].items)


def test_outputs_keep_their_types_and_identity() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, kind: str, value: Any) -> Any:
            x = self.body(X)
            return {
                "namedtuple": Point(x, value),
                "dataclass": Output(x, "as it is"),
                "none": None,
                "nested": [x, [None, (value, {"k": x})]],
                "input": value,
            }[kind]

    module = Returning().eval()
    value = object()
    with streamed(module), torch.no_grad():
        for _ in range(3):
            assert type(module("namedtuple", value)) is Point
            assert module("namedtuple", value).right is value
            assert type(module("dataclass", value)) is Output
            assert module("none", value) is None
            nested = module("nested", value)
            assert type(nested[1][1]) is tuple
            assert nested[1][1][0] is value
            assert module("input", value) is value
            assert type(module("namedtuple", X).left) is Tensor


def test_forward_replaced_by_the_user_before_and_while_streaming() -> None:
    module = mlp()
    plain = module[4].forward
    module[4].forward = lambda x: plain(x) * 2  # type: ignore[method-assign]
    twin = copy.deepcopy(mlp())
    twin_plain = twin[4].forward
    twin[4].forward = lambda x: twin_plain(x) * 2  # type: ignore[method-assign]
    with streamed(module):
        agree(module, twin, X, times=2)
        kept = (module[6].forward, twin[6].forward)
        module[6].forward = lambda x: kept[0](x) + 1  # type: ignore[method-assign]
        twin[6].forward = lambda x: kept[1](x) + 1  # type: ignore[method-assign]
        agree(module, twin, X, times=3)
        del module[6].forward, twin[6].forward
        agree(module, twin, X, times=2)
    assert "forward" in module[4].__dict__
    agree(module, twin, X)


def test_compiled_call_of_the_user_is_kept() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    calls: list[int] = []

    def compiled(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return module[4]._call_impl(*args, **kwargs)

    module[4].__dict__["_compiled_call_impl"] = compiled
    with fmstream.stream(module, memory=budget(module)) as handle:
        agree(module, twin, X, times=3)
        assert streamed_bytes(handle) > 0
    assert len(calls) == 3
    assert module[4].__dict__["_compiled_call_impl"] is compiled
