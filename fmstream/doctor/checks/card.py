"""Checks 21 to 26: the card's memory and its health."""

from __future__ import annotations

from typing import Final

from fmstream.core.reading import Unread
from fmstream.doctor.checks.check import per_card
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.measured import Load
from fmstream.doctor.nvml import AGGREGATE, CORRECTED, UNCORRECTED, VOLATILE, DeviceMemory
from fmstream.doctor.system import System
from fmstream.doctor.verdict import Result, fail, info, not_here, ok, unknown, warn
from fmstream.report.units import format_bytes

TOPIC: Final = "card"

FULL: Final = 0.9
"""Share of a card's memory above which it counts as used up."""
SPILLED: Final = 512 << 20
"""Host memory behind a card that is used up; less may be pinned memory and windows of the desktop."""

HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE, SW_POWER_CAP = 0x8, 0x20, 0x40, 0x80, 0x4
RAISED: Final = {HW_THERMAL: "too hot", HW_POWER_BRAKE: "power brake by the supply", HW_SLOWDOWN: "slowed by hardware"}
MILD: Final = {SW_THERMAL: "held at its temperature target", SW_POWER_CAP: "held at its power limit"}
"""Names of bits of NVML's clock event reasons.  The others, such as idle, say nothing of trouble."""

NEVER_CHIP: Final = "the fault is on the path to or in the memory; memory tests do not tell which part"


@per_card(21, "device memory", TOPIC)
def device_memory(system: System, gpu: Gpu) -> Result:
    """What is free on the card, and who holds the rest."""
    if gpu.torch is not None and gpu.torch.is_integrated:
        return not_here("shares the host's memory")
    memory = Unread("NVIDIA's library does not answer for it") if gpu.nvml is None else gpu.nvml.memory
    if isinstance(memory, Unread):
        if gpu.torch is not None and gpu.torch.total_bytes:
            return info(f"{format_bytes(gpu.torch.total_bytes)} in all, by torch; what is free is not told: {memory}")
        return unknown(str(memory))
    read = f"{format_bytes(memory.free)} free of {format_bytes(memory.total)}, {_rest(memory)}"
    wanted = system.wanted.memory_bytes
    if wanted is not None and wanted > memory.free:
        return warn(
            read,
            f"{format_bytes(wanted)}, as --memory says",
            'close what uses the card, or give less; memory="auto" takes what is free',
        )
    return info(read, "" if wanted is None else f"{format_bytes(wanted)}, as --memory says", _holders(gpu))


def _rest(memory: DeviceMemory) -> str:
    used = f"{format_bytes(memory.used)} used"
    if memory.reserved is None:
        return f"{used}, which counts what the driver keeps for itself"
    return f"{used}, {format_bytes(memory.reserved)} kept by the driver"


def _holders(gpu: Gpu) -> str:
    processes = Unread("NVIDIA's library does not answer for it") if gpu.nvml is None else gpu.nvml.process_bytes
    context = "each process takes 200 to 700 MB for its context, before it allocates anything"
    if isinstance(processes, Unread) or not processes:
        return context
    if any(used is None for used in processes):
        return f"{len(processes)} processes on it; how much each uses is not told here; {context}"
    return f"{len(processes)} processes on it hold {format_bytes(sum(u or 0 for u in processes))}; {context}"


@per_card(22, "spill to host", TOPIC)
def spill(system: System, gpu: Gpu) -> Result:
    """Whether the Windows driver moves device memory to RAM without a word, where everything is slow."""
    if not (system.is_windows or system.is_wsl):
        return not_here("of Windows only")
    remedy = "in NVIDIA's control panel, set CUDA sysmem fallback policy to 'Prefer no sysmem fallback'"
    if system.is_wsl:
        remedy += " (in Windows; WSL2 has been seen to ignore it), and keep within the card's memory"
    total = _total(gpu)
    if isinstance(system.windows, Unread) or not system.windows.memory or total is None:
        return info(
            "a tensor larger than the card may succeed here and lie in RAM; whether one does is not told", "", remedy
        )
    fullest = max(system.windows.memory, key=lambda memory: memory.dedicated_bytes)
    dedicated, shared = format_bytes(fullest.dedicated_bytes), format_bytes(fullest.shared_bytes)
    read = f"{dedicated} of the card's memory used, {shared} of RAM by all that use it"
    if fullest.dedicated_bytes >= FULL * total and fullest.shared_bytes >= SPILLED:
        return warn(read, f"{format_bytes(SPILLED)} of RAM while the card is full", remedy)
    return info(read, "", remedy)


