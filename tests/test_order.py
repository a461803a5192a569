"""Reads that end as early and as late as they may give the same results; without a fence they do not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream.actors import compute
from fmstream.actors.chunks import Piece
from fmstream.actors.compute import Executor
from fmstream.actors.loads import Loads
from fmstream.actors.prefetch import Request
from fmstream.actors.runs import Loaded
from fmstream.core.pages import PageError
from tests.kit import agree, budget, check_frames, mlp, noise, same, same_state, streamed, streamed_bytes
from tests.kit_order import MODES, OrderedActor, order_reads
from tests.kit_runtime import map_weights

X = noise(3, 64)
POLICIES = ("overlap_async", "one_ahead", "sync")
FRACTIONS = (0.0, 0.15, 0.3, 0.5, 0.7, 0.9)


def deep(seed: int = 0) -> nn.Sequential:
    """Eight layers that are streamed one by one."""
    return mlp(8, 64, seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_are_equal_at_each_window_size(policy: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actors = order_reads(monkeypatch, mode)
    for fraction in FRACTIONS:
        module = deep()
        twin = copy.deepcopy(module)
        with streamed(module, fraction, policy=policy):
            agree(module, twin, X, times=5)
            same_state(module, twin)
    if policy == "overlap_async" and mode != "early":
        assert max(actor.most_queued for actor in actors) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prefetch_window", [1, 2, 3, 100])
def test_outputs_are_equal_at_each_lookahead(prefetch_window: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actors = order_reads(monkeypatch, mode)
    module = deep()
    twin = copy.deepcopy(module)
    with streamed(module, 0.6, prefetch_window=prefetch_window):
        agree(module, twin, X, times=5)
    assert 0 < actors[0].most_queued <= prefetch_window + 1


@pytest.mark.parametrize("mode", MODES)
def test_weights_in_files_arrive_in_any_order(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode)
    module = map_weights(deep(), tmp_path / "w.safetensors")
    twin = copy.deepcopy(module)
    for fraction in (0.0, 0.4, 0.8):
        with streamed(module, fraction):
            agree(module, twin, X, times=4)


class Dropping(nn.Module):
    """Calls the layers that it is told to, and some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(deep()[::2])
        self.steps: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = torch.tanh(self.layers[step](x))
        return x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", MODES)
def test_layers_skipped_repeated_and_in_another_order(mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode, seed)
    order = random.Random(seed)
    module = Dropping().eval()
    twin = copy.deepcopy(module)
    with streamed(module, 0.4) as handle:
        for _ in range(12):
            steps = [step for step in range(8) if order.random() < 0.8]
            if order.random() < 0.3:
                order.shuffle(steps)
            module.steps = twin.steps = steps + steps[:1]
            agree(module, twin, X)
            check_frames(handle)


@pytest.mark.parametrize("mode", MODES)
def test_an_edit_reaches_copies_that_are_on_their_way(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode)
    module = deep()
    twin = copy.deepcopy(module)
    order = random.Random(1)
    with streamed(module, 0.5, edited=True), torch.no_grad():
        for value in range(40):
            agree(module, twin, X)
            at = 2 * order.randrange(8)
            for part in (module, twin):
                part[at].weight[value] = value / 100
            same(module[at].weight.sum(), twin[at].weight.sum())
            if value % 10 == 9:
                for part in (module, twin):
                    part[at].weight = nn.Parameter(noise(64, 64, seed=value) / 8)
        agree(module, twin, X, times=3)
    same_state(module, twin)


