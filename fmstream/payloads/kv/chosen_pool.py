"""A pool whose layers attend to chosen pages: a page is one KV head's, and each head has frames of its own."""

from __future__ import annotations

import math
from typing import Final
from weakref import WeakKeyDictionary, WeakSet, finalize

import numpy as np
import torch
from numpy.typing import NDArray

from fmstream.core.order import Lane
from fmstream.core.pages import ABSENT, LOADING, RESIDENT
from fmstream.device.lanes import Lanes
from fmstream.payloads.kv import residency
from fmstream.payloads.kv.blocks import BlockTable, Ids, runs, steps
from fmstream.payloads.kv.choosing import NUM_EXEMPT, Desk, share_of_layer
from fmstream.payloads.kv.pool import Pool
from fmstream.payloads.kv.shape import PageShape
from fmstream.payloads.kv.tiers import Tiers

TRANSIT_SHARE: Final = 1 / 32
"""Part of the frames, at most, through which layers pass that attend to everything."""
LEAST_TRANSIT: Final = 4


class ChosenPool(Pool):
    """A pool for layers that choose their pages and for some that attend to all.

    A row of a block table is one KV head of one sequence.  Each row of a layer that chooses keeps a page that is being
    filled and `quota` others in frames; what is left is for the others to pass through.  Where a layer is put together
    at the end of the pool, chosen pages are as well.

    Args:
        heads: KV heads of a sequence.
    """

    def __init__(
        self, lanes: Lanes, shape: PageShape, tiers: Tiers, num_layers: int, max_pages: int, heads: int
    ) -> None:
        super().__init__(lanes, shape, tiers, num_layers, max_pages)
        self.stride = heads
        self.choosing: WeakSet[BlockTable] = WeakSet()
        """Block tables of the layers that choose."""
        self.desk = Desk(lanes)
        finalize(self, Desk.close, self.desk)
        self._open: WeakKeyDictionary[BlockTable, tuple[Ids, torch.Tensor]] = WeakKeyDictionary()
        """Frames of the pages that a layer is filling, and the same on the device."""

    def transit_frames(self) -> int:
        """Frames that layers pass through which attend to everything."""
        return max(LEAST_TRANSIT, min(2 * self._chunk, int(self.frames.num_frames * TRANSIT_SHARE)))

    def passing_frames(self) -> int:
        """Half of them: one part comes while another is copied."""
        return max(1, min(self.frames.num_frames, self.transit_frames() // 2))

    def quota(self, block: BlockTable) -> int:
        """Complete pages that each row of a layer which chooses may keep in frames."""
        count = max(1, self._num_layers - NUM_EXEMPT)
        layer = min(max(0, block.layer - NUM_EXEMPT), count - 1)
        return share_of_layer(self._each(block.num_sequences), int(block.pages.shape[1]), layer, count)

    def _each(self, rows: int) -> float:
        """The mean of it over these layers."""
        spare = self.frames.num_frames - self.transit_frames() - rows * max(self._num_layers, len(self.layers))
        return max(0, spare) / (max(1, rows) * self._num_choosing())

    def _num_choosing(self) -> int:
        return max(1, len(self.choosing), self._num_layers - NUM_EXEMPT)

    def kept(self, block: BlockTable) -> int:
        """Columns at the beginning of a layer that stay in frames, before any were chosen."""
        columns = int(block.pages.shape[1])
        return min(columns, self.quota(block)) if block in self.choosing else 0

    def _reserve(self, block: BlockTable) -> None:
        """Let layers that attend to everything pass through the last frames, so that they come in long copies."""
        frames, rows, columns = self.frames, block.num_sequences, int(block.pages.shape[1])
        frames.first_passing = max(0, frames.num_frames - self.transit_frames())
        chosen = math.ceil(self._num_choosing() * min(self._each(rows), columns))
        wanted = rows * (chosen + max(self._num_layers, len(self.layers)))
        frames.has_spare = frames.first_passing - wanted > self.transit_frames()

    def _make_room(self, wanted: int) -> int:
        """Let pages leave: first those that only pass."""
        table = self.frames.table
        passing = table.owner[self.frames.first_passing : self.frames.num_frames]
        passing = passing[passing >= 0]
        passing = passing[(table.state[passing] == RESIDENT) & (table.pins[passing] == 0)]
        self.frames.evict(np.sort(passing))
        return len(passing) or super()._make_room(wanted)

    def prefetch(self, block: BlockTable) -> None:
        """Recall what a layer that attends to everything will need first, as far as frames are free for it."""
        if block in self.choosing or not self._all_there:
            return
        frames = self.frames
        missing = residency.each_once(block.pages, frames.table.state == ABSENT)
        room = min(frames.num_free_for_passing() - block.num_sequences, self.passing_frames())
        frames.recall(missing[: max(0, room)])

    # One token more

    def append(self, block: BlockTable, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Bring a token of each row, [rows, dim], to the pages that are being filled; nothing is put together.

        If there is no room for it the layer is as before.
        """
        slot, columns = block.length % self.shape.tokens, block.pages.shape[1]
        if slot:
            self._own_open(block)
        else:
            block.extend(self._filled(len(keys))[:, None])
        try:
            self._write_slot(block.pages[:, -1], block, slot, keys, values)
        except BaseException:
            self.frames.release(block.cut(columns))
            raise
        block.length += 1
        self._together = None
        self.lanes.point(Lane.COMPUTE)

    def _write_slot(self, pages: Ids, block: BlockTable, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        with self.frames.holding(pages, staying=True):
            index, where = self._open_index(block, pages), self.frames.table.frame[pages]
            self.frames.claim_each(Lane.COMPUTE, where)
            for target, source in ((self._keys, keys), (self._values, values)):
                place = target[:, 0, slot]
                with self.lanes.picking(place, where):
                    place.index_put_((index,), source)
            self.frames.table.dirty[pages] = True

    def _filled(self, count: int) -> Ids:
        """New pages in frames, of which the compute lane writes the first token next."""
        frames, table = self.frames, self.frames.table
        self._let_stay(count)
        pages, done = frames.new(count), 0
        try:
            for _, start, length in runs(pages):
                end = start + length
                while start < end:
                    _, got = frames.fill(start, end - start, staying=True)
                    table.pin(start, got)
                    start, done = start + got, done + got
        except BaseException:
            table.pin_each(pages[:done], -1)
            frames.release(pages)
            raise
        table.pin_each(pages, -1)
        return pages

    def _own_open(self, block: BlockTable) -> None:
        """Give each row a last page of its own, with what the shared one holds."""
        frames, last = self.frames, block.pages[:, -1]
        for row in np.flatnonzero(frames.refs[last] > 1):
            old = last[row : row + 1].copy()
            if frames.refs[old[0]] < 2:  # the last that refers to it keeps it
                continue
            with frames.holding(old):
                new = self._filled(1)
                source, target = frames.table.frame[old[0]], frames.table.frame[new[0]]
                frames.claim(Lane.COMPUTE, int(source), 1)
                frames.claim(Lane.COMPUTE, int(target), 1)
                frames.memory[target].copy_(frames.memory[source])
                frames.table.dirty[new] = True
            frames.release(old)
            last[row] = new[0]
            block.version += 1
            self.lanes.point(Lane.COMPUTE)

    def _open_index(self, block: BlockTable, pages: Ids) -> torch.Tensor:
        where = self.frames.table.frame[pages]
        kept = self._open.get(block)
        if kept is None or not np.array_equal(kept[0], where):
            self._open[block] = kept = where, self.desk.upload("open", where.astype(np.int64))
        return kept[1]

    # Chosen pages

    def resident(self, pages: Ids) -> NDArray[np.bool_]:
        """Which pages are in frames or on their way to them."""
        state = self.frames.table.state[pages]
        return np.asarray((state == RESIDENT) | (state == LOADING))

    def bring(self, wanted: Ids, victims: Ids, there: Ids, quota: int) -> Ids:
        """Recall what is about to be attended to, and let other pages of the layer leave; those that were in no frame.

        Args:
            wanted: pages, each once.
            victims: pages that are least wanted.
            there: pages in frames, or on their way.
            quota: pages of the layer that may stay.
        """
        frames = self.frames
        frames.land(there)
        missing: Ids = wanted[frames.table.state[wanted] == ABSENT]
        leaving = self._that_may_leave(victims, wanted)
        there = np.setdiff1d(there, leaving)
        surplus = len(there) + len(missing) - quota
        if surplus > 0:  # after a prefill, when layers are in frames as far as there was room
            leaving = np.concatenate([leaving, self._that_may_leave(there, wanted)[-surplus:]])
        frames.evict(leaving)
        frames.end_spills(leaving)  # whoever takes their frames waits in order for the copies
        self._let_stay(len(missing))
        frames.recall_each(missing)
        return missing

    def settle(self, block: BlockTable) -> None:
        """Free the frames that a layer which chooses passed through: what is brought next comes to frames that stay."""
        frames, table = self.frames, self.frames.table
        there = residency.unpinned(table, block.pages)
        passed = there[table.frame[there] >= frames.first_passing]
        frames.evict(passed)
        frames.end_spills(passed)  # those that are wanted are missing now

    def _let_stay(self, count: int) -> None:
        """Frames for pages that stay: if fewer are free, those of layers that attend to everything leave them."""
        frames, table = self.frames, self.frames.table
        owner = table.owner[: frames.first_passing]
        short = count - int(np.count_nonzero(owner == -1))
        if short > 0:
            passes = np.zeros(table.num_pages, np.bool_)
            for block in self.layers:
                if block not in self.choosing:
                    passes[block.pages] = True
            found = owner[owner >= 0]
            found = found[passes[found] & (table.state[found] == RESIDENT) & (table.pins[found] == 0)]
            frames.evict(np.sort(found[:short]))

    def _that_may_leave(self, pages: Ids, staying: Ids) -> Ids:
        table, pages = self.frames.table, np.setdiff1d(pages, staying)
        free: Ids = pages[(table.state[pages] == RESIDENT) & (table.pins[pages] == 0)]
        return free

    def gather(self, block: BlockTable, columns: NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some columns of each row and of the last one, in that order.

        Args:
            block: the layer.
            columns: int32 [rows, n], in ascending order.

        Returns:
            [rows, tokens, dim] each, views of the end of the pool.
        """
        rows, shape = block.num_sequences, self.shape
        every = np.concatenate([np.take_along_axis(block.pages, columns, 1), block.pages[:, -1:]], 1)
        self._grow_end(every.size)
        with self.frames.holding(np.unique(every), staying=True):
            where = self.frames.table.frame[every].ravel()
            index = self.desk.upload("frames", where.astype(np.int64))
            self.frames.claim_each(Lane.COMPUTE, where)
            self._together = None
            keys, values = self._views(rows, every.shape[1] * shape.tokens, writing=True)
            for target, source in ((keys, self._keys), (values, self._values)):
                flat = target.view(every.size, shape.tokens, target.shape[-1])
                pages = source[:, 0]
                with self.lanes.picking(pages, where):
                    torch.index_select(pages, 0, index, out=flat)
        self.lanes.point(Lane.COMPUTE)
        length = columns.shape[1] * shape.tokens + (block.length - 1) % shape.tokens + 1
        return keys[:, 0, :length], values[:, 0, :length]

    def ahead(self, pages: Ids) -> Ids:
        """Recall pages for later steps, as far as frames that stay are free; those that are on their way."""
        missing: Ids = np.unique(pages)
        missing = missing[self.frames.table.state[missing] == ABSENT]
        self._let_stay(len(missing))
        owner = self.frames.table.owner[: self.frames.first_passing]
        missing = missing[: int(np.count_nonzero(owner == -1))]
        self.frames.recall_each(missing)
        return missing

    def keys_of(self, pages: Ids) -> torch.Tensor:
        """Keys of pages in any order, each once, [n, tokens, dim], in memory of their own."""
        with self.frames.holding(pages):
            where = self.frames.table.frame[pages]
            index = self.desk.upload("keys", where.astype(np.int64))
            self.frames.claim_each(Lane.COMPUTE, where)
            source = self._keys[:, 0]
            with self.lanes.picking(source, where):
                keys = source.index_select(0, index)
        self.lanes.point(Lane.COMPUTE)
        return keys

    def look(self, block: BlockTable) -> torch.Tensor:
        """All keys of a layer, [rows, tokens, dim], in memory of their own; no page moves for it."""
        frames, lanes, shape = self.frames, self.lanes, self.shape
        pages, table = block.pages.ravel(), self.frames.table
        frames.land(pages)
        found = torch.empty((pages.size, shape.num_bytes), dtype=torch.uint8, device=lanes.torch_device)
        lanes.wait(Lane.IN, Lane.COMPUTE, lanes.upcoming(Lane.COMPUTE))
        for _, at, count in runs(np.flatnonzero(table.state[pages] == ABSENT)):
            end = at + count
            while at < end:
                homes = table.home[pages[at:end]]
                at += frames.copy_home(int(homes[0]), found[at : at + steps(homes)])
        lanes.point(Lane.IN)
        lanes.wait(Lane.COMPUTE, Lane.IN, lanes.upcoming(Lane.IN) - 1)
        there = np.flatnonzero(table.state[pages] != ABSENT)
        where = table.frame[pages[there]]
        source = self.desk.upload("from", where.astype(np.int64))
        target = self.desk.upload("to", there.astype(np.int64))
        frames.claim_each(Lane.COMPUTE, where)
        with lanes.picking(frames.memory, where):
            found.index_copy_(0, target, frames.memory.index_select(0, source))
        lanes.point(Lane.COMPUTE)
        keys, _ = shape.views(found.view(shape.dtype))
        return keys[:, 0].reshape(block.num_sequences, -1, shape.key_dim)[:, : block.length]

    def close(self) -> None:
        """See `Pool`."""
        self.desk.close()
        super().close()
