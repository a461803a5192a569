"""One parameter under several names, in one module, several modules or several handles."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fmstream
from tests.kit import agree, budget, mlp, noise, same, same_state, streamed, weights_bytes


class Tied(nn.Module):
    """An embedding whose weight is the head's, around some layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 32)
        self.body = mlp()
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.emb(tokens)))


TOKENS = torch.arange(14).reshape(2, 7)


def test_tied_head_stays_tied_and_takes_edits() -> None:
    module = Tied().eval()
    twin = copy.deepcopy(module)
    with streamed(module) as handle:
        assert handle.telemetry.weights_bytes == weights_bytes(twin)
        for _ in range(3):
            assert module.head.weight is module.emb.weight
            agree(module, twin, TOKENS)
        with torch.no_grad():
            module.emb.weight.add_(1.0)
            twin.emb.weight.add_(1.0)
        agree(module, twin, TOKENS, times=2)
        same_state(module, twin)
        assert len(list(module.parameters())) == len(list(twin.parameters()))
    assert module.head.weight is module.emb.weight
    agree(module, twin, TOKENS)


def test_tie_holds_inside_a_pass() -> None:
    module = Tied().eval()
    twin = copy.deepcopy(module)
    seen = []

    def look(_module: nn.Module, _args: object) -> None:
        seen.append(module.head.weight is module.emb.weight)

    for part in (module.emb, module.body[4], module.head):
        part.register_forward_pre_hook(look)
    with streamed(module):
        agree(module, twin, TOKENS, times=4)
    assert seen == [True] * 12


def test_tied_weight_of_neighbours_at_the_least_memory() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Linear(64, 64, bias=False)
            self.again = nn.Linear(64, 64, bias=False)
            self.again.weight = self.big.weight
            self.body = mlp(6, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.again(self.big(x)))

    module = Both().eval()
    twin = copy.deepcopy(module)
    with streamed(module, 0.0):
        agree(module, twin, noise(2, 64), times=5)


def test_one_weight_under_two_names_of_one_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(noise(32, 32))
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.a + x @ self.b

    module = nn.Sequential(Twice(), mlp()).eval()
    twin = copy.deepcopy(module)
    with streamed(module) as handle:
        assert handle.telemetry.weights_bytes == weights_bytes(twin)
        agree(module, twin, noise(3, 32), times=3)
        with torch.no_grad():
            module[0].b.mul_(0.5)
            twin[0].b.mul_(0.5)
        assert module[0].a is module[0].b
        agree(module, twin, noise(3, 32), times=2)
    assert module[0].a is module[0].b


def test_one_module_at_two_places() -> None:
    shared = nn.Linear(32, 32)
    module = nn.Sequential(shared, *mlp(), shared, *mlp(seed=1), shared).eval()
    twin = copy.deepcopy(module)
    with streamed(module) as handle:
        assert handle.telemetry.weights_bytes == weights_bytes(twin)
        agree(module, twin, noise(3, 32), times=5)
        assert list(module.state_dict()) == list(twin.state_dict())


def test_weight_shared_by_two_models_of_one_handle() -> None:
    first, second = mlp(), mlp(seed=1)
    second[4].weight = first[2].weight
    twins = copy.deepcopy([first, second])
    models = {"first": first, "second": second}
    with streamed(models) as handle:
        assert handle.telemetry.weights_bytes == weights_bytes({"first": twins[0], "second": twins[1]})
        for _ in range(3):
            agree(first, twins[0], noise(2, 32))
            agree(second, twins[1], noise(2, 32))
        with torch.no_grad():
            second[4].weight.zero_()
            twins[1][4].weight.zero_()
        agree(first, twins[0], noise(2, 32))
        agree(second, twins[1], noise(2, 32))
    assert second[4].weight is first[2].weight


def test_weight_shared_by_models_of_two_handles() -> None:
    first, second = mlp(), mlp(seed=1)
    second[4].weight = first[2].weight
    original = first[2].weight
    twins = copy.deepcopy([first, second])
    with streamed(first):
        with streamed(second):
            for _ in range(2):
                agree(first, twins[0], noise(2, 32))
                agree(second, twins[1], noise(2, 32))
            with torch.no_grad():
                first[2].weight.add_(0.25)
                twins[0][2].weight.add_(0.25)
            agree(second, twins[1], noise(2, 32), times=2)
            agree(first, twins[0], noise(2, 32), times=2)
        assert second[4].weight is original
        agree(second, twins[1], noise(2, 32))
        agree(first, twins[0], noise(2, 32))
    assert first[2].weight is original


