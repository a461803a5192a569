"""What tests of the workers of the host share: bytes at addresses, and reads that do as a test says."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from fmstream.actors import portable
from fmstream.actors.host_workers import HostWorkers

Bytes = NDArray[np.uint8]
ReadAt = Callable[[int, int, int, int], int]

TIMEOUT = 30.0
"""Longest wait of any test; a hang fails."""


def noise_bytes(num: int, seed: int = 0) -> Bytes:
    """Random bytes, the same at each call."""
    return np.random.default_rng(seed).integers(0, 256, num, dtype=np.uint8)


def address(array: NDArray[np.generic]) -> int:
    """Where an array begins."""
    return int(array.ctypes.data)


def at_offset(num: int, offset: int) -> Bytes:
    """Zeroed bytes that begin ``offset`` bytes after a multiple of 64."""
    whole = np.zeros(num + 128, np.uint8)
    start = -address(whole) % 64 + offset
    return whole[start : start + num]


def replace_reads(workers: HostWorkers, read_at: ReadAt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers read by ``read_at(fd, address, offset, num_bytes)``, which returns bytes or raises OSError."""
    if not workers.native:
        monkeypatch.setattr(portable, "read_at", read_at)
        return
    from fmstream.core import _native

    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4, use_errno=True)

    def pread(fd: int, target: int, num_bytes: int, offset: int) -> int:
        try:
            return read_at(fd, target, offset, num_bytes)
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1

    for lane in workers._lanes:
        function = kind(pread)
        lane.keeps[-1] = function  # as long as the worker may call it
        lane._block.words[_native.PREAD // 8] = ctypes.cast(function, ctypes.c_void_p).value


class Gate:
    """A read that waits inside until it is let go, then reads nothing but says that it did."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.opened = threading.Event()

    def read_at(self, fd: int, target: int, offset: int, num_bytes: int) -> int:
        """Wait."""
        self.inside.set()
        assert self.opened.wait(TIMEOUT)
        ctypes.memset(target, 1, num_bytes)
        return num_bytes