def _total(gpu: Gpu) -> int | None:
    memory = None if gpu.nvml is None else gpu.nvml.memory
    if isinstance(memory, DeviceMemory):
        return memory.total
    return gpu.torch.total_bytes if gpu.torch is not None and gpu.torch.total_bytes else None


@per_card(23, "ECC", TOPIC)
def ecc(system: System, gpu: Gpu) -> Result:
    """Whether memory errors were seen that could not be corrected."""
    if gpu.nvml is None:
        return _without_library(gpu)
    mode = gpu.nvml.has_ecc
    if isinstance(mode, Unread):
        return info("not available on this card", advice="fmstream memtest --device cuda finds errors without it")
    if not mode:
        return info("off", advice="fmstream memtest --device cuda finds errors without it")
    now = gpu.nvml.ecc_errors(UNCORRECTED, VOLATILE)
    ever = gpu.nvml.ecc_errors(UNCORRECTED, AGGREGATE)
    corrected = gpu.nvml.ecc_errors(CORRECTED, VOLATILE)
    if isinstance(now, Unread):
        return unknown(str(now))
    if now:
        return fail(
            f"{now} uncorrected since the driver was loaded", "0", f"results may be wrong; reset it; {NEVER_CHIP}"
        )
    if not isinstance(ever, Unread) and ever:
        return warn(f"{ever} uncorrected in its life, none since the driver was loaded", "0", "see the next check")
    return ok("on, none uncorrected" + ("" if isinstance(corrected, Unread) else f", {corrected} corrected"))


@per_card(24, "replaced rows", TOPIC)
def replaced_rows(system: System, gpu: Gpu) -> Result:
    """Whether memory was taken out of use, waits for that, or could not be."""
    if gpu.nvml is None:
        return _without_library(gpu)
    rows = gpu.nvml.rows
    if isinstance(rows, Unread):
        pending = gpu.nvml.has_pending_pages
        if isinstance(pending, Unread):
            return info("not available on this card")
        if pending:
            return warn("pages wait to be retired", "none", "reset the card or restart the machine")
        return ok("no page waits to be retired")
    read = f"{rows.corrected + rows.uncorrected} rows replaced"
    if rows.has_failed:
        return fail(f"{read}; one could not be replaced", "every bad row replaced", "have the card exchanged")
    if rows.is_pending:
        return warn(f"{read}; one waits to be", "none waiting", "reset the card or restart the machine")
    return ok(read)


@per_card(25, "clocks", TOPIC)
def clocks(system: System, gpu: Gpu) -> Result:
    """Whether heat or power holds the clocks down."""
    if gpu.nvml is None:
        return _without_library(gpu)
    load = system.load(gpu)
    under_load = isinstance(load, Load) and not isinstance(load.reasons, Unread)
    reasons = load.reasons if isinstance(load, Load) and under_load else gpu.nvml.clock_reasons
    if isinstance(reasons, Unread):
        return unknown(str(reasons))
    when = "under load" if under_load else "now"
    raised = [name for bit, name in RAISED.items() if reasons & bit]
    if raised:
        return warn(
            f"{', '.join(raised)}, {when}", "none", "see to the card's cooling, its power cables and the supply"
        )
    mild = [name for bit, name in MILD.items() if reasons & bit]
    return info(f"{', '.join(mild)}, {when}") if mild else ok(f"not held down {when}")


@per_card(26, "temperature", TOPIC)
def temperature(system: System, gpu: Gpu) -> Result:
    """Whether the chip is as hot as where it slows itself down."""
    if gpu.nvml is None:
        return _without_library(gpu)
    load = system.load(gpu)
    heat = load.temperature if isinstance(load, Load) else Unread("not measured")
    if isinstance(heat, Unread):
        heat = gpu.nvml.temperature
    threshold = gpu.nvml.slowdown_temperature
    if isinstance(heat, Unread):
        return unknown(str(heat))
    if isinstance(threshold, Unread):
        return info(f"{heat} C; where it slows down is not told")
    if heat >= threshold:
        return warn(f"{heat} C", f"{threshold} C, where it slows down", "clean the fans, see to the air in the case")
    return ok(f"{heat} C", f"{threshold} C, where it slows down")


def _without_library(gpu: Gpu) -> Result:
    return unknown("NVIDIA's library does not answer for it") if gpu.is_nvidia else not_here("no NVIDIA card")
