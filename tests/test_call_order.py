"""Modules that are called in odd ways: other branches, skipped, again, from outside a forward, or not at all."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit import agree, assert_streams_fully, mlp, noise, num_faults, same, streamed

POLICIES = ["overlap_async", "one_ahead", "sync"]
X = noise(4, 32)


@pytest.mark.parametrize("policy", POLICIES)
def test_straight_passes_stream_all_that_has_no_room(policy: str) -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module, policy=policy) as handle:
        agree(module, twin, X, times=6)
        assert_streams_fully(handle)
        assert num_faults(handle) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_branches_that_change_between_calls(policy: str) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = mlp(3, seed=1), mlp(3, seed=2), mlp(3, seed=3)

        def forward(self, x: Tensor, use_fc2: bool) -> Tensor:
            x = self.fc1(x)
            if use_fc2:
                x = self.fc2(x)
            return self.fc3(x)

    module = Branch().eval()
    twin = copy.deepcopy(module)
    with streamed(module, policy=policy):
        for use in (True, True, False, False, True, True, False, True, False):
            agree(module, twin, X, use)


def test_branches_that_depend_on_data() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.end = mlp(3, seed=1), mlp(3, seed=2), mlp(3, seed=3)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.left(x) if x.sum() > 0 else self.right(x))

    module = Branch().eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        for seed in range(10):
            agree(module, twin, noise(2, 32, seed=seed))


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_dropped_at_random(policy: str) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(mlp(10))

        def forward(self, x: Tensor, keep: list[bool]) -> Tensor:
            for layer, kept in zip(self.layers, keep, strict=True):
                if kept:
                    x = layer(x)
            return x

    module = Dropping().eval()
    twin = copy.deepcopy(module)
    draw = random.Random(5)
    with streamed(module, policy=policy) as handle:
        for _ in range(15):
            agree(module, twin, X, [draw.random() < 0.6 for _ in module.layers])
        agree(module, twin, X, [False] * 20)
        agree(module, twin, X, [True] * 20, times=3)
        assert policy == "sync" or handle.telemetry.wasted_bytes > 0
        assert handle.report.totals.wasted_bytes == handle.telemetry.wasted_bytes
        assert len(handle.telemetry.notes) <= 1


def test_layer_repeated_a_varying_number_of_times() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.loop, self.last = mlp(2, seed=1), mlp(4, seed=2), mlp(2, seed=3)

        def forward(self, x: Tensor, times: int) -> Tensor:
            x = self.first(x)
            for _ in range(times):
                x = self.loop(x)
            return self.last(x)

    module = Loop().eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        for times in (1, 1, 3, 3, 2, 0, 5, 1, 1):
            agree(module, twin, X, times)


def test_module_that_calls_itself() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(noise(32, 32, seed=9) / 6)
            self.inner = mlp(4)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            x = self.inner(x) @ self.weight
            if depth:
                x = self(x, depth - 1) + x @ self.weight
            return x

    module = Recursive().eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        for depth in (0, 0, 2, 2, 4, 1, 1):
            agree(module, twin, X, depth)


def test_parent_uses_its_own_weight_before_between_and_after_its_children() -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(noise(32, 32, seed=9) / 6)
            self.one, self.two = mlp(3, seed=1), mlp(3, seed=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x @ self.weight) @ self.weight
            return self.two(x) @ self.weight

    module = nn.Sequential(*(Wrapping() for _ in range(3))).eval()
    twin = copy.deepcopy(module)
    with streamed(module) as handle:
        agree(module, twin, X, times=5)
        assert num_faults(handle) == 0


def test_parent_reads_the_weight_of_a_child_that_is_never_called() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.proj.weight) + self.proj.bias

    module = nn.Sequential(*(Reader() for _ in range(6))).eval()
    twin = copy.deepcopy(module)
    with streamed(module) as handle:
        agree(module, twin, X)
        seen = num_faults(handle)
        assert seen > 0
        agree(module, twin, X, times=5)
        assert num_faults(handle) == seen, "the reader binds what it was seen to read"
        assert_streams_fully(handle)


def test_parent_reads_a_slice_of_a_childs_weight() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.proj.weight.chunk(2)
            return F.linear(x, q, self.proj.bias[:32]) * F.linear(x, k.t())

    module = nn.Sequential(*(Reader() for _ in range(6))).eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=6)


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(batch_first: bool) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=batch_first) for _ in range(4))

        def forward(self, x: Tensor, need_weights: bool) -> Tensor:
            for layer in self.layers:
                x = layer(x, x, x, need_weights=need_weights)[0]
            return x

    module = Attending().eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        for need_weights in (False, True, False, True):
            agree(module, twin, noise(2, 5, 32), need_weights, times=2)


def test_transformer_encoder_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    module = nn.TransformerEncoder(layer, 4).eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, noise(2, 5, 32), times=4)


def test_recurrent_layers() -> None:
    module = nn.LSTM(32, 32, num_layers=4)
    body = mlp(8, 64)
    both = nn.ModuleDict({"lstm": module, "body": body}).eval()
    twin = copy.deepcopy(both)
    with streamed(both):
        for _ in range(4):
            agree(both["lstm"], twin["lstm"], noise(5, 2, 32))
            agree(both["body"], twin["body"], noise(2, 64))


class Coder(nn.Module):
    """A model with a second way in."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 32)
        self.encoder, self.decoder = mlp(4, seed=1), mlp(4, seed=2)

    def encode(self, tokens: Tensor) -> Tensor:
        return self.encoder(self.emb(tokens)) + self.emb.weight[0]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.encode(tokens))


