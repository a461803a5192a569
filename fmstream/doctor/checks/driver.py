"""Checks 1 to 6: the driver, where the machine runs, what the cards are."""

from __future__ import annotations

from typing import Final

from fmstream.core.reading import Unread, read_text
from fmstream.doctor.checks.check import per_card, per_machine
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.host import kernel_release
from fmstream.doctor.nvml import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    MCDM,
    NO_PACKAGE,
    RESET_REQUIRED,
    TCC,
    VERSION_MISMATCH,
    WDDM,
)
from fmstream.doctor.pci import NVIDIA, PciDevice, pci_devices
from fmstream.doctor.system import System
from fmstream.doctor.verdict import Result, fail, info, not_here, ok, unknown, warn

TOPIC: Final = "driver"

FAMILIES: Final = {
    (5, 0): "Maxwell",
    (5, 2): "Maxwell",
    (6, 0): "Pascal",
    (6, 1): "Pascal",
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 6): "Ampere",
    (8, 7): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
    (10, 3): "Blackwell",
    (12, 0): "Blackwell",
    (12, 1): "Blackwell",
}
"""Families by compute capability, as NVIDIA's table of CUDA cards has them."""

MODELS: Final = {WDDM: "WDDM", TCC: "TCC", MCDM: "MCDM"}
INSTALL_BINDINGS: Final = "pip install 'fmstream-runtime[cuda]', or nvidia-ml-py alone"


@per_machine(1, "driver", TOPIC)
def driver(system: System) -> Result:
    """Whether NVIDIA's driver is there and answers."""
    trouble = system.nvml.trouble
    if trouble is None:
        return _answering(system)
    on_bus = [device for device in pci_devices(system.sysfs) if device.vendor == NVIDIA and device.is_display]
    has_card = bool(on_bus) or _windows_names_nvidia(system)
    if trouble is NO_PACKAGE:
        if has_card:
            return unknown(f"{trouble}, so the driver was not asked", INSTALL_BINDINGS)
        return _no_card(system)
    if trouble.code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED):
        return _no_driver(on_bus) if has_card else _no_card(system)
    if trouble.code == VERSION_MISMATCH:
        return unknown("the driver does not answer its library; see the next check")
    if trouble.code in (GPU_IS_LOST, RESET_REQUIRED):
        return fail(str(trouble), "", "a card has fallen off the bus or wants a reset: restart the machine")
    return unknown(f"the library did not open: {trouble}", "run nvidia-smi and see what it says")


def _answering(system: System) -> Result:
    cards = [gpu for gpu in system.gpus if gpu.nvml is not None]
    version = system.nvml.driver_version
    named = "driver of unknown version" if isinstance(version, Unread) else f"driver {version}"
    silent = [gpu for gpu in system.gpus if gpu.is_nvidia and gpu.nvml is None and not _is_lent(gpu.pci)]
    names = ", ".join(gpu.name for gpu in cards) or "no card"
    if silent:
        places = ", ".join(gpu.address or gpu.name for gpu in silent)
        return warn(f"{named}, {names}; {places} does not answer", "every card answers", "see the kernel's log: dmesg")
    return ok(f"{named}, {names}") if cards else info(f"{named}, but it has no card")


def _windows_names_nvidia(system: System) -> bool:
    if not system.is_windows or isinstance(system.windows, Unread):
        return False
    return any("nvidia" in name.lower() for name in system.windows.adapters)


def _is_lent(device: PciDevice | None) -> bool:
    return device is not None and device.driver == "vfio-pci"


def _no_card(system: System) -> Result:
    if system.is_wsl:
        return info(
            "no NVIDIA library inside WSL2", advice="for a card, install NVIDIA's driver in Windows, none inside WSL2"
        )
    if not isinstance(system.torch, Unread) and system.torch.hip and system.torch.devices:
        return info("no NVIDIA card; torch drives an AMD card itself")
    return info("no NVIDIA card on this machine: models run on the CPU, their weights stream from disk")


