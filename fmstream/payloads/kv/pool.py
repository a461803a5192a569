"""The pool: frames of fast memory, the pages in them, and the place where a layer's pages are put together."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fmstream.core.freeruns import FreeRuns
from fmstream.core.order import Lane, Places
from fmstream.core.pages import ABSENT, LOADING, RESIDENT, SPILLING, PageTable
from fmstream.device.device import Part
from fmstream.device.lanes import Lanes
from fmstream.errors import MemoryBudgetError
from fmstream.payloads.kv import residency
from fmstream.payloads.kv.blocks import BlockTable, Ids, runs
from fmstream.payloads.kv.shape import PageShape
from fmstream.payloads.kv.tiers import Tiers

VALUES_AT: Final = 512
"""The values of a layer that was put together begin at a multiple of so many bytes, as tensors of their own would."""
CHUNK_BYTES: Final = 16 << 20
"""Recalled and put together at once."""


@dataclass(slots=True)
class PoolCounts:
    """What a pool has done, in pages; ``lent`` is how often memory beyond the pool had to be taken (see `Assembly`)."""

    recalled: int = 0
    spilled: int = 0
    dropped: int = 0
    lent: int = 0


class Pool:
    """A fixed number of pages of fast memory for the keys and values of layers of one shape.

    Frames lie at its beginning; its end is where a layer is put together (`assemble`), which grows with the sequences
    and so takes frames away.  All is enqueued: the host waits only for what goes through the file.

    Raises:
        MemoryBudgetError: the device has no room for so many pages.
    """

    def __init__(
        self,
        lanes: Lanes,
        shape: PageShape,
        max_pages: int,
        host_bytes: int | None,
        spill_dir: str | os.PathLike[str] | None,
        note: Callable[[str], None],
    ) -> None:
        self.shape = shape
        self.lanes = lanes
        self.max_pages = max_pages
        num_frames = max_pages + 1  # pages of a layer that fills the pool need one through which they come
        self.counts = PoolCounts()
        self.layers: list[BlockTable] = []
        """Block tables in the order in which their layers are called."""
        self.current = 0
        try:
            self.slab = lanes.slab(num_frames * shape.num_bytes + VALUES_AT)
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                f"{lanes.torch_device} has no room for {max_pages} pages of {shape.num_bytes} bytes of keys and "
                f"values: give a smaller kv_cache_max_pages"
            ) from error
        with torch.inference_mode(False), torch.no_grad():
            whole = self.slab.part(0, num_frames * shape.num_bytes).tensor
            self.frames = whole.view(num_frames, shape.num_bytes)
            self._keys, self._values = shape.views(whole.view(shape.dtype).view(num_frames, shape.elements))
        self.tiers = Tiers(lanes, shape.num_bytes, host_bytes, spill_dir, note)
        self.table = PageTable(0, num_frames)
        self.refs = np.zeros(0, np.int32)
        self.num_frames = num_frames
        """Frames that may be used: those that the end of the pool has not taken."""
        self._free_ids = FreeRuns()
        self._places = Places(num_frames, lanes)
        self._spilling: list[tuple[int, int, int]] = []
        """Runs that are being written home: (first page, count, point of the lane OUT)."""
        self._end_pages = 0
        self._end: Part | None = None
        self._chunk = max(1, CHUNK_BYTES // shape.num_bytes)
        self._finalizer = weakref.finalize(self, Tiers.close, self.tiers)

    # Pages

    def new(self, count: int) -> Ids:
        """Absent pages with one reference each, of consecutive numbers where possible."""
        found: list[Ids] = []
        while count:
            run = self._free_ids.take(count)
            if run is None:
                old = self.table.num_pages
                self.table.grow(max(64, 2 * old, old + count))
                self.refs = np.pad(self.refs, (0, self.table.num_pages - old))
                self._free_ids.give(old, self.table.num_pages - old)
                continue
            found.append(np.arange(run[0], run[0] + run[1], dtype=np.int32))
            count -= run[1]
        pages = np.concatenate(found) if found else np.empty(0, np.int32)
        self.refs[pages] = 1
        return pages

    def share(self, pages: Ids) -> None:
        """Add a reference for each time a page occurs."""
        np.add.at(self.refs, pages.ravel(), 1)

    def release(self, pages: Ids) -> None:
        """Take a reference for each time a page occurs; what nobody refers to is forgotten, wherever it lies."""
        np.subtract.at(self.refs, pages.ravel(), 1)
        gone = np.unique(pages)
        for _, start, count in runs(gone[self.refs[gone] == 0]):
            self._forget(start, count)
            self._free_ids.give(start, count)

    def _forget(self, start: int, count: int) -> None:
        pages = np.arange(start, start + count, dtype=np.int32)
        self._end_spills(pages)
        self._leave(pages)
        for begin, home, length in runs(self.table.home[pages]):
            if home >= 0:
                self.tiers.give(home, length)
                self.table.home[pages[begin : begin + length]] = -1
        homes = self.table.home[start : start + count]
        assert (homes == -1).all()

    def _leave(self, pages: Ids) -> None:
        """Let pages leave their frames, whatever is in them."""
        state = self.table.state[pages]
        self.table.dirty[pages] = False
        for _, start, count in runs(pages[state == LOADING]):
            self.table.cancel(start, count)
        for _, start, count in runs(pages[state == RESIDENT]):
            self.table.evict(start, count)

    # Frames

    def _frames_for(self, wanted: int) -> tuple[int, int]:
        """Consecutive free frames, up to ``wanted``: (first, count).  Pages leave where there are none."""
        while True:
            count = min(wanted, self.num_frames)
            while count:
                first = self.table.find_free(count, 0, self.num_frames)
                if first >= 0:
                    return first, count
                count //= 2
            if self._spilling:
                self._hand_over(self._spilling.pop(0))
            elif not self.make_room(wanted):
                raise AssertionError(f"all {self.num_frames} frames are pinned")

    def make_room(self, wanted: int) -> int:
        """Let up to ``wanted`` pages leave their frames; how many did.  What has no good copy is written home first."""
        found = residency.leaving(self.table, self.layers, self.current, self.num_frames, wanted)
        total = 0
        for pages, loading in found:
            total += len(pages)
            if loading:
                self._leave(pages)
            else:
                self.evict(pages)
        return total

    def evict(self, pages: Ids) -> None:
        """Resident pages leave their frames: dirty ones to their homes, the others to nowhere."""
        dirty = self.table.dirty[pages] | (self.table.home[pages] < 0)
        for _, start, count in runs(pages[~dirty]):
            self.table.evict(start, count)
            self.counts.dropped += count
        for _, start, count in runs(pages[dirty]):
            self._spill(start, count)

    def _spill(self, start: int, count: int) -> None:
        """Write resident pages of consecutive numbers home; their frames are free in the order of the lanes."""
        end = start + count
        while start < end:
            frame, home = int(self.table.frame[start]), int(self.table.home[start])
            length = 1
            while start + length < end and int(self.table.frame[start + length]) == frame + length:
                if int(self.table.home[start + length]) != (home + length if home >= 0 else -1):
                    break
                length += 1
            taken = home < 0
            if taken:
                home, length = self.tiers.take(length)
            try:
                self._places.claim(Lane.OUT, frame, length)
                self.tiers.write(self.frames[frame : frame + length], home)
            except BaseException:
                if taken:
                    self.tiers.give(home, length)
                raise
            self.table.spill(start, length)
            self.table.home[start : start + length] = np.arange(home, home + length)
            self._spilling.append((start, length, self.lanes.upcoming(Lane.OUT)))
            self.lanes.point(Lane.OUT)
            self.counts.spilled += length
            start += length

    def _hand_over(self, spilling: tuple[int, int, int]) -> None:
        """The frames of pages that are being written home are free: whoever takes one waits for the copy."""
        start, count, _ = spilling
        self.table.spilled(start, count)

    def _end_spills(self, pages: Ids) -> None:
        """No page of these is being written home any more, as far as the table goes."""
        if self._spilling and (self.table.state[pages] == SPILLING).any():
            for spilling in self._spilling:
                self._hand_over(spilling)
            self._spilling.clear()

    def retire(self) -> None:
        """Free the frames of pages that have come home."""
        while self._spilling and self.lanes.has_passed(Lane.OUT, self._spilling[0][2]):
            self._hand_over(self._spilling.pop(0))

    # Recall

    def recall(self, pages: Ids) -> None:
        """Enqueue the copies of pages that are in no frame; room is made for them."""
        self._end_spills(pages)
        for _, start, count in runs(pages[self.table.state[pages] == ABSENT]):
            done = 0
            while done < count:
                done += self._recall_run(start + done, count - done)

    def _recall_run(self, start: int, count: int) -> int:
        home = int(self.table.home[start])
        assert home >= 0, f"page {start} lies nowhere"
        homes = self.table.home[start : start + count]
        count = int(np.argmin(np.append(homes == np.arange(home, home + count), False)))
        frame, count = self._frames_for(count)
        self._places.claim(Lane.IN, frame, count)
        self.tiers.read(home, self.frames[frame : frame + count])
        self.table.load(start, count, frame)
        self.lanes.point(Lane.IN)
        self.counts.recalled += count
        return count

    def prefetch(self, layer: int) -> None:
        """Recall what is missing of a layer that comes next, as far as nothing that stays has to leave for it."""
        block = self.layers[layer]
        missing = residency.each_once(block.pages, self.table.state == ABSENT)
        if not len(missing):
            return
        room = int(np.count_nonzero(self.table.owner[: self.num_frames] == -1))
        room += sum(count for _, count, _ in self._spilling)
        kept = residency.kept_columns(self.num_frames, len(self.layers), block)
        for index in residency.in_order_of_leaving(len(self.layers), self.current):
            if index != layer and room < len(missing):
                room += len(residency.passing(self.table, self.layers[index], kept))
        for begin in range(0, min(room, len(missing)), self._chunk):
            self.recall(missing[begin : min(begin + self._chunk, room)])

    # Layers

    def assemble(self, block: BlockTable, num_tokens: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer with room for ``num_tokens``, [sequences, heads, num_tokens, dim], contiguous.

        The tokens that the layer holds are in it; the rest is for the caller to write.  They are views of the end of
        the pool, which the next call writes anew, unless somebody still holds them: then that one gets other memory.
        """
        keys, values = self._take_end(sequences, num_tokens)
        if block.length:
            self._gather(block, self.attended(block), keys, values)
        return keys, values

    def attended(self, block: BlockTable) -> Ids:
        """The pages that a layer attends to, [sequences, columns]: all of them."""
        return block.pages

    def _gather(self, block: BlockTable, pages: Ids, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the tokens of pages to where the layer is put together, a chunk at a time."""
        chunk = min(self._chunk, self.num_frames)
        for sequence, row in enumerate(pages):
            for begin in range(0, len(row), chunk):
                part = row[begin : begin + chunk]
                with self._in_frames(part):
                    self._copy_out(part, begin, block.length, keys[sequence], values[sequence])
                self.lanes.point(Lane.COMPUTE)

    @contextlib.contextmanager
    def _in_frames(self, pages: Ids) -> Iterator[None]:
        """Keep pages in frames for the body: what is in none is recalled, what is on its way is waited for in order."""
        table, pinned = self.table, []
        self._end_spills(pages)
        for _, start, count in runs(pages[table.state[pages] == LOADING]):
            table.ready(start, count)
        try:
            state = table.state[pages]
            for _, start, count in runs(pages[state == RESIDENT]):
                table.pin(start, count)
                pinned.append((start, count))
            for _, start, count in runs(pages[state == ABSENT]):
                done = 0
                while done < count:
                    length = self._recall_run(start + done, count - done)
                    table.ready(start + done, length)
                    table.pin(start + done, length)
                    pinned.append((start + done, length))
                    done += length
            yield
        finally:
            for start, count in pinned:
                table.unpin(start, count)

    def _copy_out(self, pages: Ids, column: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Frames to [heads, tokens, dim]; ``column`` is that of the first page."""
        tokens = self.shape.tokens
        for begin, frame, count in runs(self.table.frame[pages]):
            self._places.claim(Lane.COMPUTE, frame, count)
            first = (column + begin) * tokens
            whole = min(count, (length - first) // tokens)
            for target, source in ((keys, self._keys), (values, self._values)):
                if whole:
                    stretch = target[:, first : first + whole * tokens].unflatten(1, (whole, tokens))
                    stretch.copy_(source[frame : frame + whole].permute(1, 0, 2, 3))
                if whole < count:
                    left = length - first - whole * tokens
                    target[:, length - left : length].copy_(source[frame + whole, :, :left])

    def store(self, block: BlockTable, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Bring the tokens behind those that a layer holds from where it was put together to pages of its own.

        If there is no room for them the layer is as before.
        """
        before = block.copy()
        self.share(before.pages)
        try:
            self._own_last(block)
            self._append(block, keys, values)
        except BaseException:
            after = block.pages.copy()
            block.become(before)
            self.release(after)
            raise
        self.release(before.pages)

    def _append(self, block: BlockTable, keys: torch.Tensor, values: torch.Tensor) -> None:
        sequences, _, end, _ = keys.shape
        begin, first = block.length, block.length // self.shape.tokens
        missing = self.shape.pages(end) - block.pages.shape[1]
        if missing:
            block.extend(self.new(sequences * missing).reshape(sequences, missing))
        block.length = end
        for sequence in range(sequences):
            row = block.pages[sequence, first:]
            for at in range(0, len(row), self._chunk):
                self._write(row[at : at + self._chunk], first + at, begin, end, keys[sequence], values[sequence])

    def _own_last(self, block: BlockTable) -> None:
        """Give each sequence a last page of its own; its tokens are in the layer that was put together."""
        if block.length % self.shape.tokens == 0:
            return
        last = block.pages[:, -1]
        for sequence in np.flatnonzero(self.refs[last] > 2):  # one reference is that of `store`
            if self.refs[last[sequence]] > 2:  # the last one that refers to it keeps it
                old = last[sequence : sequence + 1].copy()
                last[sequence] = self.new(1)[0]
                self.release(old)

    def _write(self, pages: Ids, column: int, begin: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Tokens from ``begin`` to ``end`` to pages from ``column`` on; a page in no frame is written from its start."""
        at = 0
        while at < len(pages):
            page = pages[at : at + 1]
            if self.table.state[page[0]] == LOADING:
                self.table.ready(int(page[0]), 1)
            if self.table.state[page[0]] == RESIDENT:
                frame, count, start = int(self.table.frame[page[0]]), 1, max(begin, (column + at) * self.shape.tokens)
            else:
                self._end_spills(page)
                count = next(length for first, _, length in runs(pages[at:]) if first == 0)
                count = int(np.argmin(np.append(self.table.state[pages[at : at + count]] == ABSENT, False)))
                frame, count = self._frames_for(count)
                self.table.load(int(page[0]), count, frame)
                self.table.ready(int(page[0]), count)
                start = (column + at) * self.shape.tokens
            self.table.dirty[pages[at : at + count]] = True
            self._places.claim(Lane.COMPUTE, frame, count)
            self._copy_in(frame, count, column + at, start, end, keys, values)
            at += count

    def _copy_in(
        self, frame: int, count: int, column: int, start: int, end: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """[heads, tokens, dim] to frames; ``start`` lies in the first of them."""
        tokens, first = self.shape.tokens, column * self.shape.tokens
        whole = min(count, (end - first) // tokens) if start == first else 0
        for source, target in ((keys, self._keys), (values, self._values)):
            if whole:
                stretch = source[:, first : first + whole * tokens].unflatten(1, (whole, tokens))
                target[frame : frame + whole].permute(1, 0, 2, 3).copy_(stretch)
            if whole < count:
                low = max(start, first + whole * tokens)
                high = min(end, first + count * tokens)
                inside = low - first - whole * tokens
                target[frame + whole, :, inside : inside + high - low].copy_(source[:, low:high])

    # The end of the pool

    def _take_end(self, sequences: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        self._grow_end(sequences * shape.pages(num_tokens))
        item = shape.dtype.itemsize
        key_bytes = sequences * shape.heads * num_tokens * shape.key_dim * item
        value_bytes = sequences * shape.heads * num_tokens * shape.value_dim * item
        values_at = -(-key_bytes // VALUES_AT) * VALUES_AT
        with torch.inference_mode(False), torch.no_grad():
            memory = self._end_memory(values_at + value_bytes)
            keys = memory[:key_bytes].view(shape.dtype)
            values = memory[values_at : values_at + value_bytes].view(shape.dtype)
        heads = (sequences, shape.heads, num_tokens)
        return keys.view(*heads, shape.key_dim), values.view(*heads, shape.value_dim)

    def _end_memory(self, num_bytes: int) -> torch.Tensor:
        assert self._end is not None
        if self._end.num_views() == 0:
            return self._end.tensor
        # Whoever kept the keys or values of a layer goes on to see them.
        self.counts.lent += 1
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.lanes.torch_device)

    def _grow_end(self, needed: int) -> None:
        """Let the end of the pool hold ``needed`` pages; pages in the frames that it takes leave them."""
        if needed <= self._end_pages and self._end is not None:
            return
        if needed > self.max_pages:
            raise MemoryBudgetError(
                f"kv_cache_max_pages={self.max_pages} is less than one layer of these sequences, to which all tokens "
                f"attend: it has {needed} pages of {self.shape.tokens} tokens; give at least as many"
            )
        wanted = min(self.max_pages, needed + needed // 16)
        first = self.table.num_frames - wanted
        inside = self.table.owner[first : self.num_frames]
        inside = np.sort(inside[inside >= 0])
        self._end_spills(inside)
        inside = inside[self.table.state[inside] != ABSENT]
        self._leave(inside[self.table.state[inside] == LOADING])
        self.evict(inside[self.table.state[inside] == RESIDENT])
        self._end_spills(inside)
        if first < self.num_frames:
            self._places.claim(Lane.COMPUTE, first, self.num_frames - first)
        self.num_frames, self._end_pages = first, wanted
        start = first * self.shape.num_bytes
        start = -(-start // VALUES_AT) * VALUES_AT
        self._end = self.slab.part(start, self.slab.num_bytes - start)

    # Books

    def check(self) -> None:
        """Verify the laws of the table, of references and of homes."""
        self.table.check()
        self.tiers.check()
        held = np.zeros(self.table.num_pages, np.int32)
        for block in self.layers:
            np.add.at(held, block.pages.ravel(), 1)
        assert (held == self.refs).all(), "references do not add up"
        nowhere = (held > 0) & (self.table.state == ABSENT) & (self.table.home < 0)
        assert not nowhere.any(), f"page {int(np.argmax(nowhere))} lies nowhere"
        assert int(np.count_nonzero(held > 0)) + self._free_ids.num_free == self.table.num_pages
        assert not (self.table.owner[self.num_frames :] >= 0).any(), "a page lies where layers are put together"

    def close(self) -> None:
        """Give host memory and the file back; the frames go with the last tensor over them.  May be called again."""
        self._finalizer()
