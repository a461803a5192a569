"""What tests of streaming to a device share: a twin on it, a handle that is looked after, and what that leaves."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fmstream
from fmstream import emulator
from fmstream.emulator.backlog import Execution
from fmstream.payloads.kinds import is_wrapper
from tests.clients.client import flat
from tests.kit import assert_plain, budget, check_frames, streamed_bytes


class Here:
    """The device that tests stream to: the emulated one, unless a test says otherwise."""

    def __init__(self) -> None:
        self.name = "emu"

    @property
    def module(self) -> Any:
        """Its streams, events and figures."""
        return torch.get_device_module(self.name)

    def allocated(self) -> int:
        """Bytes of all tensors there, once everything is done."""
        gc.collect()
        self.module.synchronize()
        return int(self.module.memory_allocated())

    def check(self) -> None:
        """No race was seen, and nothing is pinned."""
        if self.name == "emu":
            assert not emulator.machine().reports
            assert emulator.machine().pinned.charged_bytes == 0


here = Here()
CAPACITY = 64 << 20
ORDERS: tuple[Execution, ...] = ("eager", "late", 1, 2)
POLICIES = ("overlap_async", "one_ahead", "sync")
FRACTIONS = (0.0, 0.35, 0.75)
"""Of the way from the least memory that works to all weights."""

Modules = nn.Module | Mapping[str, nn.Module]


def fresh(execution: Execution = "eager", **options: Any) -> emulator.Machine:
    """A new machine that raises at the first access out of order; free memory holds NaN."""
    options = {"capacity": CAPACITY, "poison": True, "check": "raise"} | options
    return emulator.reset("rtx4070-laptop", execution=execution, **options)


def roots(modules: Modules) -> list[nn.Module]:
    """The modules of a module, or of a dict of them."""
    return [modules] if isinstance(modules, nn.Module) else list(modules.values())


def twin_on(modules: Modules) -> Any:
    """A copy that lies on the device as a whole."""
    twin = copy.deepcopy(modules)
    for root in roots(twin):
        root.to(here.name)
    return twin


def on_host(output: Any) -> list[Tensor]:
    """The tensors of an output as copies on the CPU; waits for them."""
    return [tensor.detach().to("cpu", copy=True) for tensor in flat(output)]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Two lists of tensors hold the same bits of the same types."""
    assert len(ours) == len(theirs) > 0
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


class Left:
    """What modules consist of, to see after streaming that they are as they were."""

    def __init__(self, modules: Modules) -> None:
        self.params = {name: weakref.ref(p) for name, p in named(modules, "_parameters")}
        self.buffers = [name for name, _ in named(modules, "_buffers")]
        self.attributes = attributes(modules)

    def check(self, modules: Modules) -> None:
        """The same parameter objects on the CPU, buffers there too, no attribute more or less."""
        assert_plain(dict(enumerate(roots(modules))))
        present = dict(named(modules, "_parameters"))
        assert present.keys() == self.params.keys()
        for name, param in present.items():
            assert param is self.params[name](), f"{name} is not the user's parameter"
            assert param.device.type == "cpu", name
            assert is_wrapper(param) or not param.is_pinned(), name
        buffers = dict(named(modules, "_buffers"))
        assert sorted(buffers) == sorted(self.buffers)
        assert all(buffer.device.type == "cpu" for buffer in buffers.values())
        assert attributes(modules) == self.attributes


def named(modules: Modules, kind: str) -> Iterator[tuple[str, Any]]:
    """Parameters or buffers, by root, module and key."""
    for number, root in enumerate(roots(modules)):
        for prefix, module in root.named_modules(remove_duplicate=False):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    yield f"{number}:{prefix}.{key}", tensor


def attributes(modules: Modules) -> dict[str, list[str]]:
    """Names of the attributes of every module."""
    return {
        f"{number}:{name}": sorted(module.__dict__)
        for number, root in enumerate(roots(modules))
        for name, module in root.named_modules()
    }


@contextmanager
def streaming(
    modules: Modules,
    fraction: float = 0.35,
    *,
    edited: bool = False,
    idle: bool = False,
    keeps: bool = False,
    **options: Any,
) -> Iterator[fmstream.Stream]:
    """Stream to the device for the body; afterwards nothing is left in the modules, on the host or on the device.

    Args:
        modules: what is handed to ``fmstream.stream``.
        fraction: see ``tests.kit.budget``; ``memory=`` stands above it.
        edited: the body replaces parameters or modules.
        idle: the body calls nothing that streams.
        keeps: tensors that the body made on the device live on.
        options: more options of ``fmstream.stream``.
    """
    if "memory" not in options:
        options["memory"] = budget(as_parts(modules), fraction)
    before = Left(modules)
    allocated = here.allocated()
    handle = fmstream.stream(modules, device=here.name, **options)
    try:
        yield handle
        check_frames(handle)
        assert idle or streamed_bytes(handle) > 0
    finally:
        handle.close()
    if not edited:
        before.check(modules)
    here.check()
    del handle
    if not keeps:
        assert here.allocated() <= allocated


def as_parts(modules: Modules) -> Any:
    """As ``tests.kit`` takes it."""
    return modules if isinstance(modules, nn.Module) else dict(modules)


def stream_and_compare(
    modules: Modules,
    step: Callable[[Any, int], Any],
    calls: int = 5,
    fraction: float = 0.35,
    *,
    edited: bool = False,
    **options: Any,
) -> tuple[fmstream.Stream, list[list[Tensor]]]:
    """Take the same steps with streamed modules and with a twin on the device; outputs and states must be equal.

    Nothing is looked at before the last step, so that the host waits for nothing of ours.
    """
    twin = twin_on(modules)
    with torch.no_grad():
        expected = [on_host(step(twin, number)) for number in range(calls)]
        with streaming(modules, fraction, edited=edited, **options) as handle:
            outputs = [step(modules, number) for number in range(calls)]
            found = [on_host(output) for output in outputs]
            del outputs
    for ours, theirs in zip(found, expected, strict=True):
        equal(ours, theirs)
    same_states(modules, twin)
    return handle, found


def same_states(modules: Modules, twin: Modules) -> None:
    """Parameters and buffers hold the same bits."""
    for ours, theirs in zip(roots(modules), roots(twin), strict=True):
        for kind in ("_parameters", "_buffers"):
            mine, other = dict(named(ours, kind)), dict(named(theirs, kind))
            assert list(mine) == list(other)
            equal([*on_host(list(mine.values())), torch.zeros(1)], [*on_host(list(other.values())), torch.zeros(1)])


def run_until_interrupted(
    module: nn.Module, use: Callable[[nn.Module, int], object], fraction: float, **options: Any
) -> None:
    """Open, use it four times and close; a Ctrl-C ends it, and closing is tried again."""
    handle = None
    try:
        handle = fmstream.stream(module, memory=budget(module, fraction), device=here.name, **options)
        with torch.no_grad():
            for number in range(4):
                use(module, number)
    except KeyboardInterrupt:
        pass
    finally:
        if handle is not None:
            try:
                handle.close()
            except KeyboardInterrupt:
                handle.close()
