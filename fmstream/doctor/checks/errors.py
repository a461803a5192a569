"""Checks 16 and 17: whether the link repeats packets or reports errors."""

from __future__ import annotations

from typing import Final

from fmstream.core.reading import Unread
from fmstream.doctor.checks.check import per_card
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.measured import Load, correctable_errors
from fmstream.doctor.pci import replay_limit
from fmstream.doctor.system import System
from fmstream.doctor.verdict import Result, fail, info, not_here, ok, unknown, warn

TOPIC: Final = "link"

HARMLESS: Final = frozenset({"UnsupReq"})
"""Reported when a device is asked for what it does not have, as at every start."""

RESEAT: Final = "reseat the card; try another slot, cable or riser"


@per_card(16, "replays", TOPIC)
def replays(system: System, gpu: Gpu) -> Result:
    """How many packets had to be sent again."""
    count = Unread("NVIDIA's library does not answer for it") if gpu.nvml is None else gpu.nvml.replays
    if isinstance(count, Unread):
        return unknown(str(count))
    load = system.load(gpu)
    if not isinstance(load, Load) or isinstance(load.replays, Unread) or load.seconds <= 0:
        if count == 0:
            return ok("none since the driver was loaded")
        return info(f"{count} since the driver was loaded; whether they rise under load was not seen")
    link = load.link
    if isinstance(link.generation, Unread) or isinstance(link.width, Unread) or not 1 <= link.generation <= 6:
        return info(f"{load.replays} in {load.seconds:.1f} s under load, {count} in all")
    allowed = replay_limit(link.generation, link.width)
    read, limit = f"{load.replays} in {load.seconds:.1f} s under load, {count} in all", f"{allowed} a minute for {link}"
    # A short look holds a small share of a minute's replays: two of them within it may still be chance.
    if load.replays > max(2.0, allowed * load.seconds / 60):
        return warn(read, limit, RESEAT)
    return ok(read, limit)


@per_card(17, "bus errors", TOPIC)
def bus_errors(system: System, gpu: Gpu) -> Result:
    """What the card and the ports above it have reported (PCI Express advanced error reporting)."""
    if not system.is_linux:
        return not_here("of Linux only")
    if gpu.pci is None:
        return unknown("the card is not on a bus that can be read")
    fatal, nonfatal = _sum(gpu, "fatal"), _sum(gpu, "nonfatal")
    if fatal is None and nonfatal is None and not correctable_errors(gpu):
        return unknown("the kernel keeps no counters of errors for it")
    if fatal:
        return fail(f"{_listed(fatal)} since boot, fatal", "0", RESEAT)
    serious = {name: count for name, count in (nonfatal or {}).items() if name.partition(" ")[0] not in HARMLESS}
    if serious:
        return warn(f"{_listed(serious)} since boot, not corrected", "0", RESEAT)
    load = system.load(gpu)
    risen = {} if isinstance(load, Unread) else {where: n for where, n in load.correctable.items() if n}
    if risen:
        return warn(f"{_listed(risen)} while it was under load, corrected", "0", RESEAT)
    known = {where: count for where, count in correctable_errors(gpu).items() if count}
    if known:
        rest = "none of them under load" if isinstance(load, Load) else "whether they rise was not seen"
        return info(f"{_listed(known)} since boot, corrected; {rest}")
    return ok("none since boot")


def _sum(gpu: Gpu, kind: str) -> dict[str, int] | None:
    """Errors of a kind that are not 0, by name and address; None if nobody tells."""
    found: dict[str, int] = {}
    told = False
    for device in (gpu.pci, *gpu.pci.above()) if gpu.pci is not None else ():
        counts = device.errors(kind)
        if not isinstance(counts, Unread):
            told = True
            found |= {f"{name} at {device.address}": count for name, count in counts.items() if count}
    return found if told else None


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name if ' at ' in name else f'at {name}'}" for name, count in counts.items())
