"""Cards, each as its bus, the management library and torch see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fmstream.core.reading import Unread
from fmstream.doctor.nvml import Nvml, NvmlCard
from fmstream.doctor.pci import AMD, NVIDIA, Link, PciDevice, pci_devices, same_address
from fmstream.doctor.torch_facts import TorchDevice, TorchFacts


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card.  A view is None where that side does not know the card.

    Attributes:
        number: its place in this list, in the order of the bus.
    """

    number: int
    name: str
    address: str | None = None
    pci: PciDevice | None = None
    nvml: NvmlCard | None = None
    torch: TorchDevice | None = None

    @property
    def is_nvidia(self) -> bool:
        """Whether NVIDIA made it."""
        if self.nvml is not None:
            return True
        if self.pci is not None:
            return self.pci.vendor == NVIDIA
        return self.torch is not None and self.torch.capability is not None

    @property
    def is_asleep(self) -> bool:
        """Whether the kernel has powered it off."""
        return self.pci is not None and self.pci.is_asleep

    @property
    def link(self) -> Link:
        """Its link as it runs now, by the library, else by sysfs."""
        bus = self._bus_link(which_is_max=False)
        if self.nvml is None:
            return bus
        return Link(first_read(self.nvml.generation, bus.generation), first_read(self.nvml.width, bus.width))

    @property
    def own_link(self) -> Link:
        """The most that the card can do, whatever it is put in."""
        bus = self._bus_link(which_is_max=True)
        if self.nvml is None:
            return bus
        return Link(first_read(self.nvml.own_generation, bus.generation), bus.width)

    @property
    def best_link(self) -> Link:
        """The most that card and slot can do together."""
        own, slot = self.own_link, self.slot_link
        generations = [own.generation, slot.generation]
        widths = [own.width, slot.width]
        if self.nvml is not None:
            generations.append(self.nvml.max_generation)
            widths.append(self.nvml.max_width)
        return Link(_least(generations), _least(widths))

    @property
    def slot_link(self) -> Link:
        """The most that the port which it is plugged into can do."""
        port = None if self.pci is None else next(self.pci.above(), None)
        return Link(Unread("no port above"), Unread("no port above")) if port is None else port.max_link

    @property
    def capability(self) -> tuple[int, int] | Unread:
        """Compute capability of an NVIDIA card."""
        known = Unread("not told") if self.nvml is None else self.nvml.capability
        if isinstance(known, Unread) and self.torch is not None and self.torch.capability is not None:
            return self.torch.capability
        return known

    def _bus_link(self, *, which_is_max: bool) -> Link:
        if self.pci is None:
            return Link(Unread("not on the bus"), Unread("not on the bus"))
        if self.pci.is_asleep:
            return Link(Unread("the card is powered off"), Unread("the card is powered off"))
        return self.pci.max_link if which_is_max else self.pci.link


def first_read(*values: int | Unread) -> int | Unread:
    """The first value that was read, else the last reason why none was."""
    for value in values:
        if not isinstance(value, Unread):
            return value
    return values[-1]


def _least(values: list[int | Unread]) -> int | Unread:
    known = [value for value in values if not isinstance(value, Unread)]
    return min(known) if known else first_read(*values)


def find_gpus(sysfs: Path, nvml: Nvml, torch: TorchFacts | Unread) -> list[Gpu]:
    """Cards that the library, torch, or for NVIDIA's the bus knows, in the order of the bus."""
    devices = {device.address: device for device in pci_devices(sysfs) if device.is_display}
    cards, unplaced = _by_address(nvml.cards())
    seen, unplaced_seen = _torch_by_address(torch)
    addresses = {address for address, device in devices.items() if device.vendor == NVIDIA} | cards.keys() | seen.keys()
    found = [
        _gpu(address, devices.get(address), cards.get(address), seen.get(address)) for address in sorted(addresses)
    ]
    # Without addresses the library's order and torch's are taken to be one: the bus's.
    loners = [device for device in devices.values() if device.vendor == AMD and device.address not in addresses]
    for place in range(max(len(unplaced), len(unplaced_seen))):
        card = unplaced[place] if place < len(unplaced) else None
        device = unplaced_seen[place] if place < len(unplaced_seen) else None
        is_amd = card is None and device is not None and device.capability is None
        found.append(_gpu(None, loners[0] if is_amd and len(loners) == 1 else None, card, device))
    return [Gpu(number, gpu.name, gpu.address, gpu.pci, gpu.nvml, gpu.torch) for number, gpu in enumerate(found)]


def _by_address(cards: list[NvmlCard]) -> tuple[dict[str, NvmlCard], list[NvmlCard]]:
    placed: dict[str, NvmlCard] = {}
    unplaced = []
    for card in cards:
        address = card.address
        if isinstance(address, Unread):
            unplaced.append(card)
        else:
            placed[address] = card
    return placed, unplaced


def _torch_by_address(torch: TorchFacts | Unread) -> tuple[dict[str, TorchDevice], list[TorchDevice]]:
    devices = () if isinstance(torch, Unread) else torch.devices
    placed = {same_address(device.address): device for device in devices if device.address}
    return placed, [device for device in devices if not device.address]


def _gpu(address: str | None, pci: PciDevice | None, card: NvmlCard | None, device: TorchDevice | None) -> Gpu:
    name = Unread("no name") if card is None else card.name
    if isinstance(name, Unread):
        name = device.name if device is not None else "card"
    return Gpu(0, name, address or (None if pci is None else pci.address), pci, card, device)
