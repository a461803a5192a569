"""Checks 9 to 11 and 18 to 20: how the card is connected."""

from __future__ import annotations

from typing import Final

from fmstream.core.reading import Unread, read_text
from fmstream.doctor.checks.check import per_card, per_machine
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.measured import Load
from fmstream.doctor.pci import Link, PciDevice, link_rate
from fmstream.doctor.system import System
from fmstream.doctor.verdict import Result, info, not_here, ok, unknown, warn
from fmstream.report.units import format_bytes, format_rate

TOPIC: Final = "link"

FULL_CLOCKS: Final = 0
SMALL_WINDOW: Final = 256 << 20
BAR1: Final = 1
USUAL_LANES: Final = 16

SAVING_MODES: Final = {0: "off", 1: "moderate", 2: "most"}


@per_card(9, "link width", TOPIC)
def link_width(system: System, gpu: Gpu) -> Result:
    """Whether all lanes of the card are in use."""
    width, own = _seen(system, gpu).width, gpu.own_link.width
    if isinstance(width, Unread):
        return unknown(f"not readable: {width}", "" if not gpu.is_asleep else "put the card to work and look again")
    if isinstance(own, Unread):
        return _width_with_slot(gpu, width)
    if width >= own:
        return ok(f"x{width}", "all that the card has" + (" by design" if own < USUAL_LANES else ""))
    slot = gpu.slot_link.width
    if not isinstance(slot, Unread) and slot < own:
        return warn(f"x{width} of x{own}", f"x{own}; the slot has x{slot}", "move the card to a slot with more lanes")
    return warn(
        f"x{width} of x{own}",
        f"x{own}, which the card has" + ("" if isinstance(slot, Unread) else " and the slot too"),
        "reseat the card; clean its contacts; see in the firmware whether a second slot or an M.2 disk takes lanes",
    )


def _width_with_slot(gpu: Gpu, width: int) -> Result:
    both = gpu.best_link.width
    if isinstance(both, Unread):
        return info(f"x{width}; how many the card has is not told")
    if width < both:
        return warn(f"x{width} of x{both}", f"x{both}, which card and slot have together", "reseat the card")
    return ok(f"x{width}", "all that card and slot have together")


@per_card(10, "link generation", TOPIC)
def link_generation(system: System, gpu: Gpu) -> Result:
    """Whether the link runs at its full speed when there is something to do; idle it is slower by design."""
    best, own = gpu.best_link.generation, gpu.own_link.generation
    load = system.load(gpu)
    if isinstance(load, Load) and not isinstance(load.link.generation, Unread):
        return _generation_under_load(load.link.generation, best, own)
    before = Unread("not told") if gpu.nvml is None else gpu.nvml.performance_state
    generation = gpu.link.generation
    after = before if gpu.nvml is None else gpu.nvml.performance_state
    if isinstance(generation, Unread):
        return unknown(f"not readable: {generation}")
    if isinstance(best, Unread):
        return info(f"gen {generation}; what is possible is not told")
    if generation >= best:
        return ok(f"gen {generation}", _possible(best, own))
    if before == after == FULL_CLOCKS:
        return _generation_under_load(generation, best, own)
    state = "" if isinstance(after, Unread) else f" in state P{after}"
    return unknown(
        f"gen {generation} of {best} while idle{state}: a card slows its link when nothing is to be copied",
        "fmstream bandwidth reads it under load",
        _possible(best, own),
    )


def _generation_under_load(generation: int, best: int | Unread, own: int | Unread) -> Result:
    if isinstance(best, Unread):
        return info(f"gen {generation} under load; what is possible is not told")
    if generation >= best:
        return ok(f"gen {generation} under load", _possible(best, own))
    return warn(
        f"gen {generation} of {best} under load",
        _possible(best, own),
        "reseat the card; try it without a riser; see in the firmware which generation the slot is set to",
    )


def _possible(best: int, own: int | Unread) -> str:
    if not isinstance(own, Unread) and best < own:
        return f"gen {best}, for the slot; the card could do gen {own}"
    return f"gen {best}, the most that it can do"