def _no_driver(on_bus: list[PciDevice]) -> Result:
    bound = {device.driver for device in on_bus}
    where = ", ".join(device.address for device in on_bus) or "a card"
    if bound == {"vfio-pci"}:
        return info(f"{where} is lent to a virtual machine (vfio-pci)")
    if "nvidia" in bound:
        return fail(
            f"{where}: the kernel's driver is loaded, its library libnvidia-ml is not found",
            "both",
            "in a container, start it with the card (docker run --gpus all); else install the driver's user part",
        )
    held = f", held by {'/'.join(sorted(name for name in bound if name))}" if any(bound) else ""
    return fail(f"{where}: an NVIDIA card without NVIDIA's driver{held}", "a loaded driver", "install NVIDIA's driver")


@per_machine(2, "driver versions", TOPIC)
def driver_versions(system: System) -> Result:
    """Whether the driver in the kernel and its library are of one version."""
    trouble = system.nvml.trouble
    kernel = _kernel_version(system)
    if trouble is not None and trouble.code == VERSION_MISMATCH:
        of_kernel = "" if isinstance(kernel, Unread) else f"; the kernel has {kernel}"
        return fail(
            f"library and kernel differ in version{of_kernel}",
            "the same version",
            "restart the machine: the driver was updated while the old one was in use",
        )
    if trouble is not None:
        return not_here("no driver that answers")
    library = system.nvml.driver_version
    if isinstance(library, Unread):
        return unknown(str(library))
    if isinstance(kernel, Unread):
        return ok(f"library {library} talks to the driver")
    if kernel != library:
        return warn(f"library {library}, kernel {kernel}", "the same version", "restart the machine")
    return ok(f"library and kernel {library}")


def _kernel_version(system: System) -> str | Unread:
    text = read_text(system.proc / "driver/nvidia/version")
    if isinstance(text, Unread):
        return text
    words = text.partition("\n")[0].split()
    numbers = [word for word in words if word[:1].isdigit() and word.count(".") in (1, 2)]
    return numbers[0] if numbers else Unread("driver/nvidia/version: no version in it")


@per_machine(3, "WSL2", TOPIC)
def wsl(system: System) -> Result:
    """Whether this is Linux inside Windows."""
    if not system.is_linux:
        return not_here("of Linux only")
    if not system.is_wsl:
        return ok("not inside Windows")
    return info(
        f"WSL2, kernel {kernel_release(system.proc)}",
        advice="pinned memory is limited here (check 12), files under /mnt are slow (check 30)",
    )


@per_card(4, "driver model", TOPIC)
def driver_model(system: System, gpu: Gpu) -> Result:
    """Who manages the card's memory on Windows."""
    if not (system.is_windows or system.is_wsl):
        return not_here("of Windows only")
    model = Unread("NVIDIA's library does not answer for it") if gpu.nvml is None else gpu.nvml.driver_model
    name = MODELS.get(model, f"model {model}") if not isinstance(model, Unread) else None
    if name is None and not isinstance(system.windows, Unread):
        name = system.windows.driver_models.get(gpu.address or "")
    if name is None:
        return unknown(f"not told: {model}")
    if name != "WDDM":
        return ok(f"{name}: the driver manages the card's memory")
    return info(
        "WDDM: Windows manages the card's memory; what each process uses of it is not told, by design",
        advice="for a card without a display, MCDM leaves the memory to the driver (nvidia-smi -dm)",
    )


@per_card(5, "shared memory", TOPIC)
def shared_memory(system: System, gpu: Gpu) -> Result:
    """Whether card and host share one memory, so that there is nothing to stream over."""
    if gpu.torch is not None and gpu.torch.is_integrated:
        named = f" ({gpu.torch.architecture})" if gpu.torch.architecture else ""
        return info(
            f"{gpu.name}{named} shares the host's memory",
            advice="streaming to it gains little: the weights are there already; stream from disk instead",
        )
    if gpu.torch is None and gpu.nvml is None:
        return unknown("neither torch nor a driver tells")
    return ok("memory of its own")


@per_card(6, "compute capability", TOPIC)
def compute_capability(system: System, gpu: Gpu) -> Result:
    """What the card can run."""
    if gpu.torch is not None and gpu.torch.architecture:
        return info(f"{gpu.torch.architecture}, not an NVIDIA card")
    capability = gpu.capability
    if isinstance(capability, Unread):
        return unknown(str(capability))
    named = "{}.{}".format(*capability)
    if capability not in FAMILIES:
        return info(f"{named}, of no family known to this version")
    return ok(f"{named} {FAMILIES[capability]}")
