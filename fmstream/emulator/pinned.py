"""Pinned host memory: what ``pin_memory()`` gives, and ranges that the program registers itself."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import torch

from fmstream.emulator.current import current
from fmstream.emulator.dry import SMALL_BYTES, adopt, disown, dry_bytes, is_dry
from fmstream.emulator.pins import PinError
from fmstream.emulator.tensors import num_elements_spanned, owned, span_of

HOST_COPY_BYTES_PER_SECOND: Final = 8e9
PIN_BYTES_PER_SECOND: Final = 3e9
"""Rates at which the host copies, and locks pages: typical of a desktop, not measured."""

SUCCESS: Final = 0
INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
"""Values of cudaError_t."""


def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """Whether all of a CPU tensor lies in pinned memory."""
    return tensor.numel() > 0 and current.machine.pinned.covers(*span_of(tensor))


def empty_pinned(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *, dry: bool = False) -> torch.Tensor:
    """A CPU tensor in pinned memory of its own, aligned to pages.  Raises `PinError` over the cap."""
    num_bytes = num_elements_spanned(size, stride) * dtype.itemsize
    if not num_bytes:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    memory = dry_bytes(num_bytes) if dry else np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    address = memory.ctypes.data
    pinned = current.machine.pinned
    pinned.register(address, num_bytes)
    storage = torch.from_numpy(owned(memory, partial(pinned.release, address))).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(size), tuple(stride))


def pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A pinned copy of a CPU tensor; the host is charged for locking the pages and for the copy."""
    num_bytes = tensor.numel() * tensor.element_size()
    dry = current.knowledge is not None and (is_dry(tensor) or num_bytes > SMALL_BYTES)
    pinned = empty_pinned(tensor.size(), torch.empty(tensor.size(), device="meta").stride(), tensor.dtype, dry=dry)
    current.machine.charge(num_bytes / PIN_BYTES_PER_SECOND + num_bytes / HOST_COPY_BYTES_PER_SECOND, "pin memory")
    return pinned if dry else pinned.copy_(tensor)


class Runtime:
    """The calls of CUDA's runtime that pin memory in place, by their names."""

    @staticmethod
    def cudaHostRegister(pointer: int, num_bytes: int, flags: int) -> int:
        """Pin a range exactly; 0, or an error's number: 1 for what cannot be pinned, 2 over the cap."""
        machine = current.machine
        if num_bytes <= 0 or machine.pinned.covers(pointer, num_bytes):
            return INVALID_VALUE
        try:
            machine.pinned.register(pointer, num_bytes, exact=True)
        except PinError:
            return OUT_OF_MEMORY
        machine.charge(num_bytes / PIN_BYTES_PER_SECOND, "pin memory")
        if current.knowledge is not None:
            adopt(pointer, num_bytes)
        return SUCCESS

    @staticmethod
    def cudaHostUnregister(pointer: int) -> int:
        """Let a registered range go; 0, or 1 if none begins there."""
        try:
            current.machine.pinned.unregister(pointer)
        except PinError:
            return INVALID_VALUE
        disown(pointer)
        return SUCCESS
