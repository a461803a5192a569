"""PCI devices as sysfs shows them: links, the path to the root, errors, windows into memory.  Needs no root."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fmstream.core.reading import Unread, names_in, read_int, read_text

NVIDIA: Final = 0x10DE
AMD: Final = 0x1002
DISPLAY: Final = 0x03
"""Base class of display controllers (PCI Code and ID Assignment, section 1.4)."""

WIDTHS: Final = (1, 2, 4, 8, 12, 16, 32)
GENERATIONS: Final = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
SPEEDS: Final = {generation: speed for speed, generation in GENERATIONS.items()}
RESIZE_UNIT: Final = 1 << 20

_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE | re.ASCII)
_SPEED: Final = re.compile(r"(\d{1,3}(?:\.\d)?) GT/s\b", re.ASCII)


def encoding(speed: float) -> float:
    """Share of a lane's bits that carry data: 8b/10b to gen 2, 128b/130b to gen 5, 242/256 bytes of a flit in gen 6."""
    return 0.8 if speed <= 5 else 128 / 130 if speed <= 32 else 242 / 256


def link_rate(generation: int, width: int) -> float:
    """Bytes a second that a link could carry one way: GT/s x lanes x encoding / 8 (PCI Express Base 6.0, 4.2)."""
    speed = SPEEDS[generation]
    return speed * 1e9 * width * encoding(speed) / 8


def replay_limit(generation: int, width: int) -> int:
    """Replays a minute above which a link is suspect: the bit error rate allowed, as DCGM's health check counts it."""
    return math.ceil(SPEEDS[generation] * 0.06 * width)


@dataclass(frozen=True, slots=True)
class Link:
    """Generation and lanes of a link, as far as they could be read."""

    generation: int | Unread
    width: int | Unread

    def __str__(self) -> str:
        generation = "gen ?" if isinstance(self.generation, Unread) else f"gen {self.generation}"
        return f"{generation} x{'?' if isinstance(self.width, Unread) else self.width}"


def same_address(address: str) -> str:
    """An address in the spelling of sysfs: NVML writes the domain with eight digits."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One folder of ``/sys/bus/pci/devices``."""

    folder: Path

    @property
    def address(self) -> str:
        """Domain, bus, device and function, as "0000:01:00.0"."""
        return self.folder.name

    @property
    def vendor(self) -> int | Unread:
        """Number of the maker."""
        return read_int(self.folder / "vendor")

    @property
    def is_display(self) -> bool:
        """Whether it is a display controller, or a card without outputs."""
        code = read_int(self.folder / "class")
        return not isinstance(code, Unread) and code >> 16 == DISPLAY

    @property
    def driver(self) -> str | None:
        """Name of the kernel driver that is bound to it."""
        try:
            return (self.folder / "driver").readlink().name
        except OSError:
            return None

    @property
    def is_asleep(self) -> bool:
        """Whether the kernel has powered it off; its registers then read as ones."""
        return read_text(self.folder / "power/runtime_status") in ("suspended", "suspending")

    @property
    def is_removable(self) -> bool:
        """Whether it is outside the case, as in a Thunderbolt or USB4 dock."""
        return read_text(self.folder / "removable") == "removable"

    @property
    def link(self) -> Link:
        """The link above it as it runs now.  It may run slower when nothing is to be done."""
        return self._link("current")

    @property
    def max_link(self) -> Link:
        """The most that the device itself can do."""
        return self._link("max")

    def _link(self, which: str) -> Link:
        return Link(
            _generation(read_text(self.folder / f"{which}_link_speed"), which),
            _width(read_int(self.folder / f"{which}_link_width"), which),
        )

    @property
    def numa_node(self) -> int | Unread:
        """The node that its slot belongs to, -1 if the firmware does not say."""
        return read_int(self.folder / "numa_node")

    def bar_bytes(self, number: int) -> int | Unread:
        """Size of one window into the device's memory; 0 if it has none."""
        text = read_text(self.folder / "resource")
        if isinstance(text, Unread):
            return text
        try:
            start, end, _ = (int(value, 16) for value in text.splitlines()[number].split())
        except (IndexError, ValueError):
            return Unread(f"resource: line {number + 1} is no range")
        return end - start + 1 if end > start >= 0 else 0

    def bar_sizes(self, number: int) -> tuple[int, ...]:
        """Sizes that a window could have, smallest first (``resourceN_resize``: bit n stands for 2^n MiB)."""
        text = read_text(self.folder / f"resource{number}_resize")
        try:
            bits = 0 if isinstance(text, Unread) else int(text, 16)
        except ValueError:
            return ()
        return tuple(RESIZE_UNIT << bit for bit in range(43) if bits >> bit & 1)

    def errors(self, kind: str) -> dict[str, int] | Unread:
        """Errors that the device has reported since boot by name, of a kind: correctable, nonfatal or fatal."""
        text = read_text(self.folder / f"aer_dev_{kind}")
        if isinstance(text, Unread):
            return text
        counts = {}
        for line in text.splitlines():
            name, _, count = line.strip().rpartition(" ")
            if name and count.isdecimal() and count.isascii() and len(count) < 20 and not name.startswith("TOTAL"):
                counts[name.strip()] = int(count)
        return counts or Unread(f"aer_dev_{kind}: no counters in it")

    def above(self) -> Iterator[PciDevice]:
        """The ports between it and the root, nearest first."""
        try:
            parents = self.folder.resolve().parents
        except (OSError, RuntimeError):
            return
        for folder in parents:
            if not _ADDRESS.fullmatch(folder.name):
                return
            yield PciDevice(folder)


def pci_devices(sysfs: Path) -> list[PciDevice]:
    """All devices on the bus, by address."""
    folder = sysfs / "bus/pci/devices"
    return [PciDevice(folder / name) for name in names_in(folder) if _ADDRESS.fullmatch(name)]


def _generation(text: str | Unread, which: str) -> int | Unread:
    if isinstance(text, Unread):
        return text
    match = _SPEED.match(text)
    if match is None or float(match[1]) not in GENERATIONS:
        return Unread(f"{which}_link_speed: {text[:40]!r} is no speed of a link")
    return GENERATIONS[float(match[1])]


def _width(value: int | Unread, which: str) -> int | Unread:
    if isinstance(value, Unread) or value in WIDTHS:
        return value
    if value == 63:
        return Unread(f"{which}_link_width: 63, all bits set: the device does not answer")
    return Unread(f"{which}_link_width: {value} is no width of a link")
