"""What torch says of its build and of the devices that it sees.  Imports torch when it is asked, not before."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from fmstream.core.reading import Unread


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """One accelerator that torch sees.

    Attributes:
        index: its number for torch, which the environment may have set.
        address: its place on the bus, spelled as in sysfs; None where torch does not tell.
        capability: compute capability of an NVIDIA card, else None.
        architecture: what the maker calls its instruction set, as "gfx1151"; empty for NVIDIA cards.
        is_integrated: whether it shares the host's memory.
        total_bytes: its memory.
        kind: type of its device in torch.
    """

    index: int
    name: str
    address: str | None = None
    capability: tuple[int, int] | None = None
    architecture: str = ""
    is_integrated: bool = False
    total_bytes: int = 0
    kind: str = "cuda"


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """A build of torch: what it was built with and for, the devices that it sees, and what it warned of."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] = ()
    devices: tuple[TorchDevice, ...] = ()
    warned: tuple[str, ...] = ()


def read_torch() -> TorchFacts | Unread:
    """Import torch and ask it; `Unread` says why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Unread(f"torch cannot be imported: {type(error).__name__}: {error}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        architectures, devices = _read_devices(torch)
    warned = tuple(dict.fromkeys(" ".join(str(w.message).split()) for w in caught))
    return TorchFacts(torch.__version__, torch.version.cuda, torch.version.hip, architectures, devices, warned)


def _read_devices(torch: Any) -> tuple[tuple[str, ...], tuple[TorchDevice, ...]]:
    if not torch.cuda.is_available():
        return (), ()
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        is_nvidia = torch.version.hip is None
        devices.append(
            TorchDevice(
                index=index,
                name=properties.name,
                address=_address(properties),
                capability=(properties.major, properties.minor) if is_nvidia else None,
                architecture="" if is_nvidia else str(getattr(properties, "gcnArchName", "")).partition(":")[0],
                is_integrated=bool(getattr(properties, "is_integrated", False)),
                total_bytes=properties.total_memory,
            )
        )
    return tuple(torch.cuda.get_arch_list()), tuple(devices)


def _address(properties: Any) -> str | None:
    places = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    numbers = [place for place in places if isinstance(place, int)]
    if len(numbers) != 3:
        return None
    return f"{numbers[0] & 0xFFFF:04x}:{numbers[1]:02x}:{numbers[2]:02x}.0"
