"""Who may touch a piece of memory when: each use waits for the last use by every other lane."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Lane(IntEnum):
    """Work that goes on in an order of its own: the user's computing, copies to the device, copies from it, and
    unpacking what came."""

    COMPUTE = 0
    IN = 1
    OUT = 2
    UNPACK = 3


class Order(Protocol):
    """Points in lanes, numbered from 1 in each, and waits for them.  None of these lets the host wait, but `join`."""

    def upcoming(self, lane: Lane) -> int:
        """The number of the next point, which lies behind all that is enqueued until it is made."""
        ...

    def wait(self, lane: Lane, other: Lane, point: int) -> None:
        """Let what a lane is given from now on wait for a point of another lane; one not made yet is made now."""
        ...

    def join(self, lane: Lane, point: int) -> None:
        """Let the host wait for a point."""
        ...


class Places:
    """Pieces of memory by number, each with the last point of each lane that uses it."""

    def __init__(self, num_places: int, order: Order) -> None:
        self._order = order
        self._last = np.zeros((len(Lane), num_places), np.int64)

    def grow(self, num_places: int) -> None:
        """Add unused places behind those that are there."""
        more = num_places - self._last.shape[1]
        if more > 0:
            self._last = np.pad(self._last, ((0, 0), (0, more)))

    def claim(self, lane: Lane, start: int, count: int) -> None:
        """Let a lane use places, once every other lane has done what it was given with them."""
        self._claim(lane, slice(start, start + count))

    def claim_each(self, lane: Lane, places: NDArray[np.integer]) -> None:
        """The same for places in any order; each may be named several times."""
        if len(places):
            self._claim(lane, places)

    def _claim(self, lane: Lane, places: slice | NDArray[np.integer]) -> None:
        for other in Lane:
            if other is not lane and (point := int(self._last[other, places].max())):
                self._order.wait(lane, other, point)
        self._last[lane, places] = self._order.upcoming(lane)

    def join(self, start: int, count: int) -> None:
        """Let the host use places: it waits until no lane does."""
        for lane in Lane:
            if point := int(self._last[lane, start : start + count].max()):
                self._order.join(lane, point)
