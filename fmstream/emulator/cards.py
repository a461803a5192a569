"""Cards that can be emulated: memory, link and rates."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Final

from fmstream.errors import ConfigError

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """What the cost model knows of a card and its link.

    Attributes:
        name: what the device calls itself.
        memory_bytes: device memory.
        h2d_bytes_per_second, d2h_bytes_per_second: the link, from and to pinned host memory.
        pageable_bytes_per_second: either way, where host memory is not pinned.
        gemm_flops: floating-point operations per second of matrix products and convolutions in 16 bits.
        attention_flops: the same for fused attention.
        memory_bytes_per_second: device memory, reads and writes together.
        copy_engine_seconds: what a copy costs its engine beside its bytes.
        copy_seen_seconds: from a copy's end until other work sees it done; its engine is free meanwhile.
        launch_seconds, copy_launch_seconds: host time to enqueue a kernel, a copy.
        kernel_seconds: the least that a kernel takes on the device.
        segment_bytes: what the caching allocator takes from the card for small tensors; the sizes of other segments
            follow from it.
        queue_limit: operations of one stream that may be enqueued and not done; the host waits beyond.
    """

    name: str
    memory_bytes: int
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    pageable_bytes_per_second: float
    gemm_flops: float
    attention_flops: float
    memory_bytes_per_second: float
    copy_engine_seconds: float = 2e-6
    copy_seen_seconds: float = 10e-6
    launch_seconds: float = 4e-6
    copy_launch_seconds: float = 4e-6
    kernel_seconds: float = 2e-6
    queue_limit: int = 1024
    segment_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "h2d_bytes_per_second", "d2h_bytes_per_second", "pageable_bytes_per_second"):
            _above(self, field, 0)
        for field in ("gemm_flops", "attention_flops", "memory_bytes_per_second", "queue_limit", "segment_bytes"):
            _above(self, field, 0)
        for field in ("copy_engine_seconds", "copy_seen_seconds", "launch_seconds", "copy_launch_seconds"):
            _above(self, field, -1e-300)
        _above(self, "kernel_seconds", -1e-300)


def _above(card: Card, field: str, least: float) -> None:
    value = getattr(card, field)
    if not value > least:
        raise ConfigError(f"{card.name}: {field}={value!r} must be {'above 0' if least == 0 else 'at least 0'}")


_RTX4060: Final = Card(
    name="NVIDIA GeForce RTX 4060",
    memory_bytes=8 * GIB,
    h2d_bytes_per_second=13e9,
    d2h_bytes_per_second=13e9,
    pageable_bytes_per_second=5.2e9,
    gemm_flops=45e12,
    attention_flops=34e12,
    memory_bytes_per_second=272e9,
)

CARDS: Final[dict[str, Card]] = {
    "rtx4060": _RTX4060,
    "rtx4070-laptop": replace(
        _RTX4060,
        name="NVIDIA GeForce RTX 4070 Laptop GPU",
        gemm_flops=40e12,
        attention_flops=30e12,
        memory_bytes_per_second=256e9,
    ),
    "rtx3090": Card(
        name="NVIDIA GeForce RTX 3090",
        memory_bytes=24 * GIB,
        h2d_bytes_per_second=25e9,
        d2h_bytes_per_second=25e9,
        pageable_bytes_per_second=8e9,
        gemm_flops=62e12,
        attention_flops=50e12,
        memory_bytes_per_second=936e9,
    ),
    "rtx4090": Card(
        name="NVIDIA GeForce RTX 4090",
        memory_bytes=24 * GIB,
        h2d_bytes_per_second=25e9,
        d2h_bytes_per_second=25e9,
        pageable_bytes_per_second=10e9,
        gemm_flops=150e12,
        attention_flops=120e12,
        memory_bytes_per_second=1008e9,
    ),
    "rtx5090": Card(
        name="NVIDIA GeForce RTX 5090",
        memory_bytes=32 * GIB,
        h2d_bytes_per_second=52e9,
        d2h_bytes_per_second=52e9,
        pageable_bytes_per_second=12e9,
        gemm_flops=200e12,
        attention_flops=160e12,
        memory_bytes_per_second=1792e9,
    ),
    "h200": Card(
        name="NVIDIA H200",
        memory_bytes=140 * GIB,
        h2d_bytes_per_second=52e9,
        d2h_bytes_per_second=52e9,
        pageable_bytes_per_second=12e9,
        gemm_flops=700e12,
        attention_flops=550e12,
        memory_bytes_per_second=4800e9,
    ),
    "usb-dock": replace(
        _RTX4060,
        name="NVIDIA GeForce RTX 4060 in a USB4 dock",
        h2d_bytes_per_second=2.7e9,
        d2h_bytes_per_second=2.5e9,
        pageable_bytes_per_second=2.0e9,
    ),
}
"""Estimates, uncalibrated: none was measured on the card it names.

Memory sizes and rates are the makers' figures.  Links are what PCIe gives to pinned copies of some megabytes, about
four fifths of the raw rate: 4.0 x8 13 GB/s, 4.0 x16 25, 5.0 x16 52, a USB4 tunnel of 32 Gbit/s 2.5-2.7.  Pageable
copies are held up by the host's copy into a pinned buffer.  Matrix products are set at 60-85 % of the dense 16-bit peak
with 32-bit sums, fused attention at about 0.75-0.8 of that.
"""


def card(name: str) -> Card:
    """The card of that name.  Raises ConfigError that names the nearest one."""
    found = CARDS.get(name)
    if found is None:
        near = [key for key in CARDS if key.startswith(str(name))]
        near = near or difflib.get_close_matches(str(name), CARDS, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no card is called {name!r}: {hint}There are {', '.join(CARDS)}; or give a Card of your own")
    return found
