"""``cuda`` as a name of the emulated device: in device strings, in `torch.device`, and in what a device says it is."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import _device

from bench.peers.shim.patches import Patches

FACTORIES: Final = (
    *("empty", "zeros", "ones", "full", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand", "rand_like", "randn", "randn_like", "randint", "randperm", "arange", "linspace", "eye"),
    *("tensor", "as_tensor", "asarray"),
)
METHODS: Final = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")

_Real: Final = torch.device
_EMULATED: Final = "emu"


def translate(device: Any) -> Any:
    """``cuda``, ``cuda:0`` and 0 become the emulated device; anything else is left alone."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _Real(_EMULATED, device)
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return _EMULATED + device[len("cuda") :]
    return device


class _DeviceMeta(type):
    """Makes the stand-in a name for `torch.device`: it constructs real devices, and they are its instances."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        if "type" in kwargs:
            kwargs["type"] = translate(kwargs["type"])
        if "device" in kwargs:
            kwargs["device"] = translate(kwargs["device"])
        return _Real(*(translate(args[0]), *args[1:]) if args else (), **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is _Real

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is _Real or subclass is cls

    def __or__(cls, other: Any) -> Any:
        return _Real | other

    def __ror__(cls, other: Any) -> Any:
        return other | _Real

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _Real

    def __hash__(cls) -> int:
        return hash(_Real)


class _Device(metaclass=_DeviceMeta):
    """Stands where `torch.device` stood."""


def install(patches: Patches, packages: tuple[str, ...]) -> None:
    """Let ``cuda`` mean the emulated device; modules of ``packages`` also read it from ``device.type``."""
    # Modes (`torch.set_default_device`) know factories by identity: let them look before these are wrapped.
    _device._device_constructors()
    patches.set(torch, "device", _Device)
    for name in FACTORIES:
        patches.wrap(torch, name, _by_keyword)
    for name in METHODS:
        patches.wrap(torch.Tensor, name, _anywhere)
    patches.wrap(torch._C._nn, "_parse_to", _anywhere)  # nn.Module.to
    patches.set(torch.Tensor, "is_cuda", property(_is_emulated))
    patches.set(torch.Tensor, "cuda", _to_cuda)
    _install_type(patches, packages)


def _by_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = translate(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _anywhere(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = translate(kwargs["device"])
        return function(*(translate(arg) if isinstance(arg, str) else arg for arg in args), **kwargs)

    return call


def _is_emulated(tensor: torch.Tensor) -> bool:
    return _kind(tensor.device) == _EMULATED


def _to_cuda(
    tensor: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    return tensor.to(_Real(_EMULATED, 0), non_blocking=non_blocking, memory_format=memory_format)


_TYPE: Final = vars(_Real)["type"]


def _kind(device: torch.device) -> str:
    kind: str = _TYPE.__get__(device, _Real)
    return kind


def _install_type(patches: Patches, packages: tuple[str, ...]) -> None:
    """Replace the getter in the built-in type's own dictionary, which Python code cannot assign to.

    Only callers within ``packages`` are told ``cuda``: torch and the emulator must see what the device is.
    """

    def kind_for_caller(device: torch.device) -> str:
        kind = _kind(device)
        if kind == _EMULATED and _belongs(sys._getframe(1).f_globals.get("__name__", ""), packages):
            return "cuda"
        return kind

    (namespace,) = gc.get_referents(vars(_Real))
    namespace["type"] = property(kind_for_caller)
    _forget_lookups()

    def undo() -> None:
        namespace["type"] = _TYPE
        _forget_lookups()

    patches.at_end(undo)


def _belongs(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _forget_lookups() -> None:
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(_Real))
