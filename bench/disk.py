"""The model of the disk benchmarks, its file, and the fastest way to read that file."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import nn

from bench.contract import BenchError
from fmstream.device.memory import private_memory

CHUNKS: Final = (1 << 20, 4 << 20, 8 << 20, 16 << 20)
THREADS: Final = (1, 2, 4)
TRIED_BYTES: Final = 256 << 20
"""Bytes that are read to compare ways of reading."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Blocks of width x hidden, in bfloat16."""

    width: int
    hidden: int
    num_blocks: int


class Block(nn.Module):
    """A residual block: LayerNorm, Linear, GELU, Linear; (tokens, width) to (tokens, width)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.bfloat16)
        self.rise = nn.Linear(width, hidden, dtype=torch.bfloat16)
        self.fall = nn.Linear(hidden, width, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        change: torch.Tensor = self.fall(nn.functional.gelu(self.rise(self.norm(x))))
        return x + change


def build(shape: Shape) -> nn.Sequential:
    """The blocks, initialised as torch does it."""
    return nn.Sequential(*(Block(shape.width, shape.hidden) for _ in range(shape.num_blocks))).eval()


def tokens(count: int, width: int) -> torch.Tensor:
    """The input: (count, width) bfloat16, the same in every process."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(7)).bfloat16()


def num_bytes_of(module: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def write(module: nn.Module, path: Path) -> None:
    """Write the parameters as one safetensors file that lies on the disk, and not in the page cache."""
    save_file({name: p.detach() for name, p in module.named_parameters()}, path)
    drop_cached([path])


def drop_cached(paths: Iterable[Path]) -> None:
    """Let files be on the disk only: written out, and gone from the page cache."""
    if sys.platform != "linux":
        raise BenchError("files leave the page cache on demand on Linux only: run this benchmark there")
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class RawReads:
    """Direct reads of the first bytes of a file by some threads, into an arena as large as the memory for weights.

    A few small buffers would be no measure: on a virtual machine the rate into one page of memory can be twice that
    into another, and the best of several tries would find the best pages.
    """

    def __init__(self, path: Path, arena: mmap.mmap, chunk_bytes: int, num_threads: int) -> None:
        if sys.platform != "linux":
            raise BenchError("direct reads are measured on Linux only: run this benchmark there")
        self.chunk_bytes = chunk_bytes
        self.num_threads = num_threads
        self._arena = memoryview(arena)
        self._places = len(arena) // chunk_bytes
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def seconds(self, num_bytes: int) -> float:
        """Wall time of reading that many bytes, to the next whole chunk."""
        threads = [threading.Thread(target=self._read, args=(i, num_bytes)) for i in range(self.num_threads)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def _read(self, index: int, num_bytes: int) -> None:
        chunk = self.chunk_bytes
        for number in range(index, -(-num_bytes // chunk), self.num_threads):
            place = number % self._places * chunk
            os.preadv(self._fd, [self._arena[place : place + chunk]], number * chunk)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        self._arena.release()


def best_reads(path: Path, arena_bytes: int) -> RawReads:
    """The fastest of a few chunk sizes and numbers of threads."""
    num_bytes = min(TRIED_BYTES, path.stat().st_size)
    arena = private_memory(arena_bytes)  # of the kind that the runtime reads into
    for start in range(0, arena_bytes, CHUNKS[0]):
        arena[start : start + CHUNKS[0]] = bytes(min(CHUNKS[0], arena_bytes - start))  # there before the clock starts
    best, best_seconds = None, float("inf")
    for chunk_bytes in CHUNKS:
        for num_threads in THREADS:
            reads = RawReads(path, arena, chunk_bytes, num_threads)
            seconds = min(reads.seconds(num_bytes) for _ in range(3))
            if seconds < best_seconds:
                if best is not None:
                    best.close()
                best, best_seconds = reads, seconds
            else:
                reads.close()
    assert best is not None
    return best
