"""Dry runs: shapes, memory, time and the checker without values, but for small tensors whose values are known.

A host tensor may be dry as well: addresses that nothing backs, so that real-size models need no memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import nn

from fmstream.emulator.allocator import Allocator
from fmstream.emulator.reserve import Reserve
from fmstream.emulator.tensors import Bytes, Span, bytes_at, is_device, num_elements_spanned, owned
from fmstream.errors import FmstreamError

SMALL_BYTES: Final = 1 << 16
"""Storages up to this size have values in a dry run, if all that they were computed from has."""
SPACE_BYTES: Final = 1 << 43
"""Address space for dry host tensors."""
ROUNDING: Final = 4096


class DryValueError(FmstreamError, RuntimeError):
    """A dry run was asked for a value, and has only shapes."""


class DrySpace:
    """Addresses for dry host tensors, given out again by exact size."""

    def __init__(self) -> None:
        self._reserve = Reserve(SPACE_BYTES, usable=False)
        self._next = self._reserve.base
        self._free: dict[int, list[int]] = {}
        self._adopted: list[tuple[int, int]] = []
        """Ranges of other memory, each its start and end, in order."""

    def __contains__(self, address: int) -> bool:
        if self._reserve.base <= address < self._reserve.end:
            return True
        at = bisect_left(self._adopted, (address + 1, 0))
        return at > 0 and address < self._adopted[at - 1][1]

    def adopt(self, address: int, num_bytes: int) -> None:
        """Take memory of the program's own for dry from now on."""
        insort(self._adopted, (address, address + num_bytes))

    def disown(self, address: int) -> None:
        """The range that begins there, if it was adopted, has values again."""
        self._adopted = [span for span in self._adopted if span[0] != address]

    def take(self, num_bytes: int) -> Bytes:
        """Bytes that nobody may touch."""
        size = -(-num_bytes // ROUNDING) * ROUNDING
        free = self._free.setdefault(size, [])
        if free:
            return bytes_at(free.pop(), num_bytes)
        address, self._next = self._next, self._next + size
        if self._next > self._reserve.end:
            raise MemoryError(f"dry host tensors take more than {SPACE_BYTES >> 40} TiB of addresses")
        return bytes_at(address, num_bytes)

    def give_back(self, address: int, num_bytes: int) -> None:
        """Take bytes back."""
        self._free[-(-num_bytes // ROUNDING) * ROUNDING].append(address)


_space: DrySpace | None = None


def _dry_space() -> DrySpace:
    global _space
    if _space is None:
        _space = DrySpace()
    return _space


def adopt(address: int, num_bytes: int) -> None:
    """Take host memory that the program pins for a dry run as dry, so that weights can be moved there as shapes."""
    _dry_space().adopt(address, num_bytes)


def disown(address: int) -> None:
    """Host memory that was adopted is like any other again."""
    if _space is not None:
        _space.disown(address)


def dry_bytes(num_bytes: int) -> Bytes:
    """Host bytes without memory, whose addresses are used again when the array dies."""
    space = _dry_space()
    memory = space.take(num_bytes)
    address = memory.ctypes.data
    return owned(memory, lambda: space.give_back(address, num_bytes))


def empty_dry(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor without memory."""
    num_bytes = num_elements_spanned(size, stride) * dtype.itemsize
    if not num_bytes:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    storage = torch.from_numpy(dry_bytes(num_bytes)).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(size), tuple(stride))


def is_dry(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a CPU tensor without memory."""
    return _space is not None and tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _space


class Knowledge:
    """Which device storages have values: ``known``, by address and bytes."""

    def __init__(self, allocator: Allocator, known: set[Span]) -> None:
        self._allocator = allocator
        self._known = known

    def knows(self, tensors: Iterable[torch.Tensor], host: Iterable[torch.Tensor]) -> bool:
        """Whether all these tensors, on the device and on the host, have values."""
        return all(map(self._is_known, tensors)) and not any(map(is_dry, host))

    def has_value(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of any device has values."""
        return self._is_known(tensor) if is_device(tensor) else not is_dry(tensor)

    def learn(
        self,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        host: Iterable[torch.Tensor],
        *,
        overwrites: bool,
    ) -> bool:
        """Note a kernel; whether it has to run, for it makes small values out of known ones.

        ``overwrites`` says that what is written does not depend on what was there.
        """
        known = self.knows(reads, host)
        known = known and all(_is_small(t) and self._stays_known(t, overwrites) for t in writes)
        for tensor in writes:
            self._note(tensor, known)
        return known

    def learn_copy(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Note a copy; whether it has to run."""
        if is_device(target):
            sources = [source] if is_device(source) else []
            return self.learn(sources, [target], [] if sources else [source], overwrites=True)
        return self.knows([source], [target])

    def keep(self, outputs: Sequence[torch.Tensor], fill: Callable[[], object]) -> Callable[[], object] | None:
        """Note known results; ``fill`` if they are small enough to be kept."""
        small = all(map(_is_small, outputs))
        for output in outputs:
            self._note(output, small)
        return fill if small else None

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or _storage_span(tensor) in self._known

    def _stays_known(self, tensor: torch.Tensor, overwrites: bool) -> bool:
        whole = tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
        return (overwrites and whole) or self._is_known(tensor)

    def _note(self, tensor: torch.Tensor, known: bool) -> None:
        span = _storage_span(tensor)
        block = self._allocator.block_at(span[0])
        if block is not None and span != (block.address, block.nbytes):
            self._known.discard((block.address, block.nbytes))  # written through a storage of its own over a part
        if known:
            self._known.add(span)
        else:
            self._known.discard(span)


def _storage_span(tensor: torch.Tensor) -> Span:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= SMALL_BYTES


def require_known(tensor: torch.Tensor, knowledge: Knowledge | None) -> None:
    """Raise `DryValueError` if this is a tensor without values."""
    if knowledge is not None and not knowledge.has_value(tensor):
        raise DryValueError(
            f"a value of a {tensor.dtype} tensor of shape {tuple(tensor.shape)} was asked for, and a dry run has only "
            "its shape: run for real, or make the value on the host from what is known"
        )


def dry_parameters(module: nn.Module) -> nn.Module:
    """Put dry CPU tensors in place of a module's parameters and large buffers, of whichever device; returns it.

    Parameters that are shared stay shared.  Small buffers on the meta device become zeros.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    dry = empty_dry(parameter.size(), parameter.stride(), parameter.dtype)
                    made[id(parameter)] = nn.Parameter(dry, requires_grad=parameter.requires_grad)
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _dry_buffer(buffer)
    return module


def _dry_buffer(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.numel() * buffer.element_size() > SMALL_BYTES:
        return empty_dry(buffer.size(), buffer.stride(), buffer.dtype)
    return torch.zeros_like(buffer, device="cpu") if buffer.device.type == "meta" else buffer