@pytest.mark.parametrize("mode", MODES)
def test_a_view_that_outlives_its_unit_is_not_overwritten(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep()

        def forward(self, x: Tensor) -> Tensor:
            rows = []
            for layer in self.layers[::2]:
                x = torch.tanh(layer(x))
                rows.append(layer.weight[0].detach())
            return x + torch.stack(rows).sum(0)

    order_reads(monkeypatch, mode)
    module = Keeping().eval()
    twin = copy.deepcopy(module)
    with streamed(module, 0.4):
        agree(module, twin, X, times=4)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_do_not_see_what_came_later(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode)
    module = deep()
    twin = copy.deepcopy(module)
    with streamed(module, 0.3):
        for _ in range(3):
            for part in (module, twin):
                part(X).square().sum().backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        same(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", MODES)
def test_what_was_issued_ahead_is_dropped_with_an_exception(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode)
    module = deep()
    twin = copy.deepcopy(module)

    def fail(*_args: Any) -> None:
        raise LookupError("in mid-pass")

    with streamed(module, 0.4) as handle:
        for at in (3, 9, 15, 1):
            agree(module, twin, X, times=2)
            hook = module[at].register_forward_pre_hook(fail)
            with pytest.raises(LookupError), torch.no_grad():
                module(X)
            hook.remove()
            check_frames(handle)
        agree(module, twin, X, times=2)


# A run of frames is used again only after it was given back, and shown only after its bytes came.  Each test below
# takes one of these fences away, and the comparison with the twin, or the page table, must notice.


class Blind:
    """A page table that refuses nothing."""

    def __init__(self, num_pages: int, num_frames: int) -> None:
        self.frame = np.zeros(num_pages, np.int32)

    def load(self, start: int, count: int, frame: int) -> None:
        """Note where the run is; whoever had the frames before is not asked."""
        self.frame[start : start + count] = np.arange(frame, frame + count)

    def find_free(self, count: int) -> int:
        """Any frame will do."""
        return 0

    def _allow(self, start: int, count: int) -> None:
        """Do nothing."""

    ready = cancel = evict = pin = unpin = _allow


def outputs_are_right(fraction: float = 0.4, **options: Any) -> bool:
    """Whether all outputs were those of the twin."""
    module = deep()
    twin = copy.deepcopy(module)
    with fmstream.stream(module, memory=budget(module, fraction), **options) as handle, torch.no_grad():
        outputs = [module(X) for _ in range(4)]
        assert streamed_bytes(handle) > 0
        return all(torch.equal(output, twin(X)) for output in outputs)


def without_waiting(_loads: Loads, _loaded: Loaded) -> None:
    """Take a run for loaded as soon as it is asked for."""


def releases_at_once(bind: Callable[[Executor, Loaded], None]) -> Callable[[Executor, Loaded], None]:
    """Give the frames of a unit to the next one while it is in use."""

    def binding(executor: Executor, loaded: Loaded) -> None:
        bind(executor, loaded)
        if loaded.position is not None and executor.window is not None:
            executor.window.release(loaded.position)
            loaded.position = None
            executor._top_up()

    return binding


@pytest.mark.parametrize("mode", MODES)
def test_the_right_order_passes_the_test_of_the_fences(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode)
    assert outputs_are_right()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["late", "newest"])
def test_a_missing_wait_is_noticed_by_the_page_table(mode: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode)
    monkeypatch.setattr(Loads, "arrive", without_waiting)
    with pytest.raises(PageError, match="is loading"):
        outputs_are_right(policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["late", "newest"])
def test_a_missing_wait_changes_the_output(mode: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode)
    monkeypatch.setattr(Loads, "arrive", without_waiting)
    monkeypatch.setattr(compute, "PageTable", Blind)
    assert not outputs_are_right(policy=policy)


@pytest.mark.parametrize("mode", MODES)
def test_an_early_release_is_noticed_by_the_page_table(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode)
    monkeypatch.setattr(Executor, "_bind", releases_at_once(Executor._bind))
    with pytest.raises(PageError, match="is taken by page"):
        outputs_are_right()


@pytest.mark.parametrize("mode", MODES)
def test_an_early_release_changes_the_output(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order_reads(monkeypatch, mode)
    monkeypatch.setattr(Executor, "_bind", releases_at_once(Executor._bind))
    monkeypatch.setattr(compute, "PageTable", Blind)
    assert not outputs_are_right()


def test_a_record_that_comes_before_the_bytes_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_to_read(_actor: OrderedActor, pieces: Sequence[Piece]) -> Request:
        return Request((), tuple(pieces))

    order_reads(monkeypatch, "early")
    monkeypatch.setattr(OrderedActor, "prepare", nothing_to_read)
    assert not outputs_are_right()
