"""Device tensors over the memory of the machine, and CPU aliases of the same bytes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from fmstream.emulator.allocator import Block, CapacityError

if TYPE_CHECKING:
    from fmstream.emulator.machine import Machine

NAME: Final = "emu"
CPU_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
DLPACK_EXTENSION: Final = 12
"""kDLExtDev, which PyTorch takes for its device type PrivateUse1."""
DLPACK_CODES: Final = {
    torch.int8: 0,
    torch.int16: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.uint8: 1,
    torch.float16: 2,
    torch.float32: 2,
    torch.float64: 2,
    torch.bfloat16: 4,
    torch.complex64: 5,
    torch.complex128: 5,
    torch.bool: 6,
}
FIELDS: Final = struct.Struct("<iiiBBHQQ")
FIELDS_OFFSET: Final = 8
"""A DLTensor: void *data; device type, device index, int32 ndim; {code, bits, lanes}; int64 *shape, *strides."""

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Span = tuple[int, int]
"""Address and number of bytes."""


class Owner(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes that call ``release`` when the storage made of them dies.

    A deleter in C would run Python code while an exception unwinds; ``__del__`` keeps that exception safe.
    """

    release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()


def owned(memory: Bytes, release: Callable[[], None] | None) -> Owner:
    """The same bytes as an array that tells of its end."""
    owner = memory.view(Owner)
    owner.release = release
    return owner


def bytes_at(address: int, num_bytes: int) -> Bytes:
    """A writable array over memory that something else keeps alive."""
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    found: Bytes = np.frombuffer(memory, dtype=np.uint8)
    return found


@lru_cache(maxsize=1 << 16)
def _shape_fields(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Any, int, int]:
    """An array that holds a size and a stride, and the addresses of both."""
    held = (ctypes.c_int64 * (2 * len(size)))(*size, *stride)
    return held, ctypes.addressof(held), ctypes.addressof(held) + 8 * len(size)


def device_tensor(owner: Owner, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the device over these bytes, with a storage of its own.

    numpy's capsule is made over to say another device, dtype and shape: PyTorch copies these, and numpy frees what it
    had made itself.
    """
    code = DLPACK_CODES.get(dtype)
    if code is None or 0 in size:
        raw = device_tensor(owner, owner.shape, (1,), torch.uint8) if owner.size else _empty_bytes(owner)
        raw = raw.view(dtype)
        tensor: torch.Tensor = torch.ops.aten.as_strided.default.redispatch(CPU_KEYS, raw, size, stride, 0)
        return tensor
    capsule = owner.__dlpack__()
    _, shape, strides = _shape_fields(size, stride)
    fields = FIELDS.pack(DLPACK_EXTENSION, 0, len(size), code, dtype.itemsize * 8, 1, shape, strides)
    ctypes.memmove(_pointer_of(capsule, b"dltensor") + FIELDS_OFFSET, fields, FIELDS.size)
    made: torch.Tensor = torch._C._from_dlpack(capsule)
    return made


def _empty_bytes(owner: Owner) -> torch.Tensor:
    capsule = owner.__dlpack__()
    ctypes.c_int32.from_address(_pointer_of(capsule, b"dltensor") + FIELDS_OFFSET).value = DLPACK_EXTENSION
    made: torch.Tensor = torch._C._from_dlpack(capsule)
    return made


def is_device(value: object) -> bool:
    """Whether this is a tensor on the device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def num_elements_spanned(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one, both counted; 0 for a tensor without elements."""
    last = 0
    for length, step in zip(size, stride, strict=True):
        if not length:
            return 0
        last += (length - 1) * step
    return last + 1


def span_of(tensor: torch.Tensor) -> Span:
    """Address and bytes from a tensor's first element to its last."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return tensor.data_ptr(), num_elements_spanned(tensor.size(), tensor.stride()) * tensor.element_size()


def num_bytes_touched(tensor: torch.Tensor, span: Span) -> int:
    """Bytes that a kernel reads or writes: an expanded tensor counts once, gaps between elements do not."""
    return min(span[1], tensor.numel() * tensor.element_size())


class Memory:
    """What a machine's memory is to PyTorch.

    Attributes:
        address, num_bytes: the mapping that holds all device memory.
        known: address and bytes of the storages whose values a dry run has, None for a machine that computes.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.address: int = machine.allocator.address
        self.num_bytes: int = machine.allocator.num_bytes
        self._bytes = bytes_at(self.address, self.num_bytes)
        with torch.inference_mode(False):  # else kernels could write it in that mode only
            self._raw = torch.from_numpy(self._bytes)
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self.known: set[Span] | None = set() if machine.execution == "dry" else None
        self._nothing = self._bytes[:0]

    def new(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the device, allocated on this thread's current stream.

        Raises `torch.OutOfMemoryError`.
        """
        owner = self._allocate(num_elements_spanned(size, stride) * dtype.itemsize)
        return device_tensor(owner, tuple(size), tuple(stride), dtype)

    def _allocate(self, num_bytes: int) -> Owner:
        if not num_bytes:
            return owned(self._nothing, None)
        machine = self.machine
        allocator = machine.allocator
        try:
            block = allocator.allocate(num_bytes, machine.current_stream)
        except CapacityError as error:
            raise torch.OutOfMemoryError(str(error)) from None
        start = block.address - self.address
        release = partial(allocator.free, block) if self.known is None else partial(self._forget, block, num_bytes)
        return owned(self._bytes[start : start + num_bytes], release)

    def _forget(self, block: Block, num_bytes: int) -> None:
        assert self.known is not None
        self.known.discard((block.address, num_bytes))
        self.machine.allocator.free(block)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor over the same bytes as a device tensor; raises RuntimeError for one of an earlier machine."""
        dtype, size, stride = tensor.dtype, tensor.size(), tensor.stride()
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self._raw.view(dtype)
        offset = tensor.data_ptr() - self.address
        if 0 <= offset < self.num_bytes:
            start, rest = divmod(offset, dtype.itemsize)
            if not rest:
                return view.as_strided(size, stride, start)
            unaligned = torch.frombuffer(self._bytes[offset : offset + span_of(tensor)[1]], dtype=dtype)
            return unaligned.as_strided(size, stride)
        if not tensor.numel():
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        raise RuntimeError("a tensor of a machine that emulator.reset() has replaced: make it anew after the reset")
