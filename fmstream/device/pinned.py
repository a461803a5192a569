"""Page-locked host memory of exactly the size that is asked for."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from fmstream.device.memory import private_memory

SUCCESS: Final = 0
PORTABLE: Final = 1
"""Registered for all devices of the process, not only for the one that was current."""


class PinnedBlock:
    """Host memory that is registered with an accelerator's driver.

    Memory from ``pin_memory=True`` would be rounded up to a power of two.  ``pinned`` is False where the driver
    refused; the memory can then be used all the same, with slower copies.
    """

    def __init__(self, module: Any, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = pinned_size(num_bytes)
        self._memory = private_memory(self.num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        with torch.inference_mode(False):
            self.tensor = self.part(0, self.num_bytes)
        # First, lest an interrupt between the two leave memory registered that is no longer there.
        self._users_are_done: list[bool] = []
        self._unregister = weakref.finalize(
            self, _unregister, module, device, self.address, self._memory, self._users_are_done
        )
        self.pinned = _register(module, device, self.address, self.num_bytes)
        if not self.pinned:
            self._unregister.detach()

    def part(self, offset: int, num_bytes: int) -> torch.Tensor:
        """A flat uint8 tensor over at least one byte of it, with a storage of its own."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=offset)

    def close(self) -> None:
        """Give up the registration, which no copy may be using; the memory lives as long as tensors over it.

        May be called again.
        """
        self._users_are_done.append(True)
        self._unregister()
        self.pinned = False


def pinned_size(num_bytes: int) -> int:
    """Bytes that are locked for a block of ``num_bytes``: whole memory pages, at least one."""
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _register(module: Any, device: torch.device, address: int, num_bytes: int) -> bool:
    driver = getattr(module, "cudart", None)
    if driver is None:
        return False
    # The driver acts for the current device, which is another one in a thread that chose none.
    with module.device(device):
        if int(driver().cudaHostRegister(address, num_bytes, PORTABLE)) == SUCCESS:
            return True
        # The driver remembers the refusal, and the next kernel would be blamed for it: let that be one of ours.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        return False


def _unregister(module: Any, device: torch.device, address: int, memory: mmap.mmap, users_are_done: list[bool]) -> None:
    with module.device(device):
        try:
            if not users_are_done:  # nobody closed the block, so nobody waited for its copies
                module.synchronize()
        finally:
            module.cudart().cudaHostUnregister(address)
    del memory  # it had to live until now


class Pins:
    """The pinned blocks of one device, found by address; ``settle`` waits for every copy that may be using one."""

    def __init__(self, module: Any, device: torch.device, settle: Callable[[], None]) -> None:
        self._module = module
        self._device = device
        self._settle = settle
        self._starts: list[int] = []
        self._blocks: list[PinnedBlock] = []

    def allocate(self, num_bytes: int) -> PinnedBlock:
        """A new block; see its ``pinned`` for whether the driver took it."""
        block = PinnedBlock(self._module, self._device, num_bytes)
        if block.pinned:
            at = bisect.bisect(self._starts, block.address)
            self._starts.insert(at, block.address)
            self._blocks.insert(at, block)
        return block

    def free(self, block: PinnedBlock) -> None:
        """Close a block, once no copy uses it."""
        self._settle()
        if block in self._blocks:
            at = self._blocks.index(block)
            del self._starts[at], self._blocks[at]
        block.close()

    def find(self, address: int, num_bytes: int) -> PinnedBlock | None:
        """The block in which a range of host memory lies; None if it is not pinned."""
        at = bisect.bisect(self._starts, address) - 1
        if at < 0:
            return None
        block = self._blocks[at]
        return block if address + num_bytes <= block.address + block.num_bytes else None
