"""Checks 12 to 15, 33 and 34: what has to be tried out."""

from __future__ import annotations

from typing import Final

from fmstream.core.reading import Unread
from fmstream.doctor.checks.check import Check, per_card
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.measured import LinkRates, Load
from fmstream.doctor.pci import Link, link_rate
from fmstream.doctor.system import System
from fmstream.doctor.verdict import Result, fail, info, ok, unknown, warn
from fmstream.report.units import format_bytes, format_rate, format_seconds, format_share

TOPIC: Final = "trials"

PIN_TRIAL: Final = 256 << 20
MAX_PIN_TRIAL: Final = 2 << 30
"""More would take seconds to lock."""
USABLE: Final = 0.8
"""Share of what could be pinned that should be counted on."""

GOOD, POOR = 0.80, 0.70
"""Shares of a link's raw rate: packet headers alone take some 10 to 20 % of it."""


@per_card(12, "pinned memory", TOPIC)
def pinned_memory(system: System, gpu: Gpu) -> Result:
    """How much host memory the driver locks: WSL2 and containers allow less than there is."""
    limit = _locked(system)
    if not system.wanted.is_measured or gpu.torch is None:
        why = "not measured, as --no-load says" if gpu.torch is not None else "torch does not see the card"
        return unknown(f"{why}; {limit}")
    pins = system.wanted.pins
    goal = PIN_TRIAL if pins is None else max(PIN_TRIAL, min(pins, MAX_PIN_TRIAL, _half_free(system)))
    pinned = system.probes.pin(gpu, goal)
    if isinstance(pinned, Unread):
        return unknown(f"not tried: {pinned}; {limit}")
    if not pinned.was_refused:
        return ok(f"{format_bytes(pinned.num_bytes)} tried, all of it pinned; {limit}")
    usable = int(pinned.num_bytes * USABLE)
    read = f"{format_bytes(pinned.num_bytes)} pinned, then refused; {limit}"
    against = f"{format_bytes(goal)} tried" if pins is None else f"{format_bytes(pins)} to be pinned"
    if pins is not None and pins <= usable:
        return ok(read, against)
    remedy = f"pinned={_spelled(usable)} keeps within it: the rest is copied through staging"
    if system.is_wsl:
        remedy += "; the driver limits pinned memory in WSL2, which reads as out of memory while the card has room"
    elif limit.startswith("ulimit -l is"):
        remedy += "; raising ulimit -l may help"
    return warn(read, against, remedy)


def _locked(system: System) -> str:
    limit = system.locked_limit()
    if isinstance(limit, Unread):
        return f"locked memory: {limit}"
    return "no limit on locked memory" if limit is None else f"ulimit -l is {format_bytes(limit)}"


def _half_free(system: System) -> int:
    memory = system.free_memory
    return MAX_PIN_TRIAL if isinstance(memory, Unread) else memory[1] // 2


def _spelled(num_bytes: int) -> str:
    return f'"{max(1, num_bytes >> 20)}MiB"'


@per_card(13, "copies, pinned", TOPIC)
def pinned_copies(system: System, gpu: Gpu) -> Result:
    """How fast pinned memory is copied, beside what the link could carry."""
    rates = _rates(system, gpu)
    if isinstance(rates, Unread):
        return unknown(str(rates))
    read = f"{format_rate(rates.pinned_in)} in, {format_rate(rates.pinned_out)} out"
    link = _link_of(system, gpu)
    if isinstance(link.generation, Unread) or isinstance(link.width, Unread) or not 1 <= link.generation <= 6:
        return info(f"{read}; what the link could carry is not told")
    most = link_rate(link.generation, link.width)
    share = min(rates.pinned_in, rates.pinned_out) / most
    limit = f"{format_rate(most)} is the raw rate of {link}; {format_share(share)} of it"
    if share < POOR:
        return warn(
            read,
            limit,
            "see the checks of link, NUMA node and clocks; fmstream bandwidth shows it by size of copy",
        )
    return ok(read, limit) if share >= GOOD else info(read, limit)


@per_card(14, "copies, pageable", TOPIC)
def pageable_copies(system: System, gpu: Gpu) -> Result:
    """What is lost where host memory is not pinned."""
    rates = _rates(system, gpu)
    if isinstance(rates, Unread):
        return unknown(str(rates))
    if rates.pageable_in is None:
        return unknown("not measured")
    read = f"{format_rate(rates.pageable_in)} in"
    if rates.pageable_out is not None:
        read += f", {format_rate(rates.pageable_out)} out"
    share = rates.pageable_in / rates.pinned_in if rates.pinned_in else 0.0
    return info(f"{read}: {format_share(share)} of pinned")


@per_card(15, "copies, both ways", TOPIC)
def both_ways(system: System, gpu: Gpu) -> Result:
    """How fast copies are while others go the other way; each direction is counted for itself."""
    rates = _rates(system, gpu)
    if isinstance(rates, Unread):
        return unknown(str(rates))
    if rates.both_in is None or rates.both_out is None:
        return unknown("not measured")
    return info(
        f"{format_rate(rates.both_in)} in and {format_rate(rates.both_out)} out at once, each direction for itself"
    )


def _rates(system: System, gpu: Gpu) -> LinkRates | Unread:
    load = system.load(gpu)
    return load.rates if isinstance(load, Load) else load


def _link_of(system: System, gpu: Gpu) -> Link:
    load = system.load(gpu)
    link = load.link if isinstance(load, Load) else gpu.best_link
    # A link that was not seen while it was busy is judged by what it could be.
    return gpu.best_link if isinstance(link.generation, Unread) or isinstance(link.width, Unread) else link


@per_card(33, "memory trial", TOPIC)
def memory_trial(system: System, gpu: Gpu) -> Result:
    """Whether some of the card's memory gives back what was written to it."""
    if not system.wanted.is_measured:
        return unknown("not measured, as --no-load says")
    if gpu.torch is None:
        return unknown("not measured: torch does not see the card")
    check = system.probes.memory_check(gpu)
    if isinstance(check, Unread):
        return unknown(str(check), "fmstream memtest tests as much as is free")
    read = f"{format_bytes(check.num_bytes)} in {format_seconds(check.seconds)}"
    if check.errors:
        seen = f": {check.summary}" if check.summary else ""
        return fail(
            f"{check.errors} wrong words in {read}{seen}",
            "0",
            "a fault on the memory path (memory, its controller, power or board): fmstream memtest tells more",
        )
    return ok(f"no error in {read}", advice="")


def _round_trip(system: System, gpu: Gpu | None) -> Result:
    where = "the CPU" if gpu is None else gpu.name
    if gpu is not None and not system.wanted.is_measured:
        return unknown("not measured, as --no-load says")
    trip = system.probes.round_trip(gpu)
    if isinstance(trip, Unread):
        return unknown(f"a small model did not stream on {where}: {trip}")
    read = f"a small model on {where}, {format_bytes(trip.streamed_bytes)} streamed"
    if not trip.is_equal:
        return fail(
            f"{read}: its output differs from the unstreamed run's",
            "equal bit for bit",
            "run fmstream memtest; if it finds nothing, report this with what fmstream env prints",
        )
    return ok(f"{read}: output equal to the unstreamed run's, bit for bit")


def _on_machine(system: System) -> Result:
    return _round_trip(system, None)


def _on_card(system: System, gpu: Gpu) -> Result:
    return _round_trip(system, None if gpu.torch is None else gpu)


round_trip = Check(34, "streaming", TOPIC, of_machine=_on_machine, of_card=_on_card)
"""Whether a small model that streams gives what it gives unstreamed: on each card, or on the CPU."""