def test_parts_shared_by_two_pipelines_are_handed_over_and_back() -> None:
    class Pipe:
        def __init__(self, **components: nn.Module) -> None:
            self.components = components

        def __call__(self, x: Tensor) -> Tensor:
            for part in self.components.values():
                x = part(x)
            return x

    text, unet = mlp(), mlp(seed=1)
    one, two = Pipe(text=text, unet=unet), Pipe(unet=unet, text=text)
    twin_text, twin_unet = copy.deepcopy(text), copy.deepcopy(unet)
    memory = budget(one)
    x = noise(2, 32)
    with torch.no_grad():
        expected_one, expected_two = twin_unet(twin_text(x)), twin_text(twin_unet(x))
        with streamed(one, memory=memory) as first:
            same(one(x), expected_one)
            assert first.telemetry.weights_bytes == weights_bytes(two)
            with fmstream.stream(two, memory=memory) as second:
                same(two(x), expected_two)
                same(one(x), expected_one)
                same(second(x), expected_two)
                assert len(second.telemetry.passes) == 6
            same(one(x), expected_one)
            same(two(x), expected_two)
        same(two(x), expected_two)


def test_streaming_twice_replaces_the_first_handle_cleanly() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    memory = budget(module)
    with streamed(module, memory=memory) as first:
        agree(module, twin, noise(2, 32))
        with fmstream.stream(module, memory=memory) as second:
            agree(module, twin, noise(2, 32), times=3)
            assert len(second.telemetry.passes) == 3
            assert len(first.telemetry.passes) == 1
        agree(module, twin, noise(2, 32), times=2)
        assert len(first.telemetry.passes) == 3


def test_least_memory_is_the_same_while_streaming() -> None:
    module = mlp()
    least, total = fmstream.smallest_memory(module), weights_bytes(module)
    with streamed(module, idle=True):
        assert fmstream.smallest_memory(module) == least
        assert weights_bytes(module) == total


@pytest.mark.parametrize("policy", ["overlap_async", "one_ahead", "sync"])
@pytest.mark.parametrize("fraction", [0.0, 0.4, 0.8])
def test_tied_weight_has_one_copy_in_fast_memory_at_most(fraction: float, policy: str) -> None:
    module = Tied().eval()
    twin = copy.deepcopy(module)
    copies: list[int] = []
    with streamed(module, fraction, policy=policy) as handle:
        executor = handle._session._executor
        assert executor is not None
        (tied,) = [m.index for m in handle._session.weights.masters if tuple(m.size) == (50, 32)]
        for layer in (module.emb, *module.body, module.head):
            layer.register_forward_hook(
                lambda *_: copies.append(sum(tied in loaded.run.params for loaded in executor._everything()))
            )
        agree(module, twin, TOKENS, times=5)
        for layer in (module.emb, *module.body, module.head):
            layer._forward_hooks.clear()
    assert max(copies) == 1


def test_functional_call_that_gives_a_tied_weight_once_or_under_both_names() -> None:
    module = Tied().eval()
    twin = copy.deepcopy(module)
    once = {name: value.detach() * 0.5 for name, value in twin.named_parameters()}
    both = {**once, "head.weight": once["emb.weight"]}
    with streamed(module), torch.no_grad():
        agree(module, twin, TOKENS, times=2)
        for given in (once, both):
            same(
                torch.func.functional_call(module, given, (TOKENS,)), torch.func.functional_call(twin, given, (TOKENS,))
            )
            assert module.head.weight is module.emb.weight
        own = dict(module.named_parameters(remove_duplicate=False))
        same(torch.func.functional_call(module, own, (TOKENS,)), twin(TOKENS))
        agree(module, twin, TOKENS, times=2)


class Tying(nn.Linear):
    """Gives another layer its own weight, once."""

    other: list[nn.Linear] | None = None

    def forward(self, x: Tensor) -> Tensor:
        other, self.other = self.other, None
        for layer in other or ():
            layer.weight = self.weight
        return super().forward(x)


@pytest.mark.parametrize("other", [2, 8, 14])
@pytest.mark.parametrize("share", [0.35, 0.9])
def test_weight_that_is_tied_in_a_pass_while_it_is_shown(other: int, share: float) -> None:
    module, x = mlp(8), noise(4, 32)
    module[6].__class__ = Tying
    twin = copy.deepcopy(module)
    with streamed(module, share, edited=True), torch.no_grad():
        agree(module, twin, x, times=3)
        for part in (module, twin):
            part[6].other = [part[other]]
        agree(module, twin, x, times=3)
        for part in (module, twin):
            part[other].weight.mul_(0.5)
        agree(module, twin, x, times=3)
        same_state(module, twin)
    assert module[other].weight is module[6].weight
    assert twin[other].weight is twin[6].weight


def test_embedding_of_one_model_is_the_head_of_another() -> None:
    first, second = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3)), nn.Sequential(mlp(4, 3), nn.Linear(3, 5))
    second[1].weight = first[0].weight
    models = {"first": first, "second": second}
    twins = copy.deepcopy(models)
    assert twins["second"][1].weight is twins["first"][0].weight
    with fmstream.stream(models, memory=fmstream.smallest_memory(models)) as handle:
        assert handle.telemetry.weights_bytes == weights_bytes(twins)
        for number in range(4):
            hidden = agree(first, twins["first"], torch.arange(5))
            agree(second, twins["second"], hidden)
            with torch.no_grad():
                for part in (models, twins):
                    part["first"][0].weight.add_(number)
        assert first[0].weight is second[1].weight
    assert first[0].weight is second[1].weight