def test_methods_other_than_forward() -> None:
    module = Coder().eval()
    twin = copy.deepcopy(module)
    tokens = torch.arange(12)
    with streamed(module):
        agree(module.encode, twin.encode, tokens, times=4)


def test_two_entry_points_in_turn() -> None:
    module = Coder().eval()
    twin = copy.deepcopy(module)
    tokens = torch.arange(12)
    with streamed(module):
        for _ in range(4):
            agree(module.encode, twin.encode, tokens)
            agree(module, twin, tokens)
            agree(module.decoder, twin.decoder, X)


def test_forward_called_past_the_hooks() -> None:
    module = mlp(6)
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module.forward, twin.forward, X, times=2)
        agree(module[2].forward, twin[2].forward, X, times=2)
        agree(module, twin, X, times=2)


def test_reads_outside_any_forward() -> None:
    module = Coder().eval()
    twin = copy.deepcopy(module)
    tokens = torch.arange(12)
    with streamed(module) as handle, torch.no_grad():
        for _ in range(3):
            same(module.emb.weight[0], twin.emb.weight[0])
            same(module.emb.weight[3:7, ::2], twin.emb.weight[3:7, ::2])
            same(F.embedding(tokens, module.emb.weight), F.embedding(tokens, twin.emb.weight))
            same(sum(p.double().norm() for p in module.parameters()), sum(p.double().norm() for p in twin.parameters()))
            assert module.emb.weight.tolist() == twin.emb.weight.tolist()
            assert float(module.encoder[0].bias[1]) == float(twin.encoder[0].bias[1])
            agree(module, twin, tokens)
        assert ("emb.weight", "outside any forward") in handle.telemetry.faults


def test_value_read_outside_a_forward_stays_true_after_more_passes() -> None:
    module = Coder().eval()
    twin = copy.deepcopy(module)
    tokens = torch.arange(12)
    with streamed(module):
        agree(module, twin, tokens)
        row, flat = module.emb.weight[5], module.encoder[2].weight.view(-1)
        agree(module, twin, tokens, times=4)
        same(row, twin.emb.weight[5])
        same(flat, twin.encoder[2].weight.view(-1))
    same(row, twin.emb.weight[5])
    same(flat, twin.encoder[2].weight.view(-1))


