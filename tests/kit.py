"""What tests of streamed modules share: a handle that checks what it leaves behind, and comparisons with a twin."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fmstream
from fmstream.doors.stream import Stream
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bound
from tests.clients.client import flat


def mlp(depth: int = 6, width: int = 32, seed: int = 0) -> nn.Sequential:
    """Linear layers of ``width`` x ``width`` with a Tanh after each, float32, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh()))).eval()


def noise(*shape: int, seed: int = 3) -> Tensor:
    """Normal float32 numbers, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def budget(modules: Any, fraction: float = 0.3) -> int:
    """Bytes of memory between the least that works (0.0) and all weights (1.0)."""
    least = fmstream.smallest_memory(modules)
    gc.collect(1)  # what was measured leaves young cycles that hold the parameters
    total = weights_bytes(modules)
    assert least < total, f"the modules are too small to stream: {least} of {total} bytes are needed at once"
    return least + int(fraction * (total - least))


def weights_bytes(modules: Any) -> int:
    """Bytes of all parameters, each counted once."""
    seen = {id(p): p for root in _roots(modules) for p in root.parameters()}
    return sum(p.numel() * p.element_size() for p in seen.values())


@contextmanager
def streamed(
    modules: Any, fraction: float = 0.3, *, edited: bool = False, idle: bool = False, **options: Any
) -> Iterator[Stream]:
    """Stream ``modules`` for the body; afterwards the page table keeps its laws and the modules are as they were.

    Args:
        modules: what is handed to ``fmstream.stream``.
        fraction: see `budget`; ``memory=`` stands above it.
        edited: the body replaces parameters or modules, so that only the absence of stand-ins is asked for.
        idle: the body calls nothing that streams.
        options: more options of ``fmstream.stream``.
    """
    before = Snapshot(modules)
    if "memory" not in options:
        options["memory"] = budget(modules, fraction)
    handle = fmstream.stream(modules, **options)
    try:
        yield handle
        check_frames(handle)
        assert idle or streamed_bytes(handle) > 0
    finally:
        handle.close()
    assert_plain(modules)
    if not edited:
        before.check(modules)


def check_frames(handle: Stream) -> None:
    """Verify the page table's laws, and that nothing is shown between passes."""
    executor = handle._session._executor
    if executor is not None:
        executor.pages.check()
        assert not executor.pages.pins.any()
        assert all(master.bound is None for master in handle._session.weights.masters)


def streamed_bytes(handle: Stream) -> int:
    """Bytes that were loaded into fast memory since the handle was opened."""
    return sum(record.streamed_bytes for record in handle.telemetry.passes)


def assert_streams_fully(handle: Stream) -> None:
    """The last pass followed a plan and loaded nearly all that has no room."""
    last = handle.telemetry.passes[-1]
    assert last.policy != "trace"
    assert last.streamed_bytes >= 0.9 * (handle.telemetry.weights_bytes - handle.telemetry.memory_bytes)


def num_faults(handle: Stream) -> int:
    """Reads of parameters outside any plan so far."""
    return sum(count for count, _ in handle.telemetry.faults.values())


def same(left: Any, right: Any) -> None:
    """Two outputs hold equal tensors: values, dtypes and shapes."""
    ours, theirs = flat(left), flat(right)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def agree(module: Callable[..., Any], twin: Callable[..., Any], *args: Any, times: int = 1, **kwargs: Any) -> Any:
    """Call both without gradients, ``times`` over; their outputs must be equal.  Returns the last output."""
    output = None
    with torch.no_grad():
        for _ in range(times):
            output = module(*args, **kwargs)
            same(output, twin(*args, **kwargs))
    return output


def same_state(module: nn.Module, twin: nn.Module) -> None:
    """Two modules have equal state dicts, in the same order."""
    ours, theirs = module.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype, key
        assert torch.equal(ours[key], value), key


def bits(tensor: Tensor) -> Tensor:
    """The elements as bytes, for types without a comparison."""
    with torch.no_grad():
        return tensor.detach().clone().contiguous().flatten().view(torch.uint8)


def assert_plain(modules: Any) -> None:
    """No module is wrapped or shows a stand-in."""
    for root in _roots(modules):
        for name, module in root.named_modules():
            assert "_compiled_call_impl" not in module.__dict__, name
            for key, param in module._parameters.items():
                assert not isinstance(param, Absent | Bound), f"{name}.{key}"


class Snapshot:
    """The objects that modules consist of.

    Tensors are remembered weakly: parameters that somebody holds are brought anew in every pass, for they may have been
    written unseen, and that would hide copies that are stale.
    """

    def __init__(self, modules: Any) -> None:
        self.objects = _objects(modules)
        params = [p for root in _roots(modules) for p in root.parameters()]
        self.params = [(weakref.ref(p), _address(p), _hooks_of(p)) for p in params]

    def check(self, modules: Any) -> None:
        """The same objects are there, at the same addresses, with the same hooks."""
        after = _objects(modules)
        assert after.keys() == self.objects.keys()
        for place, value in self.objects.items():
            kept = _target(value)
            assert _target(after[place]) is kept, place
        for reference, address, hooks in self.params:
            param = reference()
            assert param is not None
            assert _address(param) == address
            assert _hooks_of(param) == hooks
            assert param.is_leaf


def _roots(modules: Any) -> list[nn.Module]:
    if isinstance(modules, nn.Module):
        return [modules]
    parts = modules if isinstance(modules, Mapping) else modules.components
    return [part for part in parts.values() if isinstance(part, nn.Module)]


def _objects(modules: Any) -> dict[tuple[str, ...], Any]:
    """Every attribute of every module; those in its dicts (parameters, children, hooks) one by one."""
    found: dict[tuple[str, ...], Any] = {}
    for number, root in enumerate(_roots(modules)):
        for name, module in root.named_modules(remove_duplicate=False):
            for key, value in module.__dict__.items():
                if not isinstance(value, dict):
                    # Plain values may be set again; what counts is that no attribute comes or goes.
                    found[str(number), name, key] = None
                    continue
                for inner, item in value.items():
                    found[str(number), name, key, str(inner)] = weakref.ref(item) if isinstance(item, Tensor) else item
    return found


def _target(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value


def _address(param: Tensor) -> int:
    strided = param.layout is torch.strided and torch._C._has_storage(param)
    return param.data_ptr() if strided else 0


def _hooks_of(param: Tensor) -> tuple[Any, ...]:
    return (
        list((param._backward_hooks or {}).values()),
        list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()),
    )
