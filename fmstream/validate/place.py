"""Where trials are made: a device, and the worlds in which each is made once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from fmstream.device.device import CpuDevice
from fmstream.device.opening import device_name, open_device
from fmstream.validate.outcome import Outcome, carry_out

EMULATED: Final = "emu"

World = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where trials are made.

    Attributes:
        device: as PyTorch calls it.
        name: as its maker calls it.
        worlds: a trial is made once in each of these contexts, which look at what it leaves behind.
        has_pins: whether copies come from pinned memory.
    """

    device: str
    name: str
    worlds: Sequence[World]
    has_pins: bool

    def carry_out(self, part: str, name: str, trial: Callable[[str], str]) -> Outcome:
        """Make a trial, which is given the device, in every world."""

        def everywhere() -> str:
            said = ""
            for world in self.worlds:
                with world():
                    said = trial(self.device)
            return said

        return carry_out(part, name, everywhere)


@contextmanager
def find_place(device: str | None) -> Iterator[Place]:
    """The place that ``--device`` names; None is the CUDA card where there is one, else the CPU.

    Raises:
        ConfigError: there is no such device.
    """
    if device == EMULATED:
        from fmstream.validate.emulated import CARD, ORDERS, emulated, world

        with emulated():
            worlds = [world(order) for order in ORDERS]
            yield Place(EMULATED, f"emulated {CARD}, in {len(ORDERS)} orders of execution", worlds, has_pins=True)
        return
    opened = open_device(device)
    on_cpu = isinstance(opened, CpuDevice)
    name = str(opened.torch_device)
    yield Place(name, device_name(opened), [lambda: _settled(name)], has_pins=not on_cpu)


@contextmanager
def _settled(device: str) -> Iterator[None]:
    """A trial's work has ended, with its errors, before the trial has.

    On the CPU it is done by one thread: by several, kernels of a busy machine may give other last bits the next time.
    """
    on_cpu, num_threads = torch.device(device).type == "cpu", torch.get_num_threads()
    try:
        if on_cpu:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(num_threads)
    gc.collect()
    if not on_cpu:
        torch.get_device_module(device).synchronize()