def test_view_of_a_weight_returned_by_a_forward() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(6)
            self.table = nn.Parameter(noise(32, 32))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.layers(x + self.table[0]), self.table[1], self.layers[4].weight.t()

    module = Returning().eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        kept = [agree(module, twin, X) for _ in range(6)]
        for outputs in kept:
            same(outputs, twin(X))
    for outputs in kept:
        same(outputs, twin(X))


def test_view_of_a_weight_kept_from_one_layer_to_a_later_one() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            held: list[Tensor] = []
            for layer in self.layers:
                layer.register_forward_hook(lambda module, _args, _out: held.append(module.weight[3]))
            for layer in self.layers:
                x = layer(x).tanh()
            for layer in self.layers:
                layer._forward_hooks.clear()
            return x + torch.stack(held).sum(0)

    module = Keeping().eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=5)


def test_experts_routed_by_data() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 8)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(8)
            )

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.gate(x).topk(2).indices
            out = torch.zeros_like(x)
            for number in chosen.unique().tolist():
                rows = (chosen == number).any(-1)
                out[rows] = out[rows] + self.experts[number](x[rows])
            return x + out

    module = nn.Sequential(*(Experts() for _ in range(3))).eval()
    twin = copy.deepcopy(module)
    with streamed(module, 0.1):
        for seed in range(12):
            agree(module, twin, noise(3, 32, seed=seed))


def test_identity_blocks_and_modules_without_parameters() -> None:
    layers = [layer for linear in mlp(6)[::2] for layer in (linear, nn.Identity(), nn.Dropout(0.5), nn.ReLU())]
    module = nn.Sequential(nn.Identity(), *layers, nn.Identity()).eval()
    twin = copy.deepcopy(module)
    with streamed(module) as handle:
        agree(module, twin, X, times=5)
        assert_streams_fully(handle)


def test_block_replaced_by_identity_while_streaming() -> None:
    module = nn.Sequential(*(mlp(2, seed=i) for i in range(5))).eval()
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=3)
        dropped, twin_dropped = module[2], twin[2]
        module[2] = twin[2] = nn.Identity()
        agree(module, twin, X, times=3)
        assert all(type(p) is nn.Parameter for p in dropped.parameters())
        module[2], twin[2] = dropped, twin_dropped
        agree(module, twin, X, times=3)


@pytest.mark.parametrize("drop", [True, False])
def test_train_mode_with_dropout(drop: bool) -> None:
    module = nn.Sequential(*(layer for linear in mlp(6)[::2] for layer in (linear, nn.Dropout(0.3)))).train(drop)
    twin = copy.deepcopy(module)

    def seeded(part: nn.Module) -> Any:
        def call(x: Tensor) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                return part(x)

        return call

    with streamed(module):
        agree(seeded(module), seeded(twin), X, times=5)


def test_inputs_of_changing_sizes() -> None:
    module = mlp(6)
    twin = copy.deepcopy(module)
    with streamed(module):
        for batch in (1, 7, 2, 0, 64, 1):
            agree(module, twin, noise(batch, 32), times=2)


def test_generator_that_yields_in_mid_forward() -> None:
    class Yielding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(mlp(5))

        def steps(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
                yield x

    module = Yielding().eval()
    twin = copy.deepcopy(module)
    with streamed(module), torch.no_grad():
        for _ in range(2):
            for ours, theirs in zip(module.steps(X), twin.steps(X), strict=True):
                same(ours, theirs)
                agree(module.layers[4], twin.layers[4], X)


def test_exception_in_mid_forward_leaves_the_next_call_right() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(mlp(6))

        def forward(self, x: Tensor, fail_at: int = -1) -> Tensor:
            for number, layer in enumerate(self.layers):
                if number == fail_at:
                    raise KeyError("asked for")
                x = layer(x)
            return x

    module = Failing().eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        for fail_at in (0, 3, 11, 5, 1):
            with pytest.raises(KeyError, match="asked for"), torch.no_grad():
                module(X, fail_at)
            agree(module, twin, X, times=2)
