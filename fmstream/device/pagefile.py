"""A file of our own whose pages are written and read at any time: the last tier of memory."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
import weakref

from fmstream.device.direct import view_of
from fmstream.device.spill import _dispose, _without_name
from fmstream.errors import ConfigError


class PageFile:
    """A temporary file of pages by number; gone when it is closed, dropped, or the process ends."""

    def __init__(self, directory: str | os.PathLike[str], page_bytes: int) -> None:
        """Make an empty file; raises `ConfigError` where the folder cannot be written."""
        self.directory = os.path.abspath(directory)
        self.page_bytes = page_bytes
        self._lock = threading.Lock()
        try:
            self._fd, name = tempfile.mkstemp(prefix="fmstream-", suffix=".pages", dir=self.directory)
        except OSError as error:
            raise ConfigError(
                f"no file for KV pages can be made in {self.directory} ({error.strerror}): give another spill_dir"
            ) from error
        self._finalizer = weakref.finalize(self, _dispose, self._fd, name, os.getpid())
        _without_name(self._fd, name)

    def write(self, address: int, page: int, count: int) -> bool:
        """Write pages from host memory; whether there was room on the disk.

        Raises:
            OSError: the write failed otherwise.
        """
        try:
            self._move(address, page, count, writing=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            raise
        return True

    def read(self, address: int, page: int, count: int) -> None:
        """Read pages to host memory; raises OSError where they cannot be read in full."""
        self._move(address, page, count, writing=False)

    def close(self) -> None:
        """Remove the file; may be called again."""
        self._finalizer()

    def _move(self, address: int, page: int, count: int, *, writing: bool) -> None:
        total, start = count * self.page_bytes, page * self.page_bytes
        done = 0
        while done < total:
            view = view_of(address + done, total - done, writable=not writing)
            moved = self._step(view, start + done, writing=writing)
            if not moved:
                raise OSError(errno.EIO, f"the file of KV pages in {self.directory} ended early")
            done += moved

    def _step(self, view: memoryview, offset: int, *, writing: bool) -> int:
        if sys.platform != "win32":
            return os.pwrite(self._fd, view, offset) if writing else os.preadv(self._fd, [view], offset)
        with self._lock:  # no positional reads there
            os.lseek(self._fd, offset, os.SEEK_SET)
            if writing:
                return os.write(self._fd, view)
            found = os.read(self._fd, len(view))
            view[: len(found)] = found
            return len(found)
