"""Copies within the host's memory, and reads of a file past the page cache and from it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final

import torch

from fmstream.device.direct import PAGE_BYTES, Reader, open_reader
from fmstream.device.memory import private_memory
from fmstream.doctor.rates import Rate
from fmstream.errors import ConfigError

MIB: Final = 1 << 20
SAMPLES: Final = 11
RAM_BATCH: Final = 64 * MIB
READ_BYTES: Final = 4 * MIB
"""Of one read, which each of the threads makes at a time."""
THREADS: Final = 3
SAMPLE_BYTES: Final = 96 * MIB
"""Of a file in one sample; a file that is smaller is read whole."""

RAM = "within the host's memory"
UNCACHED, CACHED = "disk, past the page cache", "disk, from the page cache"


def ram_rate(num_bytes: int) -> Rate:
    """Copies from one place in memory to another; bytes are counted once."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    count = max(1, RAM_BATCH // num_bytes)

    def sample() -> float:
        began = time.perf_counter()
        for _ in range(count):
            target.copy_(source)
        return (time.perf_counter() - began) / count

    sample()
    return Rate(RAM, num_bytes, tuple(max(sample(), 1e-12) for _ in range(SAMPLES)))


def find_file(path: str | os.PathLike[str]) -> Path:
    """The file itself, or the largest one in a folder.

    Raises:
        ConfigError: there is none, or none with anything in it.
    """
    given = Path(path)
    files = [given] if given.is_file() else [file for file in given.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    if largest is None or largest.stat().st_size < PAGE_BYTES:
        raise ConfigError(
            f"path={os.fspath(path)!r}: there is no file of {PAGE_BYTES} bytes or more to read: give a checkpoint, or "
            "its folder"
        )
    return largest


def disk_rates(file: Path) -> list[Rate]:
    """Reads of a file by some threads at a time: past the page cache, then from it."""
    uncached, num_bytes = _read_uncached(file), min(SAMPLE_BYTES, file.stat().st_size // PAGE_BYTES * PAGE_BYTES)
    return [Rate(UNCACHED, num_bytes, uncached), Rate(CACHED, num_bytes, _read_cached(file, num_bytes))]


def _read_uncached(file: Path) -> tuple[float, ...]:
    """Seconds by sample, each of another stretch of the file as far as there are so many."""
    reader = open_reader(os.fspath(file))
    with closing(reader), ThreadPoolExecutor(THREADS) as pool:
        size = reader.status().st_size // PAGE_BYTES * PAGE_BYTES
        num_bytes = min(SAMPLE_BYTES, size)
        stretches = size // num_bytes
        if hasattr(os, "posix_fadvise"):
            with file.open("rb") as opened:  # where direct reads are refused, pages must not be there before
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = private_memory(num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, 0, num_bytes)  # the system gives memory when it is first touched

        def read(number: int) -> None:
            """Read a stretch by some threads, each into a place of its own."""
            offset = number % stretches * num_bytes
            list(pool.map(lambda at: _read_part(reader, address + at, offset + at, num_bytes - at), parts))

        parts = range(0, num_bytes, READ_BYTES)
        return _timed(read)


def _read_cached(file: Path, num_bytes: int) -> tuple[float, ...]:
    with file.open("rb", buffering=0) as opened:
        buffer = memoryview(bytearray(num_bytes))

        def read(number: int) -> None:
            opened.seek(0)
            while (at := opened.tell()) < num_bytes:
                opened.readinto(buffer[at : at + READ_BYTES])

        read(0)
        return _timed(read)


def _timed(read: Callable[[int], None]) -> tuple[float, ...]:
    taken = []
    for number in range(SAMPLES):
        began = time.perf_counter()
        read(number)
        taken.append(max(time.perf_counter() - began, 1e-12))
    return tuple(taken)


def _read_part(reader: Reader, address: int, offset: int, left: int) -> None:
    done, num_bytes = 0, min(READ_BYTES, left)
    while done < num_bytes:
        got = reader.read_at(address + done, offset + done, num_bytes - done)
        if got == 0:
            raise ConfigError("the file became shorter while it was read: let it be, and try again")
        done += got
