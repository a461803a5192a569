"""A file of our own whose pages are written here and read by others: the last tier of memory."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
import weakref

from fmstream.config import is_path
from fmstream.device.direct import view_of
from fmstream.device.nameless import dispose, remove_name
from fmstream.errors import ConfigError


class PageFile:
    """A temporary file of pages by number; gone when it is closed, dropped, or the process ends.

    Attributes:
        read_fd: a descriptor of its own for those who read, for not every system reads at an offset.
    """

    def __init__(self, directory: str | os.PathLike[str], page_bytes: int) -> None:
        """Make an empty file; raises `ConfigError` where the folder cannot be written."""
        if not is_path(directory):
            raise ConfigError(f"spill_dir={directory!r} is no folder: give its path")
        self.directory = os.path.abspath(directory)
        self.page_bytes = page_bytes
        self._lock = threading.Lock()
        try:
            self._fd, self.read_fd, name = _make(self.directory)
        except OSError as error:
            raise ConfigError(
                f"no file for KV pages can be made in {self.directory} ({error.strerror}): give another spill_dir"
            ) from error
        self._finalizer = weakref.finalize(self, _close, self.read_fd, self._fd, name, os.getpid())
        remove_name(self._fd, name)

    def write(self, address: int, page: int, count: int) -> bool:
        """Write pages from host memory; whether there was room on the disk.

        Raises:
            OSError: the write failed otherwise.
        """
        total, start, done = count * self.page_bytes, page * self.page_bytes, 0
        try:
            while done < total:
                done += self._step(view_of(address + done, total - done, writable=False), start + done)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            raise
        return True

    def close(self) -> None:
        """Remove the file; may be called again."""
        self._finalizer()

    def _step(self, view: memoryview, offset: int) -> int:
        if sys.platform != "win32":
            return os.pwrite(self._fd, view, offset)
        with self._lock:  # no positional writes there
            os.lseek(self._fd, offset, os.SEEK_SET)
            return os.write(self._fd, view)


def _make(directory: str) -> tuple[int, int, str]:
    """An empty file: descriptors to write and to read it, and its name."""
    fd, name = tempfile.mkstemp(prefix="fmstream-", suffix=".pages", dir=directory)
    try:
        return fd, os.open(name, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)), name
    except BaseException:
        dispose(fd, name, os.getpid())
        raise


def _close(read_fd: int, fd: int, name: str, pid: int) -> None:
    os.close(read_fd)
    dispose(fd, name, pid)
