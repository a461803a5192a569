"""The emulated device as a place for trials: each in several orders of execution, with the race checker on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from fmstream import emulator
from fmstream.emulator.backlog import Execution
from fmstream.validate.outcome import expect
from fmstream.validate.place import World

CARD: Final = "rtx4070-laptop"
CAPACITY: Final = 256 << 20
"""Device memory, in bytes: what the trials need, and no more for the host to hold."""
ORDERS: Final[tuple[Execution, ...]] = ("eager", "late", 1)
"""Work is done at once, as late as it may be, and in a random order that the streams allow."""


@contextmanager
def emulated() -> Iterator[None]:
    """The device in PyTorch while the context is open; raises `ConfigError` where this PyTorch cannot be given it."""
    emulator.install()
    try:
        yield
    finally:
        emulator.uninstall()


def world(order: Execution) -> World:
    """A new machine, whose free memory holds NaN; afterwards no race was seen and nothing is pinned."""
    return partial(_world, order)


@contextmanager
def _world(order: Execution) -> Iterator[None]:
    gc.collect()
    machine = emulator.reset(CARD, execution=order, capacity=CAPACITY, poison=True, check="record")
    yield
    gc.collect()
    machine.synchronize()
    reports = machine.reports
    expect(not reports, f"{len(reports)} accesses out of order with execution={order!r}: {reports[:1]}")
    pinned = machine.pinned.charged_bytes
    expect(pinned == 0, f"{pinned} bytes of host memory are still pinned with execution={order!r}")
