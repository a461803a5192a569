"""Where weights are computed on: the only code that allocates fast memory."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch

from fmstream.errors import ConfigError


class Slab:
    """One block of fast memory, and typed views of it.

    ``address`` is that of its first byte; ``num_views()`` counts the tensors that look into it besides the slab's
    own, so that an alias which outlives its use is noticed before the bytes under it change.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self._own = self._count()
        self._seen_version = tensor._version

    def was_written(self) -> bool:
        """Whether an in-place operation wrote any view of it since the last look."""
        version = self.tensor._version
        if version == self._seen_version:
            return False
        self._seen_version = version
        return True

    def _count(self) -> int:
        return 0 if self._storage is None else int(torch._C._storage_Use_Count(self._storage._cdata))

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole slab as a flat tensor of ``dtype``."""
        view = self._typed.get(dtype)
        if view is None:
            with torch.inference_mode(False), torch.no_grad():
                whole = self.tensor.numel() // dtype.itemsize * dtype.itemsize
                view = self._typed[dtype] = self.tensor[:whole].view(dtype)
            self._own += 1
        return view

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of the slab's own views."""
        return tensor is self.tensor or any(tensor is view for view in self._typed.values())

    def offset_of(self, view: torch.Tensor) -> int:
        """Byte offset of a view's first element."""
        return view.storage_offset() * view.element_size()

    def num_views(self) -> int:
        """Tensors that share this memory, other than the slab's own views."""
        return self._count() - self._own if self._storage is not None else 0

    def orphan(self) -> None:
        """Leave the memory to whoever holds a view of it; it is freed with the last one."""
        self.close()

    def close(self) -> None:
        """Drop the slab's own references.  Idempotent."""
        self._typed.clear()
        self._storage = None
        self.tensor = torch.empty(0, dtype=torch.uint8)


class Device(Protocol):
    """A place where modules execute."""

    @property
    def torch_device(self) -> torch.device:
        """What stand-ins answer to ``.device``."""

    def slab(self, num_bytes: int) -> Slab:
        """Allocate fast memory, aligned to a memory page."""


class CpuDevice:
    """Fast memory is an arena in RAM; the slow tier is the checkpoint file."""

    torch_device = torch.device("cpu")

    def slab(self, num_bytes: int) -> Slab:
        """Allocate an anonymous mapping: pages that are never used cost nothing."""
        memory = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE))
        with torch.inference_mode(False), torch.no_grad():
            return Slab(torch.frombuffer(memory, dtype=torch.uint8))


def open_device(name: str | torch.device | None) -> Device:
    """The device of that name; None is the CPU.  Raises `ConfigError` for one that is not supported."""
    device = torch.device(name or "cpu")
    if device.type != "cpu":
        raise ConfigError(f"device={str(device)!r} is not supported by this version; use device='cpu'")
    return CpuDevice()
