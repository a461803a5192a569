"""Forwards in streams of the user's, in several threads, and in torch's modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmstream.emulator.backlog import Execution
from tests.accelerator.cases import WIDTH, call, pipeline, x
from tests.accelerator.kit import ORDERS, equal, fresh, here, on_host, streaming, twin_on
from tests.kit import mlp
from tests.kit_runtime import Caller

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("emu", torch.bfloat16),
    "grad": contextlib.nullcontext,
}


@pytest.mark.parametrize("execution", ORDERS)
def test_a_forward_in_a_stream_of_the_users(execution: Execution) -> None:
    fresh(execution)
    module = mlp(8, WIDTH)
    twin = twin_on(module)
    main, side = here.module.current_stream(), here.module.Stream()
    with torch.no_grad(), streaming(module):
        outputs = []
        for number in range(6):
            if number % 2:
                side.wait_stream(main)
                with here.module.stream(side):
                    outputs.append(call(module, number))
                main.wait_stream(side)
            else:
                outputs.append(call(module, number))
        for number, output in enumerate(outputs):
            output.record_stream(main)
            equal(on_host(output), on_host(call(twin, number)))
        outputs.clear()
        del output


@pytest.mark.parametrize("execution", ORDERS)
def test_passes_in_unrelated_streams(execution: Execution) -> None:
    fresh(execution)
    parts = pipeline()
    twin = twin_on(parts)
    streams = [here.module.Stream() for _ in range(3)]
    names = ("unet", "decoder", "text", "unet", "unet", "decoder", "decoder", "unet", "decoder")
    inputs = [x(3, WIDTH, seed=number) for number in range(len(names))]
    for stream in streams:
        stream.wait_stream(here.module.current_stream())
    with torch.no_grad(), streaming(parts):
        outputs = []
        for number, name in enumerate(names):
            # Nothing of the user's orders these passes.
            with here.module.stream(streams[number % 3]):
                outputs.append(parts[name](inputs[number]))
        here.module.synchronize()
        for name, inp, output in zip(names, inputs, outputs, strict=True):
            equal(on_host(output), on_host(twin[name](inp)))
        outputs.clear()
        del output


@pytest.mark.parametrize("execution", ["eager", "late"])
def test_calls_of_two_threads_in_turn(execution: Execution) -> None:
    fresh(execution)
    module = mlp(8, WIDTH)
    twin = twin_on(module)
    with streaming(module, keeps=True):
        for number in range(6):
            output = Caller(call, module, number).finish() if number % 2 else call_plainly(module, number)
            equal(on_host(output), on_host(call_plainly(twin, number)))


def test_calls_of_two_threads_at_once() -> None:
    fresh()
    module = mlp(8, WIDTH)
    twin = twin_on(module)

    def many(seed: int) -> list[Tensor]:
        return [call(module, number) for number in range(seed, seed + 8)]

    with streaming(module, keeps=True):
        callers = [(seed, Caller(many, seed)) for seed in (0, 100)]
        for seed, caller in callers:
            for number, output in enumerate(caller.finish()):
                equal(on_host(output), on_host(call_plainly(twin, seed + number)))


@torch.no_grad()
def call_plainly(module: nn.Module, number: int) -> Tensor:
    """Without a graph."""
    return call(module, number)


@pytest.mark.filterwarnings("ignore:In (CPU|emu) autocast:UserWarning")
@pytest.mark.parametrize("execution", ["eager", "late"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch(mode: str, execution: Execution) -> None:
    fresh(execution)
    module = mlp(8, WIDTH)
    twin = twin_on(module)
    with streaming(module):
        for number in range(5):
            with MODES[mode]():
                ours, theirs = call(module, number), call(twin, number)
            equal(on_host(ours), on_host(theirs))
        del ours, theirs


def test_modes_in_turn() -> None:
    fresh()
    module = mlp(8, WIDTH)
    twin = twin_on(module)
    with streaming(module, keeps=True):
        for number, mode in enumerate(("inference", "grad", "no_grad", "inference", "grad", "grad", "no_grad")):
            with MODES[mode]():
                ours, theirs = call(module, number), call(twin, number)
            if mode == "grad":
                ours.sum().backward()
                theirs.sum().backward()
            equal(on_host(ours), on_host(theirs))
    for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
        equal([mine.grad], [other.grad.cpu()])


class Branches(nn.Module):
    """Two layers in streams of their own, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = mlp(3, WIDTH, 1), mlp(3, WIDTH, 2), mlp(3, WIDTH, 3)
        self.aside: Any = None

    def forward(self, x: Tensor) -> Tensor:
        main = here.module.current_stream()
        self.aside.wait_stream(main)
        left = self.left(x)
        with here.module.stream(self.aside):
            right = self.right(x)
        main.wait_stream(self.aside)
        right.record_stream(main)
        return self.both(left + right)  # type: ignore[no-any-return]


@pytest.mark.parametrize("unit", ["auto", "1MiB"])
@pytest.mark.parametrize("execution", ORDERS)
def test_a_forward_that_uses_streams_of_its_own(execution: Execution, unit: str) -> None:
    fresh(execution)
    module = Branches()
    twin = twin_on(module)
    module.aside = twin.aside = here.module.Stream()
    with torch.no_grad(), streaming(module, unit=unit):
        for number in range(6):
            equal(on_host(call(module, number)), on_host(call(twin, number)))


class Woven(nn.Module):
    """Each layer is called in two streams in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(6, WIDTH)[::2])
        self.aside: Any = None

    def forward(self, x: Tensor) -> Tensor:
        main = here.module.current_stream()
        self.aside.wait_stream(main)
        left = right = x
        for layer in self.layers:
            left = torch.tanh(layer(left))
            with here.module.stream(self.aside):
                right = torch.tanh(layer(right))
        main.wait_stream(self.aside)
        right.record_stream(main)
        return left + right


@pytest.mark.parametrize("execution", ORDERS)
def test_a_unit_that_is_used_in_two_streams(execution: Execution) -> None:
    fresh(execution)
    module = Woven()
    twin = twin_on(module)
    module.aside = twin.aside = here.module.Stream()
    with torch.no_grad(), streaming(module, policy="sync"):
        for number in range(4):
            equal(on_host(call(module, number)), on_host(call(twin, number)))
