"""Address space of the device: one reserved mapping, whose pages cost nothing until they are touched."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from bisect import bisect_left
from typing import Final

# The values of Linux on its common machines; the names are not in ``mmap`` everywhere.
MAP_PRIVATE_ANONYMOUS_NORESERVE: Final = 0x2 | 0x20 | 0x4000
PROT_NONE: Final = 0
READ_WRITE: Final = 0x1 | 0x2
MADV_DONTNEED: Final = 4
FAILED: Final = ctypes.c_void_p(-1).value


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for call in (library.mprotect, library.madvise):
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


class Reserve:
    """A range of addresses at ``base``, ``num_bytes`` long, unmapped when this object dies.

    Not ``usable``, it can be neither read nor written until ``open`` says so: a touch is a fault, not a wrong result.
    Raises OSError where the system refuses so much address space, or is not Linux.
    """

    def __init__(self, num_bytes: int, *, usable: bool) -> None:
        if sys.platform != "linux":
            raise OSError(f"the emulated device needs Linux to reserve its addresses; this is {sys.platform}")
        self._library = _library()
        rights = READ_WRITE if usable else PROT_NONE
        base = self._library.mmap(None, num_bytes, rights, MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if base in (None, FAILED):
            error = ctypes.get_errno()
            raise OSError(error, f"no address space of {num_bytes} bytes for the device: {os.strerror(error)}")
        self.base = int(base)
        self.num_bytes = num_bytes
        self.usable = usable
        self._free = [(self.base, num_bytes)]
        # Not at exit: tensors and threads may outlive this object there.
        weakref.finalize(self, self._library.munmap, base, num_bytes).atexit = False

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.base + self.num_bytes

    def take(self, num_bytes: int) -> int | None:
        """The address of the first free stretch that holds ``num_bytes`` (whole pages); None if none does."""
        for index, (address, size) in enumerate(self._free):
            if size >= num_bytes:
                rest = [(address + num_bytes, size - num_bytes)] if size > num_bytes else []
                self._free[index : index + 1] = rest
                return address
        return None

    def give(self, address: int, num_bytes: int) -> None:
        """Give a stretch back: its pages to the system, its addresses to whoever takes them next."""
        self._drop(address, num_bytes)
        index = bisect_left(self._free, (address, 0))
        start, end, low, high = address, address + num_bytes, index, index
        if index and sum(self._free[index - 1]) == start:
            low, start = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            high, end = index + 1, sum(self._free[index])
        self._free[low:high] = [(start, end - start)]

    def open(self, address: int, num_bytes: int) -> None:
        """Let whole pages be read and written."""
        self._protect(address, num_bytes, READ_WRITE)

    def _drop(self, address: int, num_bytes: int) -> None:
        if self._library.madvise(address, num_bytes, MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"{num_bytes} bytes of the device cannot be given back")
        if not self.usable:
            self._protect(address, num_bytes, PROT_NONE)

    def _protect(self, address: int, num_bytes: int, protection: int) -> None:
        if self._library.mprotect(address, num_bytes, protection):
            error = ctypes.get_errno()
            raise OSError(error, f"{num_bytes} bytes of the device cannot be protected: {os.strerror(error)}")
