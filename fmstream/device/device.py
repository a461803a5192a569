"""Where weights are computed on: the only code that allocates fast memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from fmstream.device.memory import private_memory
from fmstream.errors import ConfigError

MAX_PARTS = 4096
"""Parts of a slab that are remembered; making one costs some microseconds."""


class Part:
    """A stretch of a slab as tensors that share a storage of their own.

    ``address`` is that of its first byte.  Since no other part has the same storage, ``num_views()`` tells whether a
    tensor still looks into this very stretch, and ``was_written()`` whether one was written in place.
    """

    __slots__ = ("_own", "_seen_version", "_storage", "_typed", "address", "shown", "tensor")

    def __init__(self, tensor: torch.Tensor, address: int) -> None:
        self.tensor = tensor
        self.address = address
        self.shown: dict[Any, torch.Tensor] = {}
        """Views that are kept for the next use of the same place; see `keep` and `drop`."""
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._storage = tensor.untyped_storage()
        self._seen_version = tensor._version
        self._own = self._count()

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole part as a flat tensor of ``dtype``."""
        view = self._typed.get(dtype)
        if view is None:
            with torch.inference_mode(False), torch.no_grad():
                whole = self.tensor.numel() // dtype.itemsize * dtype.itemsize
                view = self._typed[dtype] = self.tensor[:whole].view(dtype)
            self._own += 1
        return view

    def keep(self, key: Any, view: torch.Tensor) -> None:
        """Count a view among the part's own, and find it again under ``key``."""
        self.shown[key] = view
        self._own += 1

    def drop(self, key: Any) -> None:
        """Undo `keep`; does nothing for an unknown key."""
        if self.shown.pop(key, None) is not None:
            self._own -= 1

    def num_views(self) -> int:
        """Tensors that share this memory, other than the part's own."""
        return self._count() - self._own

    def was_written(self) -> bool:
        """Whether an in-place operation wrote any view since the last look."""
        version = self.tensor._version
        if version == self._seen_version:
            return False
        self._seen_version = version
        return True

    def is_under(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this part for its storage."""
        return bool(tensor.untyped_storage()._cdata == self._storage._cdata)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of the part's own views."""
        return tensor is self.tensor or any(tensor is view for view in (*self._typed.values(), *self.shown.values()))


class Slab(Protocol):
    """One block of fast memory.

    ``address`` is that of its first byte.  Tensors made from it keep the memory alive, so that dropping a slab leaves
    it to whoever still looks into it.
    """

    address: int
    num_bytes: int

    def part(self, offset: int, num_bytes: int) -> Part:
        """Tensors over a stretch of it; the same object for the same stretch."""

    def parts(self) -> Iterable[Part]:
        """All parts that were made."""


class Device(Protocol):
    """A place where modules execute."""

    @property
    def torch_device(self) -> torch.device:
        """What stand-ins answer to ``.device``."""

    def slab(self, num_bytes: int) -> Slab:
        """Allocate fast memory, aligned to a memory page."""


class CpuSlab:
    """An anonymous mapping: pages that are never used cost nothing."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self._memory = private_memory(self.num_bytes)
        self._parts: dict[tuple[int, int], Part] = {}
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def part(self, offset: int, num_bytes: int) -> Part:
        """Tensors over a stretch of it; the same object for the same stretch."""
        part = self._parts.get((offset, num_bytes))
        if part is None:
            if len(self._parts) >= MAX_PARTS:
                self._parts.clear()
            # Never an inference tensor: it may be needed by a backward pass later.
            with torch.inference_mode(False):
                tensor = torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=offset)
            part = self._parts[offset, num_bytes] = Part(tensor, self.address + offset)
        return part

    def parts(self) -> Iterable[Part]:
        """All parts that were made."""
        return self._parts.values()


class CpuDevice:
    """Fast memory is an arena in RAM; the slow tier is the checkpoint file."""

    torch_device = torch.device("cpu")

    def slab(self, num_bytes: int) -> Slab:
        """Allocate an arena."""
        return CpuSlab(num_bytes)


def open_device(name: str | torch.device | None) -> Device:
    """The device of that name; None is the CPU.  Raises `ConfigError` for one that is not supported."""
    try:
        device = torch.device(name or "cpu")
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is no device that torch knows; use device='cpu'") from error
    if device.type != "cpu":
        raise ConfigError(f"device={str(device)!r} is not supported by this version; use device='cpu'")
    return CpuDevice()
