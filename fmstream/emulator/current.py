"""The machine that the device stands for now."""

from __future__ import annotations

from fmstream.emulator.dry import Knowledge
from fmstream.emulator.generators import DeviceGenerator
from fmstream.emulator.machine import Machine
from fmstream.emulator.tensors import Memory


class Current:
    """What `emulator.reset` replaces, all of it at once.

    Attributes:
        machine, memory: the machine, and its memory as PyTorch sees it.
        generator: random numbers of the device.
        knowledge: which values a dry run has, None for a machine that computes.
    """

    machine: Machine
    memory: Memory
    generator: DeviceGenerator
    knowledge: Knowledge | None = None

    def replace(self, machine: Machine) -> None:
        """Take another machine."""
        self.machine = machine
        self.memory = Memory(machine)
        self.generator = DeviceGenerator()
        self.knowledge = Knowledge(machine.allocator, known) if (known := self.memory.known) is not None else None


current = Current()
