"""Quantised modules that stream to the device beside twins that lie on it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream.doors.stream import Stream
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bound
from tests.accelerator.cases import call
from tests.accelerator.kit import equal, here, on_host, streaming
from tests.kit_quantised import gguf, nested, scaled, tensors_in, torchao, true_bytes

Build = Callable[[], nn.Module]
WRAPPERS = [pytest.param(scaled, id="wrapper"), pytest.param(torchao("Int8WeightOnlyConfig"), id="torchao-int8")]
KINDS = [*WRAPPERS, pytest.param(nested, id="nested"), pytest.param(gguf("Q8_0"), id="gguf")]


def part_way(module: nn.Module, fraction: float) -> int:
    """Memory between the least that works and all weights, whose bytes the dtypes of wrappers do not tell."""
    least = fmstream.smallest_memory(module)
    gc.collect(1)
    return least + int(fraction * (true_bytes(module) - least))


def on_device(module: nn.Module) -> nn.Module:
    """The unstreamed twin."""
    return module.to(here.name)


@contextmanager
def streamed(module: nn.Module, fraction: float = 0.35, **options: Any) -> Iterator[Stream]:
    """Stream to the device; afterwards the same objects with the same inner tensors are there, on the CPU."""
    before = [weakref.ref(tensor) for tensor in all_tensors(module)]  # who holds a tensor may write it
    memory = options.pop("memory", None) or part_way(module, fraction)
    with streaming(module, memory=memory, **options) as handle:
        yield handle
    after = all_tensors(module)
    assert len(after) == len(before)
    assert all(tensor is known() for tensor, known in zip(after, before, strict=True))
    assert_on_host(module)


def all_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters, each with the tensors in it."""
    return [tensor for param in module.parameters() for tensor in (param, *tensors_in(param))]


def assert_on_host(module: nn.Module) -> None:
    """There is nothing of a handle's in the parameters, and nothing on the device."""
    for tensor in all_tensors(module):
        assert tensor.device.type == "cpu"
        assert not isinstance(tensor, Absent | Bound)
        assert not {"shell", "detach", "master"} & tensor.__dict__.keys()


def agree(module: nn.Module, twin: nn.Module, times: int = 3) -> None:
    """Both give the same, without a wait of ours in between."""
    with torch.no_grad():
        expected = [on_host(call(twin, number)) for number in range(times)]
        found = [call(module, number) for number in range(times)]
    for ours, theirs in zip(found, expected, strict=True):
        equal(on_host(ours), theirs)
