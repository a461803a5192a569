"""Files mapped into memory as tensors: a page takes RAM once it is touched, and no value is copied before."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fmstream.device.files import Identity
from fmstream.device.homes import register_mapping

# Without it Linux refuses to map a file larger than RAM and swap for writing, for every page might be written.
_NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0


class MappedFile:
    """A file mapped privately: writes stay in this process and never reach the file.

    The mapping lasts as long as any tensor on it; its place is known to `Mappings`.

    Attributes:
        path: absolute path.
        identity: what the file was when it was mapped.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the whole file.

        Raises:
            OSError: there is no such file, it cannot be read, or it is empty.
        """
        self.path = os.path.abspath(path)
        with open(self.path, "rb") as file:
            self.identity = Identity.of(os.fstat(file.fileno()))
            if self.identity.num_bytes == 0:
                raise OSError(f"{self.path} is empty: there is nothing to map")
            area = _map(file.fileno(), self.identity.num_bytes)
        with torch.inference_mode(False):
            self._storage = torch.frombuffer(area, dtype=torch.uint8).untyped_storage()
        alive = StorageWeakRef(self._storage)  # type: ignore[no-untyped-call]
        register_mapping(
            self._storage.data_ptr(),
            self.identity.num_bytes,
            self.path,
            self.identity,
            lambda: not alive.expired(),  # type: ignore[no-untyped-call]
        )

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A contiguous tensor at a byte of the file, with a storage of its own that is no larger than it."""
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=dtype, device="cpu")
            nbytes = empty.itemsize
            strides: list[int] = []
            for size in reversed(shape):
                strides.insert(0, nbytes // empty.itemsize)
                nbytes *= size
            # One storage for all would be copied whole by whoever saves or shares one tensor.
            return empty.set_(self._storage[offset : offset + nbytes], 0, tuple(shape), tuple(strides))


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
