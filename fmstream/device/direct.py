"""Reads past the page cache: one reader per platform behind one face.

A reader is stateless between calls and may be used by several threads.  Addresses are host addresses; no reader holds
the GIL while it waits for the disk.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from typing import Final, Protocol, cast

SECTOR_BYTES: Final = 512
PAGE_BYTES: Final = mmap.PAGESIZE

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object
_READ, _WRITE = 0x100, 0x200


def view_of(address: int, nbytes: int, *, writable: bool = True) -> memoryview:
    """Host memory as a memoryview of bytes; whoever calls keeps the memory alive."""
    return cast(memoryview, _from_memory(address, nbytes, _WRITE if writable else _READ))


class Reader(Protocol):
    """An open file that is read by offset into host addresses.

    ``alignment`` is what address, offset and length of a read must be multiples of, 1 where any will do.
    """

    alignment: int

    def read_at(self, address: int, offset: int, nbytes: int) -> int:
        """Read up to ``nbytes``; returns the bytes read, 0 at the end of the file."""
        ...

    def status(self) -> os.stat_result:
        """The status of the open file."""
        ...

    def close(self) -> None:
        """Close the file; called once."""
        ...


class SeekingReader:
    """Plain reads under a lock, for platforms without positional reads (Windows)."""

    alignment = 1

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
        self._lock = threading.Lock()

    def read_at(self, address: int, offset: int, nbytes: int) -> int:
        """See `Reader`."""
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(view_of(address, nbytes)) or 0

    def status(self) -> os.stat_result:
        """See `Reader`."""
        return os.fstat(self._file.fileno())

    def close(self) -> None:
        """See `Reader`."""
        self._file.close()


if sys.platform != "win32":

    class PositionalReader:
        """Positional reads; with ``drop_cache`` the pages that were read leave the page cache again."""

        def __init__(self, fd: int, alignment: int = 1, drop_cache: bool = False) -> None:
            self.alignment = alignment
            self._fd = fd
            self._drop_cache = drop_cache

        def read_at(self, address: int, offset: int, nbytes: int) -> int:
            """See `Reader`."""
            got = os.preadv(self._fd, [view_of(address, nbytes)], offset)
            if self._drop_cache and sys.platform == "linux":
                os.posix_fadvise(self._fd, offset, got, os.POSIX_FADV_DONTNEED)
            return got

        def status(self) -> os.stat_result:
            """See `Reader`."""
            return os.fstat(self._fd)

        def close(self) -> None:
            """See `Reader`."""
            os.close(self._fd)


if sys.platform == "linux":

    def open_reader(path: str) -> Reader:
        """Open a file for direct reads, or for buffered ones where the file system refuses those."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            alignment = probe_alignment(fd)
            if alignment:
                return PositionalReader(fd, alignment)
            os.close(fd)
        return PositionalReader(os.open(path, os.O_RDONLY | os.O_CLOEXEC), drop_cache=True)

    def probe_alignment(fd: int) -> int:
        """The smallest alignment that direct reads of this file accept, or 0 where none does."""
        # The kernel states it only by statx, which Python does not call: so one small read tells.
        with mmap.mmap(-1, 2 * PAGE_BYTES) as area, memoryview(area) as whole:
            for alignment in sorted({SECTOR_BYTES, PAGE_BYTES}):
                with whole[alignment : 2 * alignment] as view:
                    try:
                        os.preadv(fd, [view], 0)
                    except OSError as error:
                        if error.errno != errno.EINVAL:
                            os.close(fd)
                            raise
                    else:
                        return alignment
        return 0

elif sys.platform == "darwin":
    import fcntl

    def open_reader(path: str) -> Reader:
        """Open a file whose reads do not stay in the page cache."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return PositionalReader(fd)

else:

    def open_reader(path: str) -> Reader:
        """Open a file for plain reads."""
        return SeekingReader(path)
