"""Rows of tables on their way to an accelerator: gathered to pinned memory, copied to a ring there, used in place.

A *batch* is the rows that some positions use, each once, and for each position the number of its row.  The host gathers
a batch beside the thread that asked for it; that thread enqueues the copy once it finds the gather done, and waits on
the host only for a gather that is late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fmstream.actors.gathers import Gathers, Ids, as_bits
from fmstream.actors.host_workers import Ticket
from fmstream.actors.staging import PAGE_BYTES, StagingRing
from fmstream.core.arena import Window, num_pages
from fmstream.device.accelerator import Accelerator, DeviceSlab, Mark

SLOT_BYTES: Final = 256
"""Batches begin at multiples of this on the device."""
ROW_ALIGNMENT: Final = 64
IN_FLIGHT: Final = 2
"""Batches of the largest size for which the device has room: one is used while the next one comes."""
STAGED: Final = 3
"""Batches of the largest size that pinned memory holds: one more is gathered meanwhile."""


def batch_bytes(num_positions: int, row_bytes: int) -> int:
    """Bytes on the device for a batch without duplicates."""
    return num_pages(_head_bytes(num_positions) + num_positions * row_bytes, SLOT_BYTES) * SLOT_BYTES


def _head_bytes(num_positions: int) -> int:
    return -(-4 * num_positions // ROW_ALIGNMENT) * ROW_ALIGNMENT


def positions_that_fit(num_bytes: int, row_bytes: int) -> int:
    """The most positions whose batch takes at most ``num_bytes``."""
    return (num_bytes - ROW_ALIGNMENT - SLOT_BYTES) // (row_bytes + 4)


@dataclass(slots=True, eq=False)
class Batch:
    """Rows on their way.

    Attributes:
        table: (rows, width), on the host.
        num_positions, num_rows: how many positions, and rows that are different.
        num_bytes: of both together.
        place: where it is staged.
        ticket: its gather, None once that is done.
        slot: where it lies on the device, -1 before.
        ready: the mark behind its copy.
        dropped: it will not be used.
    """

    table: torch.Tensor
    num_positions: int
    num_rows: int
    num_bytes: int
    place: int
    ticket: Ticket | None = None
    slot: int = -1
    ready: Mark | None = None
    dropped: bool = False


class DeviceRing:
    """Stretches of device memory that are taken and given back in one order, on the device's own clock."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._window = Window(0)
        self._taken: deque[int] = deque()
        self._left: dict[int, Mark | None] = {}
        self.slab: DeviceSlab | None = None

    def allocate(self, num_bytes: int) -> None:
        """Take the memory, if there is none."""
        if self.slab is None:
            count = num_pages(num_bytes, SLOT_BYTES)
            slab = self._device.slab(count * SLOT_BYTES)
            assert isinstance(slab, DeviceSlab)
            self.slab, self._window = slab, Window(count)

    @property
    def num_bytes(self) -> int:
        """Device memory that it has now."""
        return self._window.num_frames * SLOT_BYTES

    def take(self, num_bytes: int) -> int | None:
        """Take a stretch, which copies may write from here on; None while what is in its place is not left."""
        count = num_pages(num_bytes, SLOT_BYTES)
        while (place := self._window.reserve(count)) is None:
            if not self._taken or self._taken[0] not in self._left:
                return None
            self._reclaim()
        self._taken.append(place)
        return place

    def _reclaim(self) -> None:
        """Let copies wait for the last use of the oldest stretch, and take it for free."""
        place = self._taken.popleft()
        self._await_use(self._left.pop(place))
        self._window.release(place)

    def _await_use(self, mark: Mark | None) -> None:
        """Let later copies wait for a use."""
        if mark is not None:
            self._device.wait(mark, self._device.copies)

    def bytes(self, place: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of a stretch."""
        assert self.slab is not None
        offset = self._window.frame_of(place) * SLOT_BYTES
        return self.slab.memory[offset : offset + num_bytes]

    def leave(self, place: int, mark: Mark | None) -> None:
        """Give a stretch back; it is used until ``mark``, None if it was not."""
        self._left[place] = mark

    def drop(self) -> None:
        """Give the memory back; the allocator waits for its uses."""
        self.slab, self._window = None, Window(0)
        self._taken.clear()
        self._left.clear()


class Rows:
    """Batches in the order in which they were begun.  Not thread-safe.

    Args:
        device: where they go.
        gathers: who gathers them.
        check_stop: raises if waiting is to end.
        ring_bytes: device memory, which is taken with the first batch; holds at least one of any size.
    """

    def __init__(
        self, device: Accelerator, gathers: Gathers, check_stop: Callable[[], None], ring_bytes: int = 0
    ) -> None:
        self.device = device
        self.gathers = gathers
        self.ring_bytes = ring_bytes
        self.copied_bytes = 0
        self._check_stop = check_stop
        self._staging = StagingRing(device)
        self._ring = DeviceRing(device)
        self._gathering: deque[Batch] = deque()
        self._unused: deque[Batch] = deque()
        """Batches on the device, or on their copy, that nobody has used yet."""

    @property
    def held_bytes(self) -> int:
        """Device memory that is held."""
        return self._ring.num_bytes

    # On the way

    def bring_now(self, table: torch.Tensor, ids: Ids, out: torch.Tensor) -> bool:
        """Bring a few rows in the present stream, which has little else to do; False if they are too many for that.

        The host waits for nothing, but nothing is brought beside what is computed either.
        """
        num_bytes = out.numel() * out.element_size()
        if num_bytes > self.gathers.inline_bytes or (place := self._take_staging(num_bytes, wait=False)) is None:
            return False
        with torch.inference_mode(False), torch.no_grad():
            staged = self._staging.bytes(place, num_bytes).view(table.dtype).view(len(ids), -1)
            self.gathers.begin(table, ids, staged)
        out.copy_(staged, non_blocking=True)
        self._staging.leave(place, self.device.mark())
        self.copied_bytes += num_bytes
        return True

    def begin(self, table: torch.Tensor, ids: Ids, *, wait: bool = True) -> Batch | None:
        """Begin to bring the rows of some positions; None where that would have to ``wait`` for room."""
        rows, numbers = (ids, np.zeros(1, np.int32)) if len(ids) == 1 else np.unique(ids, return_inverse=True)
        head, row_bytes = _head_bytes(len(ids)), table.shape[1] * table.element_size()
        num_bytes = head + len(rows) * row_bytes
        place = self._take_staging(num_bytes, wait=wait)
        if place is None:
            return None
        batch = Batch(table, len(ids), len(rows), num_bytes, place)
        staged = self._staging.bytes(place, num_bytes)
        with torch.inference_mode(False), torch.no_grad():
            staged[: 4 * len(ids)].view(torch.int32).copy_(torch.from_numpy(numbers.astype(np.int32)))
            target = staged[head:].view(table.dtype).view(len(rows), -1)
        batch.ticket = self.gathers.begin(table, np.ascontiguousarray(rows), target, self._staging.block)
        self._gathering.append(batch)
        self.advance()
        return batch

    def _take_staging(self, num_bytes: int, *, wait: bool) -> int | None:
        wanted = STAGED * num_pages(self.ring_bytes // IN_FLIGHT, PAGE_BYTES) * PAGE_BYTES
        while (place := self._staging.take(num_bytes, wanted)) is None:
            if not wait:
                return None
            if self._gathering:
                self._bring_on(self._gathering[0])
            else:
                self._staging.wait()
        return place

    def advance(self) -> None:
        """Enqueue the copies of what has been gathered, as far as there is room on the device."""
        while self._gathering and self._is_gathered(self._gathering[0]):
            if not self._copy(self._gathering[0]):
                return

    def _is_gathered(self, batch: Batch) -> bool:
        if batch.ticket is not None and self.gathers.is_done(batch.ticket):
            batch.ticket.raise_failure()
            batch.ticket = None
        return batch.ticket is None

    def _copy(self, batch: Batch) -> bool:
        """Enqueue the copy of the oldest batch that was gathered; False if there is no room for it."""
        if batch.dropped:
            self._gathering.popleft()
            self._staging.leave(batch.place, None)
            return True
        self._ring.allocate(self.ring_bytes)
        slot = self._ring.take(batch.num_bytes)
        if slot is None:
            return False
        device = self.device
        self._gathering.popleft()
        with torch.inference_mode(False), torch.no_grad(), device.copying():
            target = self._ring.bytes(slot, batch.num_bytes)
            target.copy_(self._staging.bytes(batch.place, batch.num_bytes), non_blocking=True)
            batch.ready = device.mark(device.copies)
        batch.slot = slot
        self._unused.append(batch)
        self._staging.leave(batch.place, batch.ready)
        self.copied_bytes += batch.num_bytes
        return True

    def _bring_on(self, batch: Batch) -> None:
        """Enqueue the copy of the oldest batch; those that nobody has used yet make room for it."""
        ticket, batch.ticket = batch.ticket, None
        if ticket is not None:
            try:
                self.gathers.wait(ticket, self._check_stop)
            except BaseException:
                batch.ticket = ticket
                raise
        while not self._copy(batch):
            self.drop(self._unused[0])

    # Using

    def select(self, batch: Batch, out: torch.Tensor) -> None:
        """Let the present stream write the rows of a batch's positions to ``out``, (positions, width) on the device."""
        while batch.slot < 0:
            assert not batch.dropped
            self._bring_on(self._gathering[0])
        self._follow(batch)
        head = _head_bytes(batch.num_positions)
        with torch.no_grad():
            there = self._ring.bytes(batch.slot, batch.num_bytes)
            numbers = there[: 4 * batch.num_positions].view(torch.int32)
            rows = there[head:].view(out.dtype).view(batch.num_rows, -1)
            torch.index_select(as_bits(rows), 0, numbers, out=as_bits(out))
        self._unused.remove(batch)
        self._ring.leave(batch.slot, self.device.mark())
        self.advance()

    def _follow(self, batch: Batch) -> None:
        """Let the present stream wait for a batch's copy."""
        assert batch.ready is not None
        assert self._ring.slab is not None
        stream = self.device.current_stream()
        self.device.wait(batch.ready, stream)
        self._ring.slab.used_on(stream)

    def drop(self, batch: Batch) -> None:
        """Take a batch for not wanted; what was begun for it ends in its own time."""
        batch.dropped = True
        if batch in self._unused:
            self._unused.remove(batch)
            self._ring.leave(batch.slot, None)

    # Ending

    def settle(self) -> None:
        """Wait until no gather reads a table; what was gathered stays as it is."""
        for batch in self._gathering:
            if batch.ticket is not None:
                try:
                    self.gathers.wait(batch.ticket, self._check_stop)
                except Exception:  # why it failed, or why to stop: whoever wants its rows is told
                    self.gathers.stop(batch.ticket)

    def reset(self) -> None:
        """Begin anew: nothing is on its way, and no memory is held."""
        for batch in self._gathering:
            if batch.ticket is not None:
                self.gathers.stop(batch.ticket)
        self._gathering.clear()
        self._unused.clear()
        self._staging.drop()
        self._ring.drop()


class Fetch:
    """The rows of any number of positions, in batches of at most ``chunk``."""

    def __init__(self, rows: Rows, table: torch.Tensor, ids: Ids, chunk: int) -> None:
        self.table = table
        self._rows = rows
        self._ids = ids
        self._chunk = chunk
        self._num_begun = 0
        self._batches: deque[Batch] = deque()

    def begin(self) -> bool:
        """Begin what there is room for; whether that is all."""
        while self._num_begun < len(self._ids):
            if not self._begin_next(wait=False):
                return False
        return True

    def _begin_next(self, *, wait: bool) -> bool:
        batch = self._rows.begin(self.table, self._ids[self._num_begun : self._num_begun + self._chunk], wait=wait)
        if batch is None:
            return False
        self._num_begun += batch.num_positions
        self._batches.append(batch)
        return True

    def tickets(self) -> list[Ticket]:
        """Gathers that have been begun and may go on."""
        return [batch.ticket for batch in self._batches if batch.ticket is not None]

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it had to make room for others."""
        return not any(batch.dropped for batch in self._batches)

    def into(self, out: torch.Tensor) -> None:
        """Let the present stream write all rows to ``out``, (positions, width) on the device; once."""
        done = 0
        while done < len(self._ids):
            self.begin()
            if not self._batches:
                self._begin_next(wait=True)
            batch = self._batches[0]
            self._rows.select(batch, out[done : done + batch.num_positions])
            self._batches.popleft()
            done += batch.num_positions

    def drop(self) -> None:
        """Take it for not wanted."""
        for batch in self._batches:
            self._rows.drop(batch)
        self._batches.clear()
