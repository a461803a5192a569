"""The cost model: seconds of kernels and copies, from shapes alone."""

from __future__ import annotations

from fmstream.emulator.cards import Card


def kernel_seconds(card: Card, num_bytes: float, gemm_flops: float = 0.0, attention_flops: float = 0.0) -> float:
    """Seconds of a kernel: a fixed floor, and the greater of arithmetic and device memory.

    ``num_bytes`` are those that it reads and writes.  This is the roofline of Williams, Waterman and Patterson (2009),
    with a rate for attention apart.
    """
    arithmetic = gemm_flops / card.gemm_flops + attention_flops / card.attention_flops
    return card.kernel_seconds + max(arithmetic, num_bytes / card.memory_bytes_per_second)


def copy_seconds(card: Card, lane: str, num_bytes: float, *, pinned: bool) -> float:
    """Seconds for which a copy over the link holds its engine; ``lane`` is "copy in" or "copy out"."""
    rate = card.h2d_bytes_per_second if lane == "copy in" else card.d2h_bytes_per_second
    if not pinned:
        rate = min(rate, card.pageable_bytes_per_second)
    return card.copy_engine_seconds + num_bytes / rate
