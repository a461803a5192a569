"""Pages on their way from the file: workers read them, beside the thread that computes, to host memory first."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Final

import torch

from fmstream.actors.host_workers import HostWorkers, Ticket
from fmstream.core.order import Lane
from fmstream.device.lanes import Lanes
from fmstream.device.pagefile import PageFile
from fmstream.errors import CancelledRun, StreamError

READ_BYTES: Final = 32 << 20
"""Host memory through which pages come from the file, at most,"""
READ_PAGES: Final = 256
"""and in pages."""
NUM_WORKERS: Final = 2
"""While one waits for the disk the other does too: disks answer several at once."""


@dataclass(slots=True, eq=False)
class Reading:
    """Pages that are being read, or were, to consecutive places in host memory.

    Attributes:
        begin: the first place; places are counted on and on, around the ring.
        point: of the lane IN, behind the copy to the device; 0 before there is one.
        is_dropped: whether nobody wants them any more.
    """

    begin: int
    count: int
    ticket: Ticket
    point: int = 0
    is_dropped: bool = False


class FileReads:
    """A ring of places in host memory; each is written to again only when nobody reads or writes it any more.

    Whoever computes begins a reading (`begin`), goes on, and brings it to the device later (`land`).
    """

    def __init__(self, lanes: Lanes, page_bytes: int, file: PageFile) -> None:
        self._lanes = lanes
        self._page_bytes = page_bytes
        self._file = file
        self.num_places = max(1, min(READ_PAGES, READ_BYTES // page_bytes))
        self._block = lanes.block(self.num_places * page_bytes)
        self.workers = HostWorkers(NUM_WORKERS)
        self._under_way: deque[Reading] = deque()
        self._next = 0
        self.num_bytes = 0
        """Bytes that were read and landed."""

    def room(self) -> int:
        """Places that can be read to now, one after the other."""
        while self._under_way and self._is_over(self._under_way[0]):
            self._under_way.popleft()
        first = self._under_way[0].begin if self._under_way else self._next
        return min(self.num_places - (self._next - first), self.num_places - self._next % self.num_places)

    def _is_over(self, reading: Reading) -> bool:
        """Whether nothing is written to a reading's places or copied from them; asking does not wait."""
        if reading.is_dropped:
            return self.workers.is_done(reading.ticket)
        return reading.point > 0 and self._lanes.has_passed(Lane.IN, reading.point)

    def make_room(self) -> bool:
        """Wait for what is oldest in the ring; False if that is a reading which has yet to be landed."""
        oldest = self._under_way[0]
        if oldest.is_dropped:
            self._end(oldest.ticket)
        elif oldest.point:
            self._lanes.join(Lane.IN, oldest.point)
        else:
            return False
        return True

    def begin(self, page: int, wanted: int) -> Reading:
        """Let workers read consecutive pages of the file, as many of ``wanted`` as there is `room` for.

        Raises:
            ForkedError: this process is a child of the one that made the cache.
        """
        count = min(wanted, self.room())
        assert count > 0
        ticket = self._ask(page, self._rows(self._next, count).data_ptr(), count, self._block)
        reading = Reading(self._next, count, ticket)
        self._next += count
        self._under_way.append(reading)
        return reading

    def fetch(self, page: int, address: int, count: int) -> None:
        """Read consecutive pages to host memory, which the caller keeps alive, and wait for them.

        Raises:
            StreamError: they could not be read; the cause is chained.
        """
        ticket = self._ask(page, address, count, None)
        try:
            self._wait(ticket)
        except BaseException:
            self.workers.cancel(ticket)
            self._end(ticket)
            raise
        self.num_bytes += count * self._page_bytes

    def _ask(self, page: int, address: int, count: int, keep: object) -> Ticket:
        size, name = self._page_bytes, "read pages of keys and values"
        return self.workers.read(
            self._file.read_fd, page * size, address, count * size, keep=(self._file, keep), name=name
        )

    def _wait(self, ticket: Ticket) -> None:
        try:
            self.workers.wait(ticket)
        except OSError as error:
            raise StreamError(
                f"the file tier of keys and values in {self._file.directory} cannot be read ({error}): what lies there "
                "is lost; look at that disk, then begin with a new cache, or do without the tier (spill_dir)"
            ) from error

    def is_read(self, reading: Reading) -> bool:
        """Whether it can be landed without a wait."""
        return self.workers.is_done(reading.ticket) and reading.ticket.error is None

    def land(self, reading: Reading, target: torch.Tensor) -> None:
        """Wait until pages were read and enqueue their copy to uint8 [count, page_bytes] on the device (lane IN).

        Raises:
            StreamError: they could not be read; the cause is chained.
        """
        try:
            self._wait(reading.ticket)
        except StreamError:
            reading.is_dropped = True
            raise
        with self._lanes.on(Lane.IN):
            target.copy_(self._rows(reading.begin, reading.count), non_blocking=True)
        reading.point = self._lanes.upcoming(Lane.IN)
        self.num_bytes += reading.count * self._page_bytes

    def drop(self, reading: Reading) -> None:
        """Nobody wants these pages any more."""
        reading.is_dropped = True
        self.workers.cancel(reading.ticket)

    def _end(self, ticket: Ticket) -> None:
        """Wait until nothing is written for a ticket any more, however it ended."""
        while not self.workers.is_done(ticket):
            with contextlib.suppress(CancelledRun, OSError):
                self.workers.wait(ticket)

    def _rows(self, begin: int, count: int) -> torch.Tensor:
        start = begin % self.num_places * self._page_bytes
        return self._block.tensor[start : start + count * self._page_bytes].view(count, self._page_bytes)

    def close(self) -> None:
        """Stop the workers and give the memory back, once no copy uses it; may be called again.

        What one of them is stuck in keeps the memory and the file until it ends.
        """
        self.workers.close()
        self._under_way.clear()
        self._lanes.free(self._block)
