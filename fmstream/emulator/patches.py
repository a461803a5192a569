"""Names of PyTorch that are replaced while the emulator is installed, and put back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from torch.utils import _device

from fmstream.emulator import device_module
from fmstream.emulator.current import current
from fmstream.emulator.dry import require_known
from fmstream.emulator.generators import Generator
from fmstream.emulator.streams import AnyEvent, AnyStream
from fmstream.emulator.tensors import DLPACK_EXTENSION, NAME, is_device

MISSING: Final = object()
PINNING_FACTORIES: Final = (
    "empty zeros ones full empty_strided empty_like zeros_like ones_like full_like randn rand randint tensor arange"
)
PINNING_METHODS: Final = "new_empty new_zeros new_ones new_full new_tensor"
VALUE_METHODS: Final = "item tolist numpy __array__"
ACCELERATOR_NAMES: Final = {
    "current_stream": device_module.current_stream,
    "set_stream": device_module.set_stream,
    "synchronize": device_module.synchronize,
    "empty_cache": device_module.empty_cache,
    "get_memory_info": device_module.mem_get_info,
    "memory_allocated": device_module.memory_allocated,
    "max_memory_allocated": device_module.max_memory_allocated,
    "memory_reserved": device_module.memory_reserved,
    "max_memory_reserved": device_module.max_memory_reserved,
    "memory_stats": device_module.memory_stats,
    "reset_peak_memory_stats": device_module.reset_peak_memory_stats,
}


class Patches:
    """Attributes that were replaced, with what they were."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self._before.append((owner, name, owner.__dict__.get(name, MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, the latest first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def apply(patches: Patches) -> None:
    """Replace what PyTorch's generic code does wrongly, or not at all, for a device written in Python."""
    # Its cache must hold the real factories: it is how torch.device("meta") as a context knows them.
    _device._device_constructors()
    patches.put(torch, "Stream", AnyStream)
    patches.put(torch, "Event", AnyEvent)
    patches.put(torch, "Generator", Generator)
    for name, function in ACCELERATOR_NAMES.items():
        patches.put(torch.accelerator, name, function)
    for name in PINNING_FACTORIES.split():
        patches.put(torch, name, _pinning(getattr(torch, name)))
    for name in PINNING_METHODS.split():
        patches.put(torch.Tensor, name, _pinning(getattr(torch.Tensor, name)))
    patches.put(torch.Tensor, "__dlpack_device__", _dlpack_device(torch.Tensor.__dlpack_device__))
    for name in VALUE_METHODS.split():
        patches.put(torch.Tensor, name, _needing_values(getattr(torch.Tensor, name)))
    patches.put(torch.Tensor, "__repr__", _described(torch.Tensor.__repr__))
    _patch_storages(patches)


def _needing_values(real: Callable[..., Any]) -> Callable[..., Any]:
    """These read memory without an operator that could refuse to."""

    @wraps(real)
    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if current.knowledge is not None:
            require_known(tensor, current.knowledge)
        return real(tensor, *args, **kwargs)

    return method


def _described(real: Callable[..., str]) -> Callable[..., str]:
    @wraps(real)
    def describe(tensor: torch.Tensor, **kwargs: Any) -> str:
        if current.knowledge is None or current.knowledge.has_value(tensor):
            return real(tensor, **kwargs)
        return f"tensor(unknown, shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={str(tensor.device)!r})"

    return describe


def _pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``pin_memory=True`` in a factory asks hooks in C++ that a device written in Python does not have."""

    @wraps(make)
    def factory(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        return made.pin_memory() if pin_memory and made.device.type == "cpu" else made

    return factory


def _dlpack_device(real: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    @wraps(real)
    def dlpack_device(tensor: torch.Tensor) -> Any:
        return (DLPACK_EXTENSION, 0) if is_device(tensor) else real(tensor)

    return dlpack_device


def _patch_storages(patches: Patches) -> None:
    """A bare storage on the device would be made through a null pointer: there is no allocator in C++."""
    kind: Any = torch.UntypedStorage
    real_new, real_clone, real_init = kind.__new__, kind.clone, kind.__init__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return real_new(cls, *args, **kwargs)
        if torch.device(device).type != NAME:
            return real_new(cls, *args, device=device, **kwargs)
        num_bytes = int(args[0]) if args else 0
        return current.memory.new((num_bytes,), (1,), torch.uint8).untyped_storage()

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real_init(self)

    def clone(self: Any) -> Any:
        if self.device.type != NAME:
            return real_clone(self)
        return torch.empty(0, dtype=torch.uint8, device=NAME).set_(self).clone().untyped_storage()

    patches.put(kind, "__new__", new)
    patches.put(kind, "__init__", init)
    patches.put(kind, "clone", clone)
