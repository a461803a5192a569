"""A file of our own for master copies that have none."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from typing import Final

import torch

from fmstream.device.direct import PAGE_BYTES, view_of
from fmstream.device.mapped import MappedFile
from fmstream.device.nameless import dispose, remove_name
from fmstream.errors import ConfigError

WRITE_BYTES: Final = 32 << 20
"""Bytes written in one go, between which Ctrl-C is seen."""


class SpillFile:
    """A temporary file that is written once, then read directly and mapped.

    Where the system allows, its name is gone as soon as it is made, so that not even a killed process leaves it behind;
    elsewhere it is removed by `close` or at exit.  A failure of any step, and an interrupt, closes it.

    Attributes:
        path: where it can be opened for as long as this is not closed.
        num_bytes: bytes taken so far.
    """

    def __init__(self, directory: str | os.PathLike[str], num_bytes: int = 0) -> None:
        """Make an empty file.

        Args:
            directory: where to put it.
            num_bytes: how much will be written, if known: refused at once where there is no room for it.

        Raises:
            ConfigError: the directory cannot be written, or has no room.
        """
        self._directory = os.path.abspath(directory)
        self.num_bytes = 0
        self._mapped: MappedFile | None = None
        try:
            self._fd, name = tempfile.mkstemp(prefix="fmstream-", suffix=".spill", dir=self._directory)
        except OSError as error:
            raise ConfigError(
                f"no spill file can be made in {self._directory} ({error.strerror}): give another spill_dir"
            ) from error
        self._finalizer = weakref.finalize(self, dispose, self._fd, name, os.getpid())
        with self._closing_on_failure():
            self.path = remove_name(self._fd, name)
            self._check_room(num_bytes)

    @property
    def closed(self) -> bool:
        """Whether the file is gone."""
        return not self._finalizer.alive

    def append(self, address: int, nbytes: int) -> int:
        """Write host memory; returns its offset in the file, a multiple of 4096.

        Raises:
            ConfigError: the disk is full.
            OSError: the write failed otherwise.
        """
        assert self._mapped is None
        assert not self.closed
        with self._closing_on_failure():
            self._check_room(nbytes)
            offset = self.num_bytes
            os.lseek(self._fd, offset, os.SEEK_SET)
            done = 0
            while done < nbytes:
                size = min(WRITE_BYTES, nbytes - done)
                done += os.write(self._fd, view_of(address + done, size, writable=False))
            self.num_bytes = offset + -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            return offset

    def finish(self) -> None:
        """Bring everything to the disk; from now on the file can be read and mapped, and not written.

        Raises:
            ConfigError: the disk is full.
            OSError: the disk failed.
        """
        with self._closing_on_failure():
            os.ftruncate(self._fd, self.num_bytes)
            os.fsync(self._fd)
            if sys.platform == "linux":
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if self.num_bytes:
                self._mapped = MappedFile(self.path)

    def map(self, offset: int, nbytes: int) -> torch.Tensor:
        """A range of the finished file as a uint8 tensor; writes to it stay in memory."""
        assert self._mapped is not None
        return self._mapped.tensor(offset, torch.uint8, (nbytes,))

    def close(self) -> None:
        """Remove the file; what is mapped or open of it stays readable.  May be called again."""
        self._mapped = None
        self._finalizer()

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._directory).free
        if num_bytes > free:
            raise self._no_room(f"{num_bytes} bytes are needed and {free} are free")

    def _no_room(self, numbers: str) -> ConfigError:
        return ConfigError(
            f"no room to spill to {self._directory}: {numbers}; free some space or give another spill_dir"
        )

    @contextlib.contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._no_room(f"the disk is full after {self.num_bytes} bytes") from error
            raise
        except BaseException:
            self.close()
            raise
