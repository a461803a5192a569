"""Threads, event loops and modes: who calls does not change what comes out."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import fmstream
from tests.kit_runtime import (
    TIMEOUT,
    Caller,
    Twin,
    check_pages,
    leaves_nothing,
    make_input,
    make_mlp,
    mlp_twin,
    run_python,
)

__all__ = ["leaves_nothing"]

FORWARDS = 50


def call_often(twin: Twin, start: threading.Barrier, num: int = FORWARDS) -> Callable[[], None]:
    """Many calls, each compared with the twin."""

    def work() -> None:
        start.wait(TIMEOUT)
        for _ in range(num):
            twin.check_call()

    return work


def sharing_twins() -> tuple[Twin, Twin]:
    """Two MLPs that have two layers in common."""
    first = make_mlp(4, seed=1)
    second = make_mlp(4, seed=2)
    second[0], second[4] = first[2], first[6]
    return Twin(first, make_input()), Twin(second, make_input(seed=3))


def test_four_threads_on_two_models_that_share_layers_under_one_handle() -> None:
    first, second = sharing_twins()
    start = threading.Barrier(4)
    with fmstream.stream([first.module, second.module], memory=first.num_bytes // 2) as handle:
        callers = [Caller(call_often(twin, start)) for twin in (first, first, second, second)]
        for caller in callers:
            caller.finish()
        check_pages(handle)
    assert sum(record.streamed_bytes for record in handle.telemetry.passes) > 0
    assert len(handle.telemetry.passes) == 4 * FORWARDS
    first.check_restored()
    second.check_restored()


def test_four_threads_on_two_models_that_share_layers_under_two_handles() -> None:
    first, second = sharing_twins()
    start = threading.Barrier(4)
    with fmstream.stream(first.module, memory=first.memory), fmstream.stream(second.module, memory=second.memory):
        callers = [Caller(call_often(twin, start)) for twin in (first, first, second, second)]
        for caller in callers:
            caller.finish()
    first.check_restored()
    second.check_restored()


def test_threads_that_open_and_close_handles_on_one_module() -> None:
    twin = mlp_twin(3)
    start = threading.Barrier(3)

    def work() -> None:
        start.wait(TIMEOUT)
        for _ in range(8):
            with fmstream.stream(twin.module, memory=twin.memory):
                twin.check_call()

    callers = [Caller(work), Caller(work), Caller(call_often(twin, start))]
    for caller in callers:
        caller.finish()
    twin.check_restored()


def tied_twins() -> tuple[Twin, Twin]:
    """Two models, of their own modules, that have one parameter object in common."""
    first, second = make_mlp(4, seed=1), make_mlp(4, seed=2)
    second[2].weight = first[4].weight
    return Twin(first, make_input()), Twin(second, make_input(seed=3))


def test_an_edit_through_one_handle_is_seen_through_the_other() -> None:
    first, second = tied_twins()
    with (
        fmstream.stream(first.module, memory=first.memory) as one,
        fmstream.stream(second.module, memory=second.memory) as two,
    ):
        for step in range(6):
            first.check_call()
            second.check_call()
            editor = first.module if step % 2 else second.module
            with torch.no_grad():
                editor[4 if step % 2 else 2].weight.mul_(1.5)  # type: ignore[index, operator, union-attr]
                first.copy[4].weight.mul_(1.5)  # type: ignore[index, operator, union-attr]
                second.copy[2].weight.copy_(first.copy[4].weight)  # type: ignore[index, operator, union-attr]
            first.expected, second.expected = first.plain(), second.plain()
            check_pages(one)
            check_pages(two)
        first.check_call()
        second.check_call()
    first.check_restored()
    second.check_restored()


def test_threads_on_two_handles_with_a_parameter_in_common() -> None:
    first, second = tied_twins()
    start = threading.Barrier(4)
    with fmstream.stream(first.module, memory=first.memory), fmstream.stream(second.module, memory=second.memory):
        callers = [Caller(call_often(twin, start)) for twin in (first, first, second, second)]
        for caller in callers:
            caller.finish()
    first.check_restored()
    second.check_restored()


def test_crossed_calls_on_two_handles_do_not_lock_each_other_out() -> None:
    """One thread calls B in the midst of A, the other A in the midst of B; the two share a parameter."""
    done = run_python("""
        import os, threading, torch, fmstream
        from tests.test_threads import tied_twins
        from tests.kit_runtime import Caller

        first, second = tied_twins()
        inside = threading.Barrier(2)
        def nest(outer, inner):
            depth = threading.local()
            def hook(module, args):
                if getattr(threading.current_thread(), "outer", None) is outer:
                    inner.check_call()
            outer.module[2].register_forward_pre_hook(hook)
            def work():
                threading.current_thread().outer = outer
                inside.wait(20)
                for _ in range(50):
                    outer.check_call()
            return work
        one = fmstream.stream(first.module, memory=first.memory)
        two = fmstream.stream(second.module, memory=second.memory)
        callers = [Caller(work) for work in (nest(first, second), nest(second, first))]
        for caller in callers:
            caller.join(20)
            if caller.is_alive():
                print("the two threads hang", flush=True)
                os._exit(1)
            caller.finish()
        one.close()
        two.close()
        print("fine")
        """)
    assert done.stdout == "fine\n", done.stdout + done.stderr


async def test_eight_calls_at_once() -> None:
    twin = mlp_twin(4)
    inputs = [make_input(seed=seed) for seed in range(8)]
    with torch.no_grad():
        calls = (fmstream.arun(twin.module, x, memory=twin.memory) for x in inputs)
        results = await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT)
        for x, result in zip(inputs, results, strict=True):
            assert torch.equal(result.output, twin.copy(x))
    twin.check_restored()


async def test_eight_calls_at_once_on_one_open_handle() -> None:
    twin = mlp_twin(4)
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        calls = (asyncio.to_thread(twin.check_call) for _ in range(8))
        await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT)
        assert len(handle.telemetry.passes) == 8
    twin.check_restored()


async def test_a_synchronous_run_inside_a_running_loop() -> None:
    twin = mlp_twin()
    with torch.no_grad():
        result = fmstream.run(twin.module, twin.x, memory=twin.memory)
        assert torch.equal(result.output, twin.expected)
        with fmstream.stream(twin.module, memory=twin.memory):
            for _ in range(3):
                twin.check_call()
        assert torch.equal((await fmstream.arun(twin.module, twin.x, memory=twin.memory)).output, twin.expected)
        Caller(twin.check_call).finish()
    twin.check_restored()


def test_two_event_loops_in_a_row_on_one_handle() -> None:
    twin = mlp_twin()

    async def use() -> None:
        for _ in range(3):
            twin.check_call()
        await asyncio.to_thread(twin.check_call)

    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        asyncio.run(use())
        asyncio.run(use())
        check_pages(handle)
    twin.check_restored()
    with torch.no_grad():
        for _ in range(2):
            result = asyncio.run(fmstream.arun(twin.module, twin.x, memory=twin.memory))
            assert torch.equal(result.output, twin.expected)


def test_an_event_loop_without_readers_is_enough() -> None:
    class NoReaders(asyncio.SelectorEventLoop):
        """As the default loop of some systems, which watches no descriptors."""

        def add_reader(self, *args: Any) -> None:
            raise NotImplementedError

        add_writer = add_reader

    twin = mlp_twin()
    with asyncio.Runner(loop_factory=NoReaders) as runner, torch.no_grad():
        result = runner.run(fmstream.arun(twin.module, twin.x, memory=twin.memory))
    assert torch.equal(result.output, twin.expected)
    twin.check_restored()


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, autocast])
async def test_the_modes_of_the_caller_hold(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    twin = mlp_twin()
    with mode():
        expected = twin.copy(twin.x)
        result = (await fmstream.arun(twin.module, twin.x, memory=twin.memory)).output
        assert torch.equal(fmstream.run(twin.module, twin.x, memory=twin.memory).output, expected)
    assert torch.equal(result, expected)
    assert result.dtype == expected.dtype
    assert result.requires_grad == expected.requires_grad
    assert result.is_inference() == expected.is_inference()
    twin.check_restored()


async def test_context_variables_of_the_caller_hold() -> None:
    import contextvars

    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("mine")
    twin = mlp_twin(2)
    seen: list[str] = []
    hook = twin.module.register_forward_pre_hook(lambda *_: seen.append(variable.get()))
    await fmstream.arun(twin.module, twin.x, memory=twin.memory)
    hook.remove()
    assert seen == ["mine"]


@pytest.mark.parametrize("kind", [StopIteration, ValueError, SystemExit])
async def test_what_the_call_raises_reaches_the_awaiting_task(kind: type[BaseException]) -> None:
    twin = mlp_twin(2)

    def fail(*args: Any) -> None:
        raise kind("mine")

    hook = twin.module.register_forward_hook(fail)
    with pytest.raises((kind, RuntimeError)) as caught:
        await fmstream.arun(twin.module, twin.x, memory=twin.memory)
    hook.remove()
    assert kind is StopIteration or caught.type is kind
    twin.check_restored()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_handle_of_inference_mode_serves_every_other_mode(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    twin = mlp_twin()
    with torch.inference_mode():
        handle = fmstream.stream(twin.module, memory=twin.memory)
    with handle:
        with mode():
            for _ in range(3):
                assert torch.equal(twin.module(twin.x), twin.expected)
        for _ in range(3):
            a, b = twin.x.clone().requires_grad_(), twin.x.clone().requires_grad_()
            twin.module(a).square().sum().backward()
            twin.copy(b).square().sum().backward()
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)
    for param, other in zip(twin.module.parameters(), twin.copy.parameters(), strict=True):
        assert not param.is_inference()
        assert param.grad is not None
        assert other.grad is not None
        assert torch.equal(param.grad, other.grad)
    twin.check_restored()


def test_a_first_run_under_inference_mode_and_a_backward_later() -> None:
    twin = mlp_twin()
    with fmstream.stream(twin.module, memory=twin.memory):
        with torch.inference_mode():
            for _ in range(3):
                assert torch.equal(twin.module(twin.x), twin.expected)
        x = twin.x.clone().requires_grad_()
        y = twin.x.clone().requires_grad_()
        twin.module(x).sum().backward()
        twin.copy(y).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    twin.check_restored()


def test_a_forward_that_calls_its_children_in_a_pool_of_threads() -> None:
    class Pool(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(2) as pool:
                results = [pool.submit(part, x) for part in self.parts]
                return sum((result.result(20.0) for result in results), torch.zeros(()))

    module = Pool().requires_grad_(False)
    twin = copy.deepcopy(module)
    x = torch.randn(3, 32)
    with fmstream.stream(module, memory="40%"):
        for _ in range(4):
            assert torch.equal(module(x), twin(x))
