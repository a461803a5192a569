"""Laws that hold whatever is done: books balance after each pass, and whoever waits can be stopped."""

from __future__ import annotations

import copy
import ctypes
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream.core.policy import registry
from fmstream.device.homes import MemoryHome
from fmstream.errors import CancelledRun
from fmstream.payloads.weights import Weights
from tests.kit import agree, budget, check_frames, mlp, noise, num_faults, same, same_state, streamed
from tests.kit_order import poison_given_back
from tests.kit_runtime import (
    Caller,
    Latch,
    Twin,
    leaves_nothing,
    masters_of,
    mlp_twin,
)

__all__ = ["leaves_nothing"]

X = noise(3, 32)
POLICIES = ("overlap_async", "one_ahead", "sync")


class Wanderer(nn.Module):
    """Layers called in an order that is told, a tied head, an embedding that is read as a weight, and an own bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(8)[::2])
        self.head = nn.Linear(32, 32, bias=False)
        self.emb = nn.Embedding(32, 32)
        self.head.weight = self.emb.weight
        self.bias = nn.Parameter(noise(32))
        self.steps: list[int] = []
        self.fails_at = -1

    def forward(self, x: Tensor) -> Tensor:
        for number, step in enumerate(self.steps):
            if number == self.fails_at:
                raise LookupError("as told")
            x = torch.tanh(self.layers[step](x) + self.bias)
        return self.head(x) + self.emb.weight[0]

    def encode(self, x: Tensor) -> Tensor:
        """Not the forward."""
        return self.layers[0](x) @ self.emb.weight


class Walk:
    """Does the same random things to a streamed module and to its twin."""

    def __init__(self, seed: int) -> None:
        self.order = random.Random(seed)
        self.module = Wanderer().eval()
        self.twin = copy.deepcopy(self.module)
        self.both = (self.module, self.twin)

    def choose_steps(self) -> None:
        """Mostly straight on, at times with some left out, repeated or exchanged."""
        steps = list(range(8))
        if self.order.random() < 0.4:
            steps = [step for step in steps if self.order.random() < 0.8]
        if self.order.random() < 0.2:
            self.order.shuffle(steps)
        for part in self.both:
            part.steps = steps

    def call(self) -> None:
        self.choose_steps()
        agree(self.module, self.twin, X)

    def fail(self) -> None:
        self.choose_steps()
        self.module.fails_at = self.order.randrange(8)
        if self.module.fails_at < len(self.module.steps):
            with pytest.raises(LookupError), torch.no_grad():
                self.module(X)
        self.module.fails_at = -1

    def edit(self) -> None:
        at, row = self.order.randrange(8), self.order.randrange(32)
        with torch.no_grad():
            for part in self.both:
                part.layers[at].weight[row] = row / 64
                part.emb.weight[row].mul_(0.5)

    def read(self) -> None:
        at = self.order.randrange(8)
        same(self.module.layers[at].weight.sum(), self.twin.layers[at].weight.sum())
        agree(self.module.encode, self.twin.encode, X)

    def save(self) -> None:
        same_state(self.module, self.twin)
        assert self.module.head.weight is self.module.emb.weight

    def replace(self) -> None:
        at, seed = self.order.randrange(8), self.order.randrange(100)
        for part in self.both:
            part.layers[at].weight = nn.Parameter(noise(32, 32, seed=seed) / 6)

    def learn(self) -> None:
        self.choose_steps()
        for part in self.both:
            part(X).square().sum().backward()
        for ours, theirs in zip(self.module.parameters(), self.twin.parameters(), strict=True):
            if theirs.grad is not None:
                same(ours.grad, theirs.grad)
        for part in self.both:
            part.zero_grad()

    def part(self) -> None:
        at = self.order.randrange(8)
        agree(self.module.layers[at], self.twin.layers[at], X)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
def test_books_balance_after_each_step_of_a_random_walk(policy: str, seed: int) -> None:
    walk = Walk(seed)
    steps = [walk.call] * 6 + [walk.fail, walk.edit, walk.read, walk.save, walk.replace, walk.learn, walk.part]
    with streamed(walk.module, walk.order.random() / 2, edited=True, policy=policy) as handle:
        for _ in range(40):
            walk.order.choice(steps)()
            check_frames(handle)
            executor = handle._session._executor
            assert executor is not None
            if executor.window is not None:
                executor.window.check()
            executor.settle()
            executor.pages.check()
            assert executor.statistics()["pages"].loading == 0
            assert len(handle.telemetry.notes) <= 3
    same_state(walk.module, walk.twin)


def test_every_pass_of_a_walk_keeps_within_the_memory() -> None:
    walk = Walk(9)
    memory = budget(walk.module, 0.2)
    with streamed(walk.module, memory=memory, edited=True) as handle:
        for _ in range(20):
            walk.call()
        for record in handle.telemetry.passes:
            assert record.resident_bytes + record.window_bytes <= memory


def test_reads_outside_the_plan_are_counted_and_a_planned_pass_makes_none() -> None:
    module = mlp(8)
    twin = copy.deepcopy(module)
    with streamed(module) as handle:
        agree(module, twin, X, times=3)
        assert not handle.telemetry.faults
        module[4].weight.sum()
        assert [count for count, _ in handle.telemetry.faults.values()] == [1]
        agree(module, twin, X, times=2)
        assert [count for count, _ in handle.telemetry.faults.values()] == [1]


@contextmanager
def hidden_masters(handle: fmstream.Stream) -> Iterator[None]:
    """Fill masters in RAM with NaN, while reads as planned are made from copies that nobody else knows."""
    executor = handle._session._executor
    assert executor is not None
    executor.settle()
    executor.loads.homes_changed()  # they know the addresses
    masters = [master for master in masters_of(handle) if master.span]
    kept = [(master.home, ctypes.string_at(master.home.address, master.span)) for master in masters]
    for master, (home, content) in zip(masters, kept, strict=True):
        copied = ctypes.create_string_buffer(content, master.span)
        master.home = MemoryHome(ctypes.addressof(copied), master.span, copied)
        ctypes.memset(home.address, 0xFF, master.span)
    try:
        yield
    finally:
        for master, (home, content) in zip(masters, kept, strict=True):
            ctypes.memmove(home.address, content, master.span)
            master.home = home
        executor.loads.homes_changed()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.7])
def test_only_planned_reads_of_masters_in_ram_give_values(
    policy: str, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_given_back(monkeypatch)
    module = Wanderer().eval()
    twin = copy.deepcopy(module)
    module.steps = twin.steps = list(range(8))
    with torch.no_grad():
        expected = twin(X)
    with streamed(module, fraction, policy=policy) as handle, torch.no_grad():
        gc.collect()  # parameters that somebody holds, were it garbage, are looked at in every pass
        for _ in range(3):
            same(module(X), expected)  # what is read outside its owner is learned here
        faults = num_faults(handle)
        with hidden_masters(handle):
            outputs = [module(X) for _ in range(4)]
            # This is what anybody would have seen who took the master instead.
            assert all(master.original.isnan().all() for master in masters_of(handle))
            assert not handle._session.weights._exposed
            assert num_faults(handle) == faults, handle.telemetry.faults
        for output in outputs:
            same(output, expected)


class HeldPolicy:
    """A policy whose n-th plan waits for a latch."""

    def __init__(self, n: int) -> None:
        self.latch, self.n, self.count = Latch(), n, 0
        self.plan = registry["overlap_async"]

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        if self.count == self.n:
            self.latch.wait_here()
        return self.plan(*args)


def test_a_call_that_waits_for_its_plan_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPolicy(1)
    monkeypatch.setitem(registry, "overlap_async", held)
    twin = mlp_twin()
    handle = fmstream.stream(twin.module, memory=twin.memory)
    try:
        twin.check_call()
        held.latch.wait_reached()
        caller = Caller(twin.module, twin.x)
        handle.cancel("no plan came")
        with pytest.raises(CancelledRun, match="no plan came"):
            caller.finish()
    finally:
        held.latch.open()
        handle.close()
    twin.check_restored()


def test_closing_does_not_wait_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPolicy(1)
    monkeypatch.setitem(registry, "overlap_async", held)
    twin = mlp_twin()
    handle = fmstream.stream(twin.module, memory=twin.memory)
    twin.check_call()
    held.latch.wait_reached()
    Caller(handle.close).finish()
    twin.check_restored()
    held.latch.open()


def test_a_call_that_waits_for_another_threads_call_ends_when_that_is_cancelled() -> None:
    latch = Latch()

    class Holding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            latch.wait_here()
            return x

        def __deepcopy__(self, memo: Any) -> nn.Module:
            return nn.Identity()

    layers = [*mlp(6)]
    twin = Twin.__new__(Twin)
    module = nn.Sequential(*layers[:6], Holding(), *layers[6:]).eval()
    twin.module, twin.copy, twin.x = module, copy.deepcopy(module), X
    twin.remember()
    twin.expected = twin.plain()
    with fmstream.stream(module, memory=budget(module)) as handle:
        first = Caller(module, X)
        latch.wait_reached()
        second = Caller(module, X)
        handle.cancel("enough")
        latch.open()
        for caller in (first, second):
            with pytest.raises(CancelledRun, match="enough"):
                caller.finish()
    twin.check_restored()


def test_weights_are_not_shown_once_more_after_the_run_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mlp_twin()
    shown: list[int] = []
    bind = Weights.bind

    def noted(weights: Weights, param: int, *args: Any) -> None:
        shown.append(param)
        bind(weights, param, *args)

    monkeypatch.setattr(Weights, "bind", noted)
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        twin.check_call()
        handle.cancel()
        shown.clear()
        with pytest.raises(CancelledRun):
            twin.module(twin.x)
        assert shown == []
    twin.check_restored()