@per_card(11, "path to the root", TOPIC)
def path_to_root(system: System, gpu: Gpu) -> Result:
    """Whether a link further up carries less than the card's own."""
    if not system.is_linux:
        return not_here("of Linux only")
    if gpu.pci is None:
        return unknown("the card is not on a bus that can be read")
    if gpu.pci.is_removable:
        return info(
            "outside the case, behind a tunnel whose ports report 2.5 GT/s whatever they carry",
            advice="fmstream bandwidth tells what the link carries",
        )
    own = _rate(gpu.own_link)
    if own is None:
        return unknown("the card's own link is not told")
    ports = list(gpu.pci.above())[1:]  # the first one shares the card's link, which other checks look at
    if not ports:
        return ok("straight at the root" if any(gpu.pci.above()) else "no port above the card")
    rates = {port: rate for port in ports if (rate := _rate(_steady(port))) is not None}
    if not rates:
        return unknown(f"{_counted(len(ports))} further up, whose links cannot be read")
    slowest = min(rates, key=lambda port: rates[port])
    if rates[slowest] >= own:
        return ok(f"{_counted(len(rates))} further up, none slower than the card")
    return warn(
        f"limited at {slowest.address}: {_steady(slowest)}, {format_rate(rates[slowest])} at most",
        f"{gpu.own_link}, {format_rate(own)} by the card",
        "move the card to a slot that is nearer to the processor or has more lanes",
    )


def _steady(port: PciDevice) -> Link:
    """Lanes in use with the generation that is possible: the present one may be that of an idle link."""
    now, best = port.link, port.max_link
    return Link(best.generation, best.width if isinstance(now.width, Unread) else now.width)


def _rate(link: Link) -> float | None:
    if isinstance(link.generation, Unread) or isinstance(link.width, Unread) or not 1 <= link.generation <= 6:
        return None
    return link_rate(link.generation, link.width)


def _counted(count: int) -> str:
    return "1 port" if count == 1 else f"{count} ports"


@per_machine(18, "link power saving", TOPIC)
def power_saving(system: System) -> Result:
    """Whether the system saves power on links, which costs time when one wakes up."""
    if system.is_windows:
        saving = system.windows if isinstance(system.windows, Unread) else system.windows.link_saving
        if isinstance(saving, Unread):
            return unknown(str(saving))
        mains, battery = (SAVING_MODES.get(mode, f"mode {mode}") for mode in saving)
        read = f"power plan: {mains} on mains, {battery} on battery"
        return ok(read) if saving[0] == 0 else info(read, advice="small copies may wait for the link to wake up")
    if not system.is_linux:
        return not_here("of Linux and Windows only")
    if system.is_wsl:
        return not_here("the host's affair")
    text = read_text(system.sysfs / "module/pcie_aspm/parameters/policy")
    if isinstance(text, Unread):
        return unknown(str(text))
    chosen = next((word.strip("[]") for word in text.split() if word.startswith("[")), None)
    if chosen is None:
        return unknown(f"no policy is marked in {text[:60]!r}")
    if chosen in ("powersave", "powersupersave"):
        return info(f"policy {chosen}", advice="small copies may wait for the link to wake up")
    return ok(f"policy {chosen}")


@per_card(19, "runtime power", TOPIC)
def runtime_power(system: System, gpu: Gpu) -> Result:
    """Whether the kernel has switched the card off."""
    if not system.is_linux:
        return not_here("of Linux only")
    if gpu.pci is None:
        return not_here("the card is not on a bus that can be read")
    status = read_text(gpu.pci.folder / "power/runtime_status")
    if isinstance(status, Unread):
        return unknown(str(status))
    if gpu.is_asleep:
        return unknown(f"{status}: its link cannot be read", "put the card to work and look again")
    return ok(status[:40])


@per_card(20, "BAR1", TOPIC)
def bar1(system: System, gpu: Gpu) -> Result:
    """How much of the card's memory the host can see at once; says nothing about how much memory there is."""
    window = Unread("NVIDIA's library does not answer for it") if gpu.nvml is None else gpu.nvml.bar1_bytes
    if isinstance(window, Unread) and gpu.pci is not None and gpu.is_nvidia:
        window = gpu.pci.bar_bytes(BAR1)
    if isinstance(window, Unread):
        return unknown(str(window))
    if window == 0:
        return unknown("no window is mapped", "the firmware left no room for it, or the card is off")
    read = f"window of {format_bytes(window)}"
    if window > SMALL_WINDOW:
        return ok(read, advice="")
    possible = () if gpu.pci is None else gpu.pci.bar_sizes(BAR1)
    more = f"; the card could map {format_bytes(possible[-1])}" if possible and possible[-1] > window else ""
    return info(
        f"{read}: resizable BAR is off{more}. It is a window, not the card's memory",
        advice="copies by the card's own engine do not need it",
    )


def _seen(system: System, gpu: Gpu) -> Link:
    """The link under load where it was looked at then, else as it is."""
    load = system.load(gpu)
    if isinstance(load, Load) and not isinstance(load.link.width, Unread):
        return load.link
    return gpu.link
