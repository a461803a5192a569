"""Quantised weights: wrappers around plain tensors, and parameters of classes that say what their bytes mean."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fmstream
from fmstream.doors.stream import Stream
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bound
from tests.kit import agree, assert_streams_fully, check_frames, mlp, noise, num_faults, same
from tests.kit_quantised import (
    BUILDS,
    DEPTH,
    WIDTH,
    Hidden,
    Scaled,
    as_plain,
    assert_alike,
    gguf,
    scaled,
    tensors_in,
    tenths,
    torchao,
    true_bytes,
)

X = noise(4, WIDTH)


@contextmanager
def streamed(module: nn.Module) -> Iterator[Stream]:
    """Stream with little memory; afterwards the same objects with the same inner tensors are there."""
    before = [(param, tensors_in(param)) for param in module.parameters()]
    with fmstream.stream(module, memory=fmstream.smallest_memory(module) + 4096) as handle:
        yield handle
        check_frames(handle)
    assert [id(param) for param in module.parameters()] == [id(param) for param, _ in before]
    for param, inner in before:
        assert [id(tensor) for tensor in tensors_in(param)] == [id(tensor) for tensor in inner]
        assert not any(isinstance(tensor, Absent | Bound) for tensor in (param, *inner))


# Twins


@pytest.mark.parametrize("build", BUILDS)
def test_twin(build: Callable[[], nn.Module]) -> None:
    module, twin = build(), build()
    with streamed(module) as handle:
        agree(module, twin, X, times=6)
        assert handle.telemetry.kept_bytes == 0
        assert handle.telemetry.weights_bytes == true_bytes(twin)
        assert num_faults(handle) == 0
        assert_streams_fully(handle)
    agree(module, twin, X)


@pytest.mark.parametrize("build", BUILDS)
def test_stand_in_answers_as_the_parameter_does(build: Callable[[], nn.Module]) -> None:
    module, twin = build(), build()
    with streamed(module) as handle:
        agree(module, twin, X, times=2)
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            assert isinstance(ours, type(theirs))
            assert_alike(ours, theirs)
        assert num_faults(handle) == 0


@pytest.mark.parametrize("build", BUILDS)
def test_reads_outside_a_forward_see_the_truth(build: Callable[[], nn.Module]) -> None:
    module, twin = build(), build()
    with streamed(module) as handle:
        agree(module, twin, X, times=2)
        with torch.no_grad():
            for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
                for reading in ("dequantize", "plain"):
                    if hasattr(type(theirs), reading) and type(theirs) is not nn.Parameter:
                        same(getattr(ours, reading)(), getattr(theirs, reading)())
            if "GGUF" in type(next(twin.parameters())).__name__:
                from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

                same(dequantize_gguf_tensor(module[0].weight), dequantize_gguf_tensor(twin[0].weight))
        state, expected = module.state_dict(), twin.state_dict()
        assert list(state) == list(expected)
        for key, value in expected.items():
            assert isinstance(state[key], type(value))
            same(as_plain(state[key]), as_plain(value))
        assert num_faults(handle) > 0


@pytest.mark.parametrize("build", BUILDS[:-2])
def test_deepcopy_is_independent(build: Callable[[], nn.Module]) -> None:
    if build is tenths:
        build = scaled
    module, twin = build(), build()
    with streamed(module):
        agree(module, twin, X, times=2)
        copied = copy.deepcopy(module)
        agree(copied, twin, X)
    agree(copied, twin, X)
    for ours, theirs in zip(copied.parameters(), twin.parameters(), strict=True):
        assert type(ours) is type(theirs)
        assert [type(tensor) for tensor in tensors_in(ours)] == [type(tensor) for tensor in tensors_in(theirs)]


@pytest.mark.parametrize("build", [tenths, gguf("Q8_0")])
def test_deepcopy_of_a_subclass(build: Callable[[], nn.Module]) -> None:
    module, twin = build(), build()
    with streamed(module):
        copied = copy.deepcopy(module)
    agree(copied, twin, X)
    assert type(copied[0].weight) is type(twin[0].weight)


def test_saved_and_loaded() -> None:
    build = torchao("Int8WeightOnlyConfig")
    module, twin = build(), build()
    with streamed(module):
        agree(module, twin, X, times=2)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for key, value in twin.state_dict().items():
        assert type(loaded[key]) is type(value)
        same(as_plain(loaded[key]), as_plain(value))


# Writes


def test_write_to_a_wrapper_reaches_its_tensors() -> None:
    module, twin = scaled(), scaled()
    with streamed(module):
        agree(module, twin, X, times=3)
        with torch.no_grad():
            for each in (module, twin):
                each[0].weight.mul_(2.0)
                each[2].weight.numbers.neg_()  # type: ignore[union-attr, operator]
        agree(module, twin, X, times=3)
    agree(module, twin, X)
    same(as_plain(module[0].weight), as_plain(twin[0].weight))


def test_write_within_a_forward_reaches_the_wrapper() -> None:
    def grow(layer: Any, args: Any) -> None:
        layer.weight.mul_(1.25)

    module, twin = scaled(), scaled()
    for each in (module, twin):
        each[4].register_forward_pre_hook(grow)
    with streamed(module):
        agree(module, twin, X, times=5)
    same(as_plain(module[4].weight), as_plain(twin[4].weight))


def test_write_to_a_subclass_reaches_its_bytes() -> None:
    module, twin = tenths(), tenths()
    with streamed(module):
        agree(module, twin, X, times=3)
        with torch.no_grad():
            for each in (module, twin):
                each[0].weight.neg_()  # type: ignore[operator]
        agree(module, twin, X, times=3)
    agree(module, twin, X)


def test_inner_tensor_that_the_user_replaces_is_used() -> None:
    module, twin = scaled(), scaled()
    before = module[0].weight.scale
    with fmstream.stream(module, memory=fmstream.smallest_memory(module) + 4096):
        agree(module, twin, X, times=3)
        for each in (module, twin):
            each[0].weight.scale = before * 3  # type: ignore[union-attr]
        agree(module, twin, X, times=3)
    agree(module, twin, X)


def test_shared_wrapper_is_streamed_once() -> None:
    def build() -> nn.Module:
        module = scaled()
        module[6].weight = module[0].weight  # type: ignore[union-attr]
        return module

    module, twin = build(), build()
    with streamed(module) as handle:
        agree(module, twin, X, times=5)
        assert handle.telemetry.weights_bytes == true_bytes(twin)


# What stays in place


def test_wrapper_whose_tensors_cannot_be_exchanged_stays_in_place() -> None:
    module, twin = mlp(DEPTH, WIDTH), mlp(DEPTH, WIDTH)
    for each in (module, twin):
        weight = Scaled.of(each[0].weight.detach())  # type: ignore[operator]
        each[0].weight = nn.Parameter(Hidden(weight.numbers, weight.scale), requires_grad=False)
    with streamed(module) as handle:
        agree(module, twin, X, times=4)
        assert any("0.weight" in note and "it is a Hidden" in note for note in handle.telemetry.notes)


def test_subclass_that_needs_a_gradient_stays_in_place() -> None:
    class Named(nn.Parameter):
        pass

    module, twin = mlp(DEPTH, WIDTH), mlp(DEPTH, WIDTH)
    for each in (module, twin):
        each[0].weight = Named(each[0].weight.detach())  # type: ignore[operator]
    with streamed(module) as handle:
        for _ in range(4):
            ours, theirs = module(X), twin(X)
            same(ours, theirs)
            ours.sum().backward()
            theirs.sum().backward()
        same(module[0].weight.grad, twin[0].weight.grad)
        assert any("it is a Named" in note for note in handle.telemetry.notes)


# Compiled


@pytest.mark.parametrize("build", [scaled, torchao("Int8WeightOnlyConfig")])
def test_compiled_layers(build: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    module, twin = build(), build()
    blocks = nn.Sequential(*(nn.Sequential(module[i], module[i + 1]) for i in range(0, 2 * DEPTH, 2)))
    for each in blocks:
        each.compile(backend="aot_eager")
    with fmstream.stream(blocks, memory=fmstream.smallest_memory(blocks) + 4096) as handle:
        agree(blocks, twin, X, times=5)
        assert num_faults(handle) == 0
        assert_streams_fully(handle)
    agree(blocks, twin, X)
    torch._dynamo.reset()
