"""What tests of the workers of the host share: bytes at addresses, and a gate that keeps a worker inside a read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

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


@contextmanager
def blocked_pipe() -> Iterator[int]:
    """A descriptor whose positional read fails, with a writer that is open (a pipe cannot be read by offset)."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def num_open() -> int:
    """Descriptors that this process has open."""
    assert sys.platform == "linux"
    return len(os.listdir("/proc/self/fd"))
