"""What tests of the emulated machine share: a card of round figures, and short ways to enqueue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fmstream.emulator.allocator import Block
from fmstream.emulator.cards import Card
from fmstream.emulator.machine import Machine

MIB = 1 << 20

ROUND = Card(
    name="round",
    memory_bytes=64 * MIB,
    h2d_bytes_per_second=1e9,
    d2h_bytes_per_second=5e8,
    pageable_bytes_per_second=2.5e8,
    gemm_flops=1e12,
    attention_flops=5e11,
    memory_bytes_per_second=1e10,
)


def machine(**options: Any) -> Machine:
    """A machine of the round card; the options are those of ``Machine``."""
    return Machine(options.pop("card", ROUND), **options)


def span(block: Block, start: int = 0, num_bytes: int | None = None) -> tuple[int, int]:
    """Bytes of a block, all of those from ``start`` on if no number is given."""
    return block.address + start, block.nbytes - start if num_bytes is None else num_bytes


def kernel(
    on: Machine,
    stream: int = 0,
    *,
    reads: tuple[tuple[int, int], ...] = (),
    writes: tuple[tuple[int, int], ...] = (),
    seconds: float = 1.0,
    run: Callable[[], object] | None = None,
    name: str = "kernel",
    launch: float = 0.0,
) -> float:
    """Enqueue a kernel."""
    return on.submit(stream, name, "compute", seconds, run, reads, writes, launch_seconds=launch)


def copy_in(
    on: Machine,
    stream: int = 0,
    *,
    reads: tuple[tuple[int, int], ...] = (),
    writes: tuple[tuple[int, int], ...] = (),
    seconds: float = 1.0,
    seen: float = 0.0,
    run: Callable[[], object] | None = None,
    **options: Any,
) -> float:
    """Enqueue a copy to the device."""
    return on.submit(stream, "copy", "copy in", seconds, run, reads, writes, seen_seconds=seen, **options)


def copy_out(
    on: Machine,
    stream: int = 0,
    *,
    reads: tuple[tuple[int, int], ...] = (),
    writes: tuple[tuple[int, int], ...] = (),
    seconds: float = 1.0,
    run: Callable[[], object] | None = None,
    **options: Any,
) -> float:
    """Enqueue a copy to the host."""
    return on.submit(stream, "copy", "copy out", seconds, run, reads, writes, **options)
