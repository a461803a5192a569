"""Handles: opened within each other, closed in any order, with any memory."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import fmstream
from fmstream.device.device import CpuDevice
from fmstream.errors import ClosedError, ConfigError, MemoryBudgetError
from tests.kit_runtime import (
    Caller,
    Twin,
    check_pages,
    leaves_nothing,
    make_input,
    make_mlp,
    mlp_twin,
    weights_bytes,
)

__all__ = ["leaves_nothing"]


class Pipe:
    """A pipeline of three modules."""

    def __init__(self, text: nn.Module, unet: nn.Module, vae: nn.Module) -> None:
        self.text, self.unet, self.vae = text, unet, vae
        self.components = {"text": text, "unet": unet, "vae": vae}

    def __call__(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        with torch.no_grad():
            x = self.text(x)
            for _ in range(steps):
                x = x + self.unet(x)
            return self.vae(x)  # type: ignore[no-any-return]


class Pipe2(Pipe):
    """Another one, that uses the same parts otherwise."""

    def __call__(self, x: torch.Tensor, steps: int = 3) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(steps):
                x = self.unet(x) - self.text(x)
            return self.vae(x)  # type: ignore[no-any-return]


def make_pipes() -> tuple[Pipe, Pipe2, list[Twin]]:
    twins = [Twin(make_mlp(layers, seed=layers), make_input()) for layers in (3, 6, 4)]
    first = Pipe(*(twin.module for twin in twins))
    return first, Pipe2(**first.components), twins


def half(*twins: Twin) -> int:
    return sum(twin.num_bytes for twin in twins) // 2


def test_an_inner_handle_takes_over_and_the_outer_one_resumes() -> None:
    twin = mlp_twin()
    with fmstream.stream(twin.module, memory=twin.memory) as outer:
        for _ in range(3):
            twin.check_call()
        seen = len(outer.telemetry.passes)
        with fmstream.stream(twin.module, memory=twin.memory * 3 // 2, policy="one_ahead") as inner:
            for _ in range(3):
                twin.check_call()
            assert len(inner.telemetry.passes) == 3
            assert len(outer.telemetry.passes) == seen
        for _ in range(3):
            twin.check_call()
        check_pages(outer)
        assert len(outer.telemetry.passes) == seen + 3
        assert outer.telemetry.passes[-1].streamed_bytes > 0
        assert inner.report.totals.passes == 3
    assert outer.report.totals.passes == seen + 3
    twin.check_restored()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_handles_on_one_module_close_in_any_order(order: tuple[int, ...]) -> None:
    twin = mlp_twin()
    handles = [fmstream.stream(twin.module, memory=twin.memory) for _ in range(3)]
    twin.check_call()
    for index in order:
        handles[index].close()
        for _ in range(2):
            twin.check_call()
    twin.check_restored()


@pytest.mark.parametrize("opened", [(0, 1), (1, 0)])
@pytest.mark.parametrize("closed", [(0, 1), (1, 0)])
def test_two_pipelines_of_the_same_parts_in_each_order(opened: tuple[int, int], closed: tuple[int, int]) -> None:
    pipes: list[Pipe]
    *pipes, twins = make_pipes()  # type: ignore[assignment]
    x = make_input()
    expected = [pipe(x) for pipe in pipes]
    handles: dict[int, fmstream.Stream] = {}
    for index in opened:
        handles[index] = fmstream.stream(pipes[index], memory=half(*twins))
        for pipe, result in zip(pipes, expected, strict=True):
            assert torch.equal(pipe(x), result)
            assert torch.equal(pipe(x), result)
    for index in closed:
        handles[index].close()
        for pipe, result in zip(pipes, expected, strict=True):
            assert torch.equal(pipe(x), result)
            assert torch.equal(pipe(x), result)
    for twin in twins:
        twin.check_restored()


def test_handles_that_share_one_part_of_several_close_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        _, _, (text, unet, vae) = make_pipes()
        groups = [(text, unet), (unet, vae), (text, vae)]
        handles = [fmstream.stream([t.module for t in group], memory=half(*group)) for group in groups]
        for index in order:
            for twin in (text, unet, vae):
                twin.check_call()
            handles[index].close()
            for twin in (text, unet, vae):
                twin.check_call()
        for twin in (text, unet, vae):
            twin.check_restored()


def test_wrap_run_unwrap_again_and_again() -> None:
    pipe, _, twins = make_pipes()
    x = make_input()
    expected = pipe(x)
    for _ in range(3):
        with fmstream.stream(pipe, memory=half(*twins)) as handle:
            assert torch.equal(handle(x), expected)
            assert torch.equal(pipe(x), expected)
            check_pages(handle)
        for twin in twins:
            twin.check_restored()
    assert torch.equal(fmstream.run(pipe, x, memory=half(*twins)).output, expected)


def test_close_is_idempotent_and_a_closed_handle_refuses_calls() -> None:
    twin = mlp_twin()
    handle = fmstream.stream(twin.module, memory=twin.memory)
    twin.check_call()
    assert not handle.closed
    handle.close()
    handle.close()
    assert handle.closed
    with pytest.raises(ClosedError, match="open another handle"):
        handle(twin.x)
    twin.check_restored()
    assert handle.report.totals.passes == 1
    Caller(handle.close).finish()
    with handle:
        pass


def test_close_within_a_pass_takes_effect_at_its_end() -> None:
    twin = mlp_twin()
    handle = fmstream.stream(twin.module, memory=twin.memory)
    for _ in range(2):
        twin.check_call()
    hook = twin.module[4].register_forward_pre_hook(lambda *_: handle.close())  # type: ignore[index, union-attr]
    twin.check_call()
    hook.remove()
    twin.check_restored()


def test_close_from_another_thread_while_the_module_is_called() -> None:
    twin = mlp_twin()
    for _ in range(5):
        handle = fmstream.stream(twin.module, memory=twin.memory)
        caller = Caller(lambda: [twin.check_call() for _ in range(10)])
        closer = Caller(handle.close)
        closer.finish()
        caller.finish()
        twin.check_restored()


def test_a_handle_opened_within_a_pass_of_its_modules_is_refused() -> None:
    twin = mlp_twin()

    def reopen(*args: Any) -> None:
        fmstream.stream(twin.module, memory=twin.memory)

    with fmstream.stream(twin.module, memory=twin.memory):
        twin.check_call()
        hook = twin.module[4].register_forward_pre_hook(reopen)  # type: ignore[index, union-attr]
        with pytest.raises(ConfigError, match="open the handle before"):
            twin.module(twin.x)
        hook.remove()
        twin.check_call()
    twin.check_restored()


def test_a_handle_that_cannot_open_leaves_the_one_around_it() -> None:
    twin = mlp_twin()
    with fmstream.stream(twin.module, memory=twin.memory) as outer:
        for _ in range(2):
            twin.check_call()
        with pytest.raises(MemoryBudgetError):
            fmstream.stream(twin.module, memory=100)
        for _ in range(2):
            twin.check_call()
        assert len(outer.telemetry.passes) == 4
        assert outer.telemetry.passes[-1].streamed_bytes > 0
    twin.check_restored()


class Model(nn.Module):
    """A module with a method, and an argument that is named like an option."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_mlp()

    def forward(self, x: torch.Tensor, memory: float = 0.0) -> torch.Tensor:
        return self.body(x) + memory  # type: ignore[no-any-return]

    def generate(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        for _ in range(steps):
            x = self.body(x)
        return x


def test_run_calls_a_method() -> None:
    twin = Twin(Model(), make_input())
    with torch.no_grad():
        result = fmstream.run(twin.module, twin.x, steps=3, method="generate", memory="50%")
        assert torch.equal(result.output, twin.copy.generate(twin.x, 3))  # type: ignore[operator]
        assert result.report.totals.passes == 3
        bound = fmstream.run(twin.module.generate, twin.x, memory="50%")
        assert torch.equal(bound.output, twin.copy.generate(twin.x))  # type: ignore[operator]
    twin.check_restored()


def test_run_takes_a_function_and_its_modules() -> None:
    first, second = mlp_twin(4), Twin(make_mlp(5, seed=9), make_input())

    def closes_over(x: torch.Tensor) -> torch.Tensor:
        return second.module(first.module(x))  # type: ignore[no-any-return]

    expected = closes_over(first.x)
    for modules in ({"a": first.module, "b": second.module}, [first.module, second.module]):
        result = fmstream.run(closes_over, first.x, modules=modules, memory="50%")
        assert torch.equal(result.output, expected)
        assert result.report.totals.passes == 2
    with pytest.raises(ConfigError, match="modules="):
        fmstream.run(closes_over, first.x, memory="50%")


def test_run_refuses_a_name_that_both_know_and_names_the_remedy() -> None:
    twin = Twin(Model(), make_input())
    with pytest.raises(ConfigError, match=r"call_kwargs=\{'memory'.*config=\{'memory'"):
        fmstream.run(twin.module, twin.x, memory="50%")
    with torch.no_grad():
        result = fmstream.run(twin.module, twin.x, call_kwargs={"memory": 2.0}, config={"memory": "50%"})
    assert torch.equal(result.output, twin.expected + 2.0)
    assert result.report.totals.passes == 1
    with pytest.raises(ConfigError, match="steps"):
        fmstream.run(twin.module, twin.x, method="generate", steps=1, call_kwargs={"steps": 2})
    twin.check_restored()


def test_run_does_not_pass_an_option_on_to_whoever_takes_any_keyword() -> None:
    given: list[dict[str, Any]] = []
    twin = Twin(Model(), make_input())

    def pipeline(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        given.append(kwargs)
        return twin.module(x)  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match=r"config=\{'num_workers'.*call_kwargs=\{'num_workers'"):
        fmstream.run(pipeline, twin.x, modules=twin.module, num_workers=2)
    assert not given
    fmstream.run(pipeline, twin.x, modules=twin.module, steps=3, call_kwargs={"num_workers": 2})
    assert given == [{"steps": 3, "num_workers": 2}]
    twin.check_restored()


def test_run_names_the_nearest_method() -> None:
    twin = Twin(Model(), make_input())
    with pytest.raises(ConfigError, match="'generate'"):
        fmstream.run(twin.module, twin.x, method="generat", memory="50%")
    with pytest.raises(ConfigError, match="memory"):
        fmstream.stream(twin.module, memry="50%")
    twin.check_restored()


class Uneven(nn.Module):
    """Layers of different sizes, one of them nested in a module with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(32, 64)
        self.big = nn.Linear(64, 300)
        self.back = nn.Linear(300, 32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.big(self.small(x))) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [make_mlp, Uneven, lambda: make_mlp(3, 33), lambda: nn.Embedding(7, 5)])
def test_the_smallest_memory_that_the_message_names_works(make: Callable[[], nn.Module]) -> None:
    module = make()
    x = torch.tensor([[1, 2]]) if isinstance(module, nn.Embedding) else None
    if x is None:
        x = make_input(next(m for m in module.modules() if isinstance(m, nn.Linear)).in_features)
    twin = Twin(module, x)
    with pytest.raises(MemoryBudgetError) as caught:
        fmstream.stream(module, memory=64)
    found = re.search(r"smallest that works is (\d+) bytes, because '([^']+)'", str(caught.value))
    assert found is not None, caught.value
    smallest = int(found[1])
    assert smallest == fmstream.smallest_memory(module)
    if isinstance(module, Uneven):
        assert found[2] in ("big", "back")
    twin.check_restored()
    for policy in ("overlap_async", "one_ahead", "sync"):
        with fmstream.stream(module, memory=smallest, policy=policy) as handle:
            for _ in range(4):
                twin.check_call()
            check_pages(handle)
    if smallest <= twin.num_bytes:
        with pytest.raises(MemoryBudgetError, match=str(smallest)):
            fmstream.stream(module, memory=smallest - 1)
    twin.check_restored()


def test_smallest_memory_changes_nothing() -> None:
    twin = mlp_twin()
    fmstream.smallest_memory(twin.module)
    twin.check_restored()
    with fmstream.stream(twin.module, memory=twin.memory):
        twin.check_call()
        assert fmstream.smallest_memory(twin.module) == fmstream.smallest_memory(twin.copy)
        twin.check_call()
    twin.check_restored()


@pytest.mark.parametrize("memory", [None, "auto", "100%", "1GiB", "50%", 70_000])
def test_every_way_to_give_memory(memory: int | str | None) -> None:
    twin = mlp_twin()
    streams = memory in ("50%", 70_000)
    with fmstream.stream(twin.module, memory=memory) as handle:
        for _ in range(3):
            twin.check_call()
        if not streams:
            seen: list[nn.Parameter] = []
            hook = twin.module[2].register_forward_pre_hook(  # type: ignore[index, union-attr]
                lambda module, args: seen.append(module.weight)
            )
            twin.check_call()
            hook.remove()
            assert seen[0] is twin.params["2.weight"]()
    report = handle.report
    assert (sum(record.streamed_bytes for record in handle.telemetry.passes) > 0) == streams
    assert any("nothing is streamed" in note for note in report.notes) == (not streams)
    if isinstance(memory, int):
        assert report.memory_bytes == memory
    assert report.weights_bytes == twin.num_bytes
    twin.check_restored()


@pytest.mark.parametrize("policy", ["overlap_async", "one_ahead", "sync"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_the_arena_never_passes_the_memory_given(policy: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, _, twins = make_pipes()
    asked: list[int] = []
    slab = CpuDevice.slab

    def counted(device: CpuDevice, num_bytes: int) -> Any:
        asked.append(num_bytes)
        return slab(device, num_bytes)

    monkeypatch.setattr(CpuDevice, "slab", counted)
    memory = int(sum(twin.num_bytes for twin in twins) * share)
    x = make_input()
    expected = pipe(x)
    with fmstream.stream(pipe, memory=memory, policy=policy) as handle:
        for _ in range(4):
            assert torch.equal(handle(x), expected)
    # One at a time: nobody looked into an earlier one, so that it would have to be kept beside the next.
    assert len(asked) == 1
    assert max(asked) <= memory
    assert all(r.resident_bytes + r.window_bytes <= memory for r in handle.telemetry.passes)


def test_memory_is_flat_over_many_handles() -> None:
    twin = mlp_twin(8, 512)
    process = psutil.Process()

    def cycle() -> None:
        with fmstream.stream(twin.module, memory=twin.memory):
            for _ in range(3):
                twin.check_call()

    for _ in range(4):
        cycle()
    gc.collect()
    before = process.memory_info().rss
    for _ in range(20):
        cycle()
    gc.collect()
    grown = process.memory_info().rss - before
    assert grown < weights_bytes(twin.module), f"{grown} bytes more after 20 handles"


def test_a_dropped_handle_does_not_keep_the_modules_alive() -> None:
    twin = mlp_twin()
    with fmstream.stream(twin.module, memory=twin.memory):
        twin.check_call()
    module = weakref.ref(twin.module)
    del twin
    gc.collect()
    assert module() is None


def test_a_replaced_parameter_streams_and_stays_after_close() -> None:
    twin = mlp_twin()
    new = nn.Parameter(torch.randn(64, 64))
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        for _ in range(2):
            twin.check_call()
        twin.module[2].weight = new  # type: ignore[index, union-attr]
        twin.copy[2].weight = nn.Parameter(new.detach().clone())  # type: ignore[index, union-attr]
        twin.params["2.weight"] = weakref.ref(new)
        twin.expected = twin.plain()
        for _ in range(3):
            twin.check_call()
        check_pages(handle)
    twin.check_restored()
