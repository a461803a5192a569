"""What Windows says of itself, read from the text of one PowerShell script; from WSL2 the host can be asked too."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from fmstream.core.reading import Unread

TIMEOUT_SECONDS: Final = 4.0

SCRIPT: Final = """
$ErrorActionPreference = 'Stop'
$found = @{}
function Ask($name, $block) { try { $found[$name] = & $block } catch { } }
Ask 'system' { Get-CimInstance Win32_OperatingSystem |
  Select-Object TotalVirtualMemorySize, FreeVirtualMemory, TotalVisibleMemorySize, FreePhysicalMemory }
Ask 'managed' { (Get-CimInstance Win32_ComputerSystem).AutomaticManagedPagefile }
Ask 'files' { @(Get-CimInstance Win32_PageFileUsage | Select-Object AllocatedBaseSize, CurrentUsage) }
Ask 'agent' { Get-MMAgent | Select-Object MemoryCompression }
Ask 'defender' { Get-MpComputerStatus | Select-Object RealTimeProtectionEnabled }
Ask 'exclusions' { @((Get-MpPreference).ExclusionPath) }
Ask 'adapters' { @(Get-CimInstance Win32_VideoController | Select-Object Name, DriverVersion) }
Ask 'memory' { @(Get-CimInstance Win32_PerfFormattedData_GPUPerformanceCounters_GPUAdapterMemory |
  Select-Object Name, DedicatedUsage, SharedUsage) }
Ask 'aspm' { (powercfg /query SCHEME_CURRENT SUB_PCIEXPRESS ASPM) -join "`n" }
Ask 'smi' { (nvidia-smi '--query-gpu=pci.bus_id,driver_model.current' '--format=csv,noheader') -join "`n" }
$found | ConvertTo-Json -Depth 4 -Compress
"""
"""Asks only; each question for itself, so that one that fails leaves the others.

Classes and properties have the same names in every language of Windows; ``powercfg`` and ``nvidia-smi`` are read by
their numbers and columns alone.
"""

_INDEX: Final = re.compile(r":\s*0x([0-9a-f]{1,8})\s*$", re.IGNORECASE | re.MULTILINE)
_MODELS: Final = ("WDDM", "TCC", "MCDM")


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """What all processes use of one graphics adapter: its own memory, and the host's that it reaches, in bytes."""

    name: str
    dedicated_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class WindowsFacts:
    """Answers of the script; `Unread` where it had none.

    Attributes:
        commit_limit_bytes, commit_free_bytes: memory that may be promised in all, and what is left of it.
        has_managed_page_file: whether Windows sizes the page file itself.
        page_file_bytes: size of all page files now.
        has_compression: whether pages are compressed in memory.
        has_defender: whether files are scanned when they are opened.
        exclusions: folders that are not scanned.
        link_saving: power saving of PCI Express on mains and on battery: 0 off, 1 moderate, 2 most.
        adapters: names of the graphics adapters.
        memory: use of each adapter's memory.
        driver_models: driver model by address on the bus.
    """

    commit_limit_bytes: int | Unread
    commit_free_bytes: int | Unread
    has_managed_page_file: bool | Unread
    page_file_bytes: int | Unread
    has_compression: bool | Unread
    has_defender: bool | Unread
    exclusions: tuple[str, ...] | Unread
    link_saving: tuple[int, int] | Unread
    adapters: tuple[str, ...] = ()
    memory: tuple[AdapterMemory, ...] = ()
    driver_models: dict[str, str] = field(default_factory=dict)


def ask_windows(*, from_wsl: bool = False) -> str | Unread:
    """Run the script and return its text."""
    if not from_wsl and sys.platform != "win32":
        return Unread("not on Windows")
    program = shutil.which("powershell.exe")
    if program is None:
        return Unread("powershell.exe is not found")
    command = [program, "-NoLogo", "-NoProfile", "-NonInteractive", "-Command", SCRIPT]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Unread(f"powershell.exe gave no answer in {TIMEOUT_SECONDS:.0f} s")
    except OSError as error:
        return Unread(f"powershell.exe: {error.strerror or type(error).__name__}")
    return done.stdout.decode("utf-8", errors="replace")


def parse_windows(text: str) -> WindowsFacts | Unread:
    """The facts in what the script printed."""
    try:
        document = json.loads(text.lstrip("\ufeff \r\n"))
    except (ValueError, RecursionError):
        return Unread("PowerShell printed no JSON")
    if not isinstance(document, dict):
        return Unread("PowerShell printed no JSON object")
    system = document.get("system")
    return WindowsFacts(
        commit_limit_bytes=_kibibytes(system, "TotalVirtualMemorySize"),
        commit_free_bytes=_kibibytes(system, "FreeVirtualMemory"),
        has_managed_page_file=_flag(document, "managed"),
        page_file_bytes=_page_files(document.get("files")),
        has_compression=_flag(document.get("agent"), "MemoryCompression"),
        has_defender=_flag(document.get("defender"), "RealTimeProtectionEnabled"),
        exclusions=_exclusions(document),
        link_saving=_link_saving(document.get("aspm")),
        adapters=tuple(str(a["Name"]) for a in _objects(document.get("adapters")) if a.get("Name")),
        memory=tuple(_memory(document.get("memory"))),
        driver_models=_driver_models(document.get("smi")),
    )


def _objects(value: Any) -> list[dict[str, Any]]:
    # PowerShell writes a list of one as the one, and some versions wrap lists in {"value": [...], "Count": n}.
    if isinstance(value, dict) and isinstance(value.get("value"), list):
        value = value["value"]
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _kibibytes(holder: Any, name: str) -> int | Unread:
    value = _number(holder.get(name)) if isinstance(holder, dict) else None
    return Unread(f"{name}: not told") if value is None else value * 1024


def _flag(holder: Any, name: str) -> bool | Unread:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, bool) else Unread(f"{name}: not told")


def _page_files(value: Any) -> int | Unread:
    sizes = [_number(item.get("AllocatedBaseSize")) for item in _objects(value)]
    known = [size for size in sizes if size is not None]
    return sum(known) << 20 if known else Unread("page file: not told")


def _exclusions(document: dict[str, Any]) -> tuple[str, ...] | Unread:
    value = document.get("exclusions")
    if isinstance(value, dict):
        value = value.get("value")
    if "exclusions" not in document or isinstance(value, int | float):
        return Unread("exclusions: not told")
    paths = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str) and item]
    if any(path.startswith("N/A") for path in paths):
        return Unread("exclusions: told to administrators only")
    return tuple(paths)


def _link_saving(text: Any) -> tuple[int, int] | Unread:
    # The text is in the language of Windows; its last two numbers are the settings on mains and on battery.
    found = _INDEX.findall(text) if isinstance(text, str) else []
    return (int(found[-2], 16), int(found[-1], 16)) if len(found) >= 2 else Unread("power saving: not told")


def _memory(value: Any) -> Iterator[AdapterMemory]:
    for item in _objects(value):
        dedicated, shared = _number(item.get("DedicatedUsage")), _number(item.get("SharedUsage"))
        if dedicated is not None and shared is not None:
            yield AdapterMemory(str(item.get("Name", "")), dedicated, shared)


def _driver_models(text: Any) -> dict[str, str]:
    from fmstream.doctor.pci import same_address

    found = {}
    for line in text.splitlines() if isinstance(text, str) else ():
        address, _, model = line.partition(",")
        if model.strip() in _MODELS and ":" in address:
            found[same_address(address)] = model.strip()
    return found
