"""Files that hold master copies, read by byte range into host addresses."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fmstream.device.direct import PAGE_BYTES, open_reader
from fmstream.device.memory import private_memory
from fmstream.errors import ClosedError


class Identity(NamedTuple):
    """What tells a file from another one that took its place."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """The identity in a status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Staging:
    """Page-aligned host memory of one worker, for bytes whose place in the file is not aligned.

    Attributes:
        address: host address, a multiple of the page size.
        num_bytes: size, rounded up to whole pages.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
        self._area = private_memory(self.num_bytes)
        self._export: ctypes.c_char | None = ctypes.c_char.from_buffer(self._area)
        self.address = ctypes.addressof(self._export)

    def close(self) -> None:
        """Give the memory back; may be called again."""
        self._export = None
        self._area.close()


class SourceFile:
    """One file opened for reads that bypass the page cache (or leave nothing in it, where that is refused).

    Reads may come from several threads, each with its own `Staging`.  A read that is running when the file is closed
    ends in the file that it began in.

    Attributes:
        path: absolute path.
        identity: what the file was when it was opened.
        alignment: what address, offset and length must be multiples of to be read without staging.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._reader = open_reader(self.path)
        self.identity = Identity.of(self._reader.status())
        self.alignment = self._reader.alignment
        self._lock = threading.Lock()
        self._num_reads = 0
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Size of the file when it was opened."""
        return self.identity.num_bytes

    def changed(self) -> bool:
        """Whether the path now leads to another file, a file written since, or to none."""
        try:
            return Identity.of(os.stat(self.path)) != self.identity
        except OSError:
            return True

    def read_into(self, address: int, offset: int, nbytes: int, staging: Staging) -> None:
        """Read ``nbytes`` at ``offset`` to the host address ``address``.

        Raises:
            OSError: the read failed, or the file ends before the range does.
            ClosedError: the file is closed.
        """
        with self._reading():
            head, middle = self._split(address, offset, nbytes)
            done = head + middle
            try:
                self._read_staged(address, offset, head, staging)
                self._fill(address + head, offset + head, middle, middle)
                self._read_staged(address + done, offset + done, nbytes - done, staging)
            except EOFError:
                raise self._too_short(offset, nbytes) from None

    def close(self) -> None:
        """Close the file as soon as no read is running; may be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._num_reads == 0
        if idle:
            self._reader.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        # The descriptor must outlive every read in it: its number may be another file's a moment later.
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.path} is read after it was closed")
            self._num_reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_reads -= 1
                last = self._closed and self._num_reads == 0
            if last:
                self._reader.close()

    def _split(self, address: int, offset: int, nbytes: int) -> tuple[int, int]:
        """Bytes to stage before, and bytes to read straight to, the first address that is aligned in both."""
        if (address - offset) % self.alignment:
            return nbytes, 0
        head = min(-offset % self.alignment, nbytes)
        return head, (nbytes - head) // self.alignment * self.alignment

    def _read_staged(self, address: int, offset: int, nbytes: int, staging: Staging) -> None:
        end = offset + nbytes
        while offset < end:
            start = offset - offset % self.alignment
            stop = min(end, start + staging.num_bytes)
            extent = -(-(stop - start) // self.alignment) * self.alignment
            self._fill(staging.address, start, extent, stop - start)
            ctypes.memmove(address, staging.address + offset - start, stop - offset)
            address += stop - offset
            offset = stop

    def _fill(self, address: int, offset: int, extent: int, wanted: int) -> None:
        """Read an aligned extent until its first ``wanted`` bytes are there."""
        done = 0
        while done < wanted:
            got = self._reader.read_at(address + done, offset + done, extent - done)
            if done + got >= wanted:
                return
            # A short read may end anywhere: go on from the last aligned byte.
            progress = got - got % self.alignment
            if progress == 0:
                raise EOFError
            done += progress

    def _too_short(self, offset: int, wanted: int) -> OSError:
        size = self._reader.status().st_size
        return OSError(
            f"{self.path} ended early: wanted {wanted} bytes at offset {offset}, the file has {size} bytes "
            f"(it had {self.num_bytes} when it was opened); restore the file and load again"
        )
