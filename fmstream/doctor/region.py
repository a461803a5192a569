"""Memory of a device that is under test."""

from __future__ import annotations

import bisect
import gc
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fmstream.device.accelerator import Accelerator
from fmstream.device.device import Device
from fmstream.device.memory import return_free_memory
from fmstream.errors import MemoryBudgetError

MIB: Final = 1 << 20
BLOCK_BYTES: Final = 1 << 30
"""Taken at once, so that memory in pieces is tested too; a multiple of every chunk."""
CHUNK_BYTES: Final = 64 * MIB
"""Of one launch on an accelerator: far below a millisecond, so that no watchdog ends it."""
HOST_CHUNK_BYTES: Final = 1 * MIB
"""On the host, where what is compared stays in the caches."""


class Region:
    """Blocks of a device's memory as one range of words; a `Store`.

    ``num_words`` is what could be had, which may be less than was asked for.

    Raises:
        MemoryBudgetError: the device did not give a single block.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._owner = device
        self.device = device.torch_device
        self.chunk_words = (CHUNK_BYTES if isinstance(device, Accelerator) else HOST_CHUNK_BYTES) // 4
        self._blocks: list[Tensor] = []
        self._starts: list[int] = []
        self.num_words = 0
        try:
            self._take(max(1, num_bytes // 4))
            self._read = torch.empty(min(self.chunk_words, self.num_words), dtype=torch.int32, device=self.device)
        except BaseException:
            self.close()
            raise

    def _take(self, num_words: int) -> None:
        while self.num_words < num_words:
            size = min(BLOCK_BYTES // 4, num_words - self.num_words)
            try:
                block = torch.empty(size, dtype=torch.int32, device=self.device)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                # On the host the same is a plain RuntimeError.
                if self._blocks:
                    return
                raise MemoryBudgetError(
                    f"{self.device} gave no {size * 4} bytes to test: give a smaller --size, or close what else uses it"
                ) from error
            self._starts.append(self.num_words)
            self._blocks.append(block)
            self.num_words += size

    def _place(self, word: int) -> tuple[Tensor, int]:
        """The block that a word lies in, and where it begins."""
        at = bisect.bisect(self._starts, word) - 1
        return self._blocks[at], self._starts[at]

    def write(self, start: int, stop: int, step: int, words: Tensor) -> None:
        """See `Store`."""
        block, first = self._place(start)
        block[start - first : stop - first : step].copy_(words)

    def read(self, start: int, stop: int) -> Tensor:
        """See `Store`."""
        block, first = self._place(start)
        return self._read[: stop - start].copy_(block[start - first : stop - first])

    def read_again(self, words: Tensor) -> Tensor:
        """Read single words of one chunk once more: int64 addresses to int32."""
        block, first = self._place(int(words[0]))
        return block[words - first]

    def address(self, word: int) -> int:
        """Virtual address of a word."""
        block, first = self._place(word)
        return block.data_ptr() + 4 * (word - first)

    def close(self) -> None:
        """Give the memory back to the system.  Idempotent."""
        self._blocks.clear()
        self._starts.clear()
        self._read = torch.empty(0, dtype=torch.int32)
        gc.collect()
        if isinstance(self._owner, Accelerator):
            self._owner.module.synchronize()
            self._owner.module.empty_cache()
        else:
            return_free_memory()


def cache_bytes(device: Device, system: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """The largest cache between the device's cores and its memory; None where the system does not tell."""
    if isinstance(device, Accelerator):
        properties: Any = device.module.get_device_properties(device.torch_device)
        found = getattr(properties, "L2_cache_size", None)
        return int(found) if found else None
    if sys.platform != "linux":
        return None
    sizes = []
    for file in system.glob("cpu0/cache/index*/size"):
        try:
            text = file.read_text(encoding="ascii").strip()
            sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": MIB}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):  # not as it should be: one cache less is known
            continue
    return max(sizes, default=None)
