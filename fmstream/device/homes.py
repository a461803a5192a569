"""Homes: where the master copy of a weight lives, in memory or in a file."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fmstream.device.files import Identity, SourceFile
from fmstream.device.maps import MappedRange, dirty, read_maps

__all__ = ["FileHome", "FileSet", "Home", "Mappings", "MemoryHome", "dirty", "register_mapping"]


@dataclass(frozen=True, slots=True)
class FileHome:
    """A range of a file."""

    file: SourceFile
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryHome:
    """A range of host memory; ``keep`` is what keeps that memory alive."""

    address: int
    num_bytes: int
    keep: object


Home = FileHome | MemoryHome


class FileSet:
    """Opens each path once, however many homes lie in it.

    A file that was replaced under its path is another file, with its own entry.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[tuple[str, Identity], SourceFile] = {}
        self._uses: dict[tuple[str, Identity], int] = {}

    def __len__(self) -> int:
        return len(self._files)

    def open(self, path: str | os.PathLike[str]) -> SourceFile:
        """The open file at ``path``, with one more user.

        Raises:
            OSError: there is no such file, or it cannot be read.
        """
        with self._lock:
            file = self._files.get((os.path.abspath(path), Identity.of(os.stat(path))))
            if file is None:
                file = SourceFile(path)
                # The file may have been replaced since its status was taken.
                known = self._files.setdefault((file.path, file.identity), file)
                if known is not file:
                    file.close()
                    file = known
            key = (file.path, file.identity)
            self._uses[key] = self._uses.get(key, 0) + 1
            return file

    def release(self, file: SourceFile) -> None:
        """Give up one use; the file is closed with its last one."""
        key = (file.path, file.identity)
        with self._lock:
            left = self._uses.get(key, 0) - 1
            if left > 0:
                self._uses[key] = left
                return
            self._uses.pop(key, None)
            self._files.pop(key, None)
        file.close()

    def close(self) -> None:
        """Close all files; may be called again."""
        with self._lock:
            files = list(self._files.values())
            self._files.clear()
            self._uses.clear()
        for file in files:
            file.close()


class _Registered(NamedTuple):
    start: int
    end: int
    path: str
    identity: Identity
    alive: Callable[[], bool]


_registered: dict[int, _Registered] = {}
_registered_lock = threading.Lock()


def register_mapping(address: int, nbytes: int, path: str, identity: Identity, alive: Callable[[], bool]) -> None:
    """Make known that this process mapped a file itself, from its first byte.

    Args:
        address: first address of the mapping.
        nbytes: its size.
        path: absolute path of the file.
        identity: what the file was when it was mapped.
        alive: says whether the mapping still stands; once it does not, the entry is dropped.
    """
    entry = _Registered(address, address + nbytes, path, identity, alive)
    with _registered_lock:
        _drop_dead()
        _registered[address] = entry


def _drop_dead() -> None:
    for address in [address for address, entry in _registered.items() if not entry.alive()]:
        del _registered[address]


class Mappings:
    """The mapped files of this process at one moment."""

    def __init__(self, ranges: list[MappedRange], registered: list[_Registered]) -> None:
        self._ranges = ranges
        self._starts = [found.start for found in ranges]
        self._registered = registered

    @classmethod
    def snapshot(cls) -> Mappings:
        """Look once at what is mapped now."""
        with _registered_lock:
            _drop_dead()
            registered = list(_registered.values())
        return cls(read_maps(), registered)

    def find(self, address: int, nbytes: int) -> tuple[str, int] | None:
        """The path and the offset of the file that a range of addresses shows.

        None if it is not of one file, or if the file has been deleted, replaced or cut since.  Whether the range was
        written in memory is another question: see `dirty`.
        """
        if nbytes <= 0:
            return None
        return self._find_registered(address, nbytes) or self._find_mapped(address, nbytes)

    def _find_registered(self, address: int, nbytes: int) -> tuple[str, int] | None:
        for entry in self._registered:
            if entry.start <= address and address + nbytes <= entry.end and entry.alive():
                try:
                    same = Identity.of(os.stat(entry.path)) == entry.identity
                except OSError:
                    return None
                return (entry.path, address - entry.start) if same else None
        return None

    def _find_mapped(self, address: int, nbytes: int) -> tuple[str, int] | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address + nbytes > self._ranges[index].end:
            return None
        found = self._ranges[index]
        try:
            status = os.stat(found.path)
        except OSError:
            return None
        offset = found.offset + address - found.start
        if not found.is_still(status) or offset + nbytes > status.st_size:
            return None
        return found.path, offset
