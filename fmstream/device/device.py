"""Where weights are computed on: fast memory, and the clock and the order of work there."""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from fmstream.device.memory import private_memory

MAX_PARTS = 4096
"""Parts of a slab that are remembered; making one costs some microseconds."""


class Part:
    """A stretch of a slab as tensors that share a storage of their own.

    ``address`` is that of its first byte, ``raw`` a tensor over the same bytes with another storage, for memory that
    the host cannot write itself.  Since no other part has the same storage, ``num_views()`` tells whether a
    tensor still looks into this very stretch, and ``was_written()`` whether one was written in place.
    """

    __slots__ = ("_own", "_raw", "_seen_version", "_storage", "_typed", "address", "shown", "tensor")

    def __init__(self, tensor: torch.Tensor, address: int, raw: torch.Tensor | None = None) -> None:
        self.tensor = tensor
        self.address = address
        self._raw = raw
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

    def overwrite(self, offset: int, source: torch.Tensor) -> None:
        """Copy bytes of host memory to ``offset``, unseen by `was_written`; returns when they are there.

        Raises:
            ValueError: they do not fit.
        """
        if offset + source.numel() > self.tensor.numel():
            raise ValueError(f"{source.numel()} bytes at {offset} do not fit in a part of {self.tensor.numel()}")
        if self._raw is None:
            ctypes.memmove(self.address + offset, source.data_ptr(), source.numel())
        else:
            self._raw[offset : offset + source.numel()].copy_(source)

    def read(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes at ``offset`` as a flat tensor of host memory: a view of them where they lie there."""
        return self.tensor[offset : offset + num_bytes].to("cpu")

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
        """Allocate fast memory, aligned to a memory page.

        Raises:
            MemoryBudgetError: there is no room.
        """


class PartSlab(ABC):
    """A slab that makes each of its parts once."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self._parts: dict[tuple[int, int], Part] = {}

    def part(self, offset: int, num_bytes: int) -> Part:
        """Tensors over a stretch of it; the same object for the same stretch."""
        part = self._parts.get((offset, num_bytes))
        if part is None:
            if len(self._parts) >= MAX_PARTS:
                self._parts.clear()
            # Never an inference tensor: it may be needed by a backward pass later.
            with torch.inference_mode(False):
                part = self._parts[offset, num_bytes] = self._make(offset, num_bytes)
        return part

    def parts(self) -> Iterable[Part]:
        """All parts that were made."""
        return self._parts.values()

    @abstractmethod
    def _make(self, offset: int, num_bytes: int) -> Part:
        """A part with a storage of its own."""


class CpuSlab(PartSlab):
    """An anonymous mapping: pages that are never used cost nothing."""

    def __init__(self, num_bytes: int) -> None:
        num_bytes = max(num_bytes, mmap.PAGESIZE)
        self._memory = private_memory(num_bytes)
        super().__init__(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), num_bytes)

    def _make(self, offset: int, num_bytes: int) -> Part:
        tensor = torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=offset)
        return Part(tensor, self.address + offset)


class CpuDevice:
    """Fast memory is an arena in RAM; the slow tier is the checkpoint file."""

    torch_device = torch.device("cpu")

    def slab(self, num_bytes: int) -> Slab:
        """Allocate an arena."""
        return CpuSlab(num_bytes)
