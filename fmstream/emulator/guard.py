"""Checking what the host does to pinned memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmstream.emulator.current import current
from fmstream.emulator.pinned import is_pinned
from fmstream.emulator.shapes import schema_of
from fmstream.emulator.tensors import Span, is_device, span_of


class HostGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the race checker of every CPU operator on pinned memory, which otherwise it does not see.

    Of this thread only.  Plain Python and numpy code that touches pinned memory goes unseen.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        machine, schema = current.machine, schema_of(func)
        if not schema.is_view and not machine.running:
            reads: list[Span] = []
            writes: list[Span] = []
            named = ((value, schema.writes_by_name[name]) for name, value in kwargs.items())
            on_device = False
            for value, written in (*zip(args, schema.writes, strict=False), *named):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if is_device(tensor):
                        on_device = True  # a copy over the link, which the machine is told of
                    elif isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and is_pinned(tensor):
                        (writes if written else reads).append(span_of(tensor))
            if (reads or writes) and not on_device:
                machine.host_access(reads, writes, f"{schema.name} on the host")
        return func(*args, **kwargs)


def host_guard() -> HostGuard:
    """A context in which CPU operators on pinned memory are checked against copies in flight."""
    return HostGuard()  # type: ignore[no-untyped-call]
