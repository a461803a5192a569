"""What has to be tried out on a card: pins, copies, memory, a small streamed model, a build of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from fmstream.core.reading import Unread
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.pci import Link


@dataclass(frozen=True, slots=True)
class Pinned:
    """Host memory that the driver locked in a trial, in bytes, and whether it refused more."""

    num_bytes: int
    was_refused: bool


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Medians of large copies in bytes a second; with both at once each direction is counted for itself."""

    pinned_in: float
    pinned_out: float
    pageable_in: float | None = None
    pageable_out: float | None = None
    both_in: float | None = None
    both_out: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """A short test of a card's memory: bytes that were written and read, words that came back wrong, what was seen."""

    num_bytes: int
    errors: int
    seconds: float
    summary: str = ""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A small model streamed on a device: whether its output was the unstreamed one, bit for bit."""

    is_equal: bool
    streamed_bytes: int


@dataclass(frozen=True, slots=True)
class Build:
    """Machine code that was built for a card: names of the sources, and the compiler's version."""

    sources: tuple[str, ...]
    compiler: str


class Probes(Protocol):
    """Trials on this machine; each says why where it could not be made."""

    def pin(self, gpu: Gpu, num_bytes: int) -> Pinned | Unread:
        """Lock so much host memory for a moment, as far as the driver lets."""

    def link_rates(self, gpu: Gpu, sample: Callable[[], None]) -> LinkRates | Unread:
        """Copy to and from a card, and call ``sample`` while copies are under way."""

    def memory_check(self, gpu: Gpu) -> MemoryCheck | Unread:
        """Write and read back some memory of a card."""

    def round_trip(self, gpu: Gpu | None) -> RoundTrip | Unread:
        """Stream a small model on a card, or on the CPU."""

    def build(self, architecture: str) -> Build | Unread:
        """Build the kernels for an architecture, as "sm_89"."""


@dataclass(slots=True)
class Load:
    """What a card did while copies were under way.

    Attributes:
        rates: how fast they were.
        seconds: how long it took in all.
        links: the link at each look.
        states: performance state at each look.
        reasons: clock reasons at any of the looks, their bits together.
        temperature: the highest that was seen.
        replays: packets sent again meanwhile.
        correctable: errors corrected meanwhile by the address of who reported them.
    """

    rates: LinkRates | Unread = field(default_factory=lambda: Unread("not measured"))
    seconds: float = 0.0
    links: list[Link] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    reasons: int | Unread = field(default_factory=lambda: Unread("not read"))
    temperature: int | Unread = field(default_factory=lambda: Unread("not read"))
    replays: int | Unread = field(default_factory=lambda: Unread("not read"))
    correctable: dict[str, int] = field(default_factory=dict)

    @property
    def link(self) -> Link:
        """The fastest that the link was seen at."""
        generations = [link.generation for link in self.links if not isinstance(link.generation, Unread)]
        widths = [link.width for link in self.links if not isinstance(link.width, Unread)]
        return Link(
            max(generations, default=Unread("not seen under load")), max(widths, default=Unread("not seen under load"))
        )

    def look(self, gpu: Gpu) -> None:
        """Take a look at the card."""
        self.links.append(gpu.link)
        if gpu.nvml is None:
            return
        state, reasons, heat = gpu.nvml.performance_state, gpu.nvml.clock_reasons, gpu.nvml.temperature
        if not isinstance(state, Unread):
            self.states.append(state)
        if not isinstance(reasons, Unread):
            self.reasons = reasons | (0 if isinstance(self.reasons, Unread) else self.reasons)
        if not isinstance(heat, Unread):
            self.temperature = heat if isinstance(self.temperature, Unread) else max(heat, self.temperature)


def put_under_load(gpu: Gpu, probes: Probes) -> Load:
    """Copy to and from a card, and look at it meanwhile; counters are read before and after."""
    load = Load()
    replays, errors = _replays(gpu), correctable_errors(gpu)
    begun = perf_counter()
    load.rates = probes.link_rates(gpu, lambda: load.look(gpu))
    load.seconds = perf_counter() - begun
    after = _replays(gpu)
    if not isinstance(replays, Unread) and not isinstance(after, Unread):
        load.replays = max(0, after - replays)
    later = correctable_errors(gpu)
    load.correctable = {
        address: max(0, later[address] - count) for address, count in errors.items() if address in later
    }
    return load


def _replays(gpu: Gpu) -> int | Unread:
    return Unread("NVIDIA's library does not answer for it") if gpu.nvml is None else gpu.nvml.replays


def correctable_errors(gpu: Gpu) -> dict[str, int]:
    """Corrected errors since boot of the card and the ports above it, by address; those that tell."""
    if gpu.pci is None:
        return {}
    found = {}
    for device in (gpu.pci, *gpu.pci.above()):
        counts = device.errors("correctable")
        if not isinstance(counts, Unread):
            found[device.address] = sum(counts.values())
    return found
