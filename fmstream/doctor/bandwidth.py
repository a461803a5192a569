"""``fmstream bandwidth``: how fast link, memory and disk are by size of copy, beside what the link could carry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from fmstream.config import parse_size
from fmstream.core.calibration import Calibration
from fmstream.core.reading import Unread
from fmstream.device.accelerator import Accelerator
from fmstream.device.opening import device_name, open_device
from fmstream.doctor.gpus import find_gpus
from fmstream.doctor.host_rates import RAM, UNCACHED, disk_rates, find_file, ram_rate
from fmstream.doctor.nvml import Nvml
from fmstream.doctor.pci import Link, link_rate
from fmstream.doctor.rates import Rate
from fmstream.doctor.timed_copies import PAGEABLE_IN, PINNED_IN, PINNED_OUT, TimedCopies
from fmstream.doctor.torch_facts import read_torch
from fmstream.payloads.budget import available_bytes
from fmstream.report.units import format_bytes

SCHEMA: Final = 1
MIB: Final = 1 << 20
SIZES: Final = (64 << 10, 256 << 10, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 512 * MIB)
RAM_ROOM: Final = 4
"""Buffers on the host take at most this part of its free memory."""

LookAtLink = Callable[[], Link]
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BandwidthResult:
    """What was measured.

    Attributes:
        device: as torch names it, and ``device_name`` as its maker does.
        rates: by kind of copy and size.
        costs: what each copy costs beside its bytes: seconds on the link, and until compute sees it.
        links: the link at each look while copies were under way, the first and the last; none where it is not read.
        file: what was read, None where nothing was to be.
    """

    device: str
    device_name: str
    rates: tuple[Rate, ...]
    costs: tuple[float, float]
    links: tuple[Link, ...] = ()
    file: str | None = None

    def largest(self, what: str) -> Rate | None:
        """The rate of a kind of copy at its largest size; None where it was not measured."""
        found = [rate for rate in self.rates if rate.what == what]
        return max(found, key=lambda rate: rate.num_bytes, default=None)

    @property
    def theoretical(self) -> float | None:
        """Bytes a second that the link could carry one way, as it was seen last; None where it was not read."""
        if not self.links:
            return None
        link = self.links[-1]
        if isinstance(link.generation, Unread) or isinstance(link.width, Unread):
            return None
        return link_rate(link.generation, link.width)

    def share(self, rate: Rate) -> float | None:
        """Of what the link could carry, for copies over it."""
        limit = self.theoretical
        return None if limit is None or "the device" not in rate.what else rate.median / limit

    def calibration(self) -> Calibration:
        """What plans are made with."""

        def median(what: str) -> float | None:
            rate = self.largest(what)
            return None if rate is None else rate.median

        return Calibration(
            device=self.device_name,
            ram_bytes_per_second=median(RAM),
            h2d_bytes_per_second=median(PINNED_IN),
            d2h_bytes_per_second=median(PINNED_OUT),
            pageable_bytes_per_second=median(PAGEABLE_IN),
            latency_seconds=self.costs[0],
            seen_seconds=self.costs[1],
            disk_bytes_per_second=median(UNCACHED),
        )

    def to_dict(self) -> dict[str, Any]:
        """In JSON types; rates are bytes a second."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "device_name": self.device_name,
            "rates": [{**rate.to_dict(), "share_of_theoretical": self.share(rate)} for rate in self.rates],
            "latency_seconds": self.costs[0],
            "seen_seconds": self.costs[1],
            "link_before": _link_dict(self.links[:1]),
            "link_after": _link_dict(self.links[-1:]),
            "theoretical": self.theoretical,
            "file": self.file,
        }

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def _link_dict(links: tuple[Link, ...]) -> dict[str, int | None] | None:
    if not links:
        return None
    (link,) = links
    values = {"generation": link.generation, "width": link.width}
    return {name: None if isinstance(value, Unread) else value for name, value in values.items()}


def run_bandwidth(
    device: str | None = None,
    *,
    largest: int | str = SIZES[-1],
    path: str | os.PathLike[str] | None = None,
    host: bool = True,
    look: LookAtLink | None = None,
    show: Show | None = None,
) -> BandwidthResult:
    """Measure copies of all sizes, and reads of a file.

    Args:
        device: "cpu", "cuda", ...; None is the CUDA card where there is one.
        largest: bytes of the largest copy.
        path: a file to read, or a folder whose largest file is read; None reads none.
        host: whether copies within the host's memory are measured too.
        look: reads the link of the device; None finds it on this machine.
        show: told what is being measured.

    Raises:
        ConfigError: an option cannot be used.
        MemoryBudgetError: there is no room, or the driver pins nothing.
    """
    opened = open_device(device)
    most = parse_size(largest, name="largest")
    file = None if path is None else find_file(path)
    tell = show or (lambda _: None)
    rates: list[Rate] = []
    links: list[Link] = []
    costs = (0.0, 0.0)
    if isinstance(opened, Accelerator):
        with link_of(opened, look) as see, closing(TimedCopies(opened, most, _keep_ends(links, see))) as copies:
            for size in sizes_up_to(copies.largest):
                tell(f"copies of {format_bytes(size)}")
                rates += copies.rates(size)
        probed = opened.probe(torch.zeros(4 * MIB, dtype=torch.uint8, device=opened.torch_device))
        costs = probed.latency_seconds, probed.seen_seconds
    for size in sizes_up_to(min(most, max(1, available_bytes() // RAM_ROOM))) if host else ():
        tell(f"host memory, {format_bytes(size)}")
        rates.append(ram_rate(size))
    if file is not None:
        tell(f"reads of {file}")
        rates += disk_rates(file)
    name = device_name(opened)
    return BandwidthResult(
        str(opened.torch_device), name, tuple(rates), costs, tuple(links), None if file is None else os.fspath(file)
    )


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """The usual sizes that are no larger, or that one size where all are."""
    return tuple(size for size in SIZES if size <= largest) or (largest,)


def _keep_ends(links: list[Link], look: LookAtLink | None) -> Callable[[], None]:
    """Keeps the first look and the last one."""

    def take() -> None:
        if look is not None:
            del links[1:]
            links.append(look())

    return take


@contextmanager
def link_of(device: Accelerator, look: LookAtLink | None = None) -> Iterator[LookAtLink | None]:
    """What reads the link of a device: what was given, else what this machine has; None where it knows no link."""
    nvml = Nvml()
    try:
        for gpu in find_gpus(Path("/sys"), nvml, read_torch()):
            place = None if gpu.torch is None else (gpu.torch.kind, gpu.torch.index)
            if look is None and place == (device.torch_device.type, device.torch_device.index):
                look = partial(getattr, gpu, "link")
        yield look
    finally:
        nvml.close()
