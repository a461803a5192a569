"""The pool: frames of fast memory, and the place at its end where a layer's pages are put together."""

from __future__ import annotations

import contextlib
import weakref
from itertools import pairwise, product
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from fmstream.core.order import Lane
from fmstream.core.pages import ABSENT, LOADING, RESIDENT
from fmstream.device.device import Part, Slab
from fmstream.device.lanes import Lanes
from fmstream.errors import FmstreamError, MemoryBudgetError
from fmstream.payloads.kv import residency
from fmstream.payloads.kv.blocks import BlockTable, Ids, runs
from fmstream.payloads.kv.frames import Frames
from fmstream.payloads.kv.packing import Packer, Packing
from fmstream.payloads.kv.residency import Kind
from fmstream.payloads.kv.shape import PageShape
from fmstream.payloads.kv.sharing import Sharing
from fmstream.payloads.kv.tiers import Tiers
from fmstream.payloads.kv.turns import Turn

ALIGNMENT: Final = 512
"""Keys and values that were put together begin at multiples of so many bytes, as tensors of their own would."""
CHUNK_BYTES: Final = 16 << 20
"""Recalled and put together at once."""
HEADROOM: Final = 1 / 16
"""Part by which the end of the pool is made larger than needed now."""
MANY: Final = 16
"""Frames for each row of a layer, from which on one of them may lie empty."""


class _New(NamedTuple):
    """A sequence as it was put together, [heads, tokens, dim] each; tokens from ``begin`` to ``end`` are new."""

    begin: int
    end: int
    keys: torch.Tensor
    values: torch.Tensor


class Pool:
    """A number of pages of fast memory for the keys and values of layers of one shape.

    Frames lie at its beginning.  Its end is where a layer is put together (`assemble`): it grows with the sequences,
    and takes frames away.

    Attributes:
        stride: rows of a block table that belong to one sequence.

    Args:
        tiers: where pages go that leave their frames; closed with the pool.
        num_layers: how many layers will be in it.
        max_pages: its size in pages; one frame more is taken, through which pages come where a layer fills the pool.
        packing: how pages are packed that lie in host memory; None leaves them as they are.

    Raises:
        MemoryBudgetError: the device has no room for so many pages.
    """

    stride = 1

    def __init__(
        self,
        lanes: Lanes,
        shape: PageShape,
        tiers: Tiers,
        num_layers: int,
        max_pages: int,
        packing: Packing | None = None,
    ) -> None:
        self.shape = shape
        self.lanes = lanes
        self.turn = Turn(lanes.lock)
        self._num_layers = num_layers
        self.layers: list[BlockTable] = []
        """Block tables in the order in which their layers are called."""
        self.left: list[BlockTable] = []
        """Block tables of layers that are gone; their pages are released when the pool is used next."""
        self.current = 0
        self.num_lent = 0
        """Times that other memory had to be taken, because somebody kept the keys or values of a layer."""
        self._sharing = Sharing()
        self._together: tuple[BlockTable, int, int] | None = None
        """The layer that is put together at the end of the pool, its version, and for how many tokens."""
        self._all_there = False
        self._end_pages = 0
        self._end: Part | None = None
        self._chunk = max(1, CHUNK_BYTES // shape.num_bytes)
        self.tiers = tiers
        self._finalizer = weakref.finalize(self, Tiers.close, self.tiers)
        # Weakly: a cycle would leave memory taken until the next collection.
        room = weakref.WeakMethod(self._make_room)
        self.frames = Frames(lanes, self.tiers, self._take_memory(max_pages), lambda wanted: _called(room, wanted))
        if packing is not None:
            self.frames.packer = Packer(lanes, tiers, self.frames.table, packing, max_pages)

    def _take_memory(self, max_pages: int) -> torch.Tensor:
        """Allocate the slab; its frames, uint8 [n, page_bytes]."""
        shape, num_frames = self.shape, max_pages + 1
        try:
            self.slab: Slab = self.lanes.slab(num_frames * shape.num_bytes + 2 * ALIGNMENT)
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                f"{self.lanes.torch_device} has no room for {max_pages} pages of {shape.num_bytes} bytes of keys and "
                f"values: give a smaller kv_cache_max_pages"
            ) from error
        self.max_pages = max_pages
        with torch.inference_mode(False), torch.no_grad():
            whole = self.slab.part(0, num_frames * shape.num_bytes).tensor
            self._keys, self._values = shape.views(whole.view(shape.dtype).view(num_frames, shape.elements))
            return whole.view(num_frames, shape.num_bytes)

    # What leaves and what comes

    def enter(self, block: BlockTable) -> None:
        """A layer is used next, in the caller's stream."""
        self.lanes.enter(self.slab)
        while self.left:
            gone = self.left.pop()
            self.layers.remove(gone)
            self.frames.release(gone.clear())
        if self._end_pages and not any(layer.length for layer in self.layers):
            self._give_end_back()
        self.current = self.layers.index(block)
        num_layers = max(self._num_layers, len(self.layers))
        self._all_there = sum(layer.length > 0 for layer in self.layers) >= num_layers
        self._reserve(block)
        self.frames.retire()

    def kept(self, block: BlockTable) -> int:
        """Columns at the beginning of a layer that stay in frames."""
        num_layers = max(self._num_layers, len(self.layers))
        return residency.kept_columns(self.frames.num_frames, num_layers, block, self.shape.num_bytes)

    def _reserve(self, block: BlockTable) -> None:
        """Set frames apart for the pages that stay, of layers that are still empty as well; all are like this one.

        Beside those that stay there is one for each row that is being filled, and in a pool of many frames one for the
        next, so that a page that is full need not leave at once.
        """
        frames, num_layers = self.frames, max(self._num_layers, len(self.layers))
        filling = block.num_sequences * num_layers
        coming = filling if frames.num_frames >= MANY * filling else 0
        frames.first_passing = min((self.kept(block) + 1) * filling + coming, frames.num_frames)
        free = int(np.count_nonzero(frames.table.owner[: frames.first_passing] == -1))
        frames.has_spare = self._all_there and free > coming

    def _make_room(self, wanted: int) -> int:
        """Let up to ``wanted`` pages leave their frames, all of one kind; for how many there is room now."""
        frames, total, before = self.frames, 0, Kind.PASSING
        for pages, kind in residency.leaving(frames.table, self.layers, self.current, self.kept, wanted):
            if kind is not before and (total or frames.use_spare()):
                break
            total, before = total + len(pages), kind
            if kind is Kind.LOADING:
                frames.vacate(pages)
            else:
                frames.evict(pages)
        if not total:
            frames.use_spare()
        return total or frames.num_free()

    def prefetch(self, block: BlockTable) -> None:
        """Recall what is missing of the layer that comes next, as far as nothing that stays has to leave for it."""
        frames, table = self.frames, self.frames.table
        missing = residency.each_once(block.pages, table.state == ABSENT)
        if not len(missing) or not self._all_there:  # layers that are still to come need the room
            return
        room, kept = frames.num_free_for_passing(), self.kept(block)
        for index in residency.in_order_of_leaving(len(self.layers), self.current):
            if self.layers[index] is not block and room < len(missing):
                room += len(residency.passing(table, self.layers[index], kept))
        missing = missing[:room]
        # If a page cannot leave for it, the layer itself may still get by; what it needs is asked for again then.
        with contextlib.suppress(FmstreamError):
            for begin in range(0, len(missing), self._chunk):
                frames.recall(missing[begin : begin + self._chunk])

    def passing_frames(self) -> int:
        """Frames through which a layer may pass at once when it is put together."""
        return self.frames.num_frames

    def at_once(self) -> int:
        """Pages of a layer that are held in frames at once."""
        return max(1, min(self._chunk, self.passing_frames()))

    def in_frames(self, frame: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in consecutive frames, [count, heads, tokens, dim] each; views."""
        return self._keys[frame : frame + count], self._values[frame : frame + count]

    # A layer put together

    def attended(self, block: BlockTable) -> Ids:
        """The pages that a layer attends to, [sequences, columns]: all of them."""
        return block.pages

    def together(self, block: BlockTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as it is."""
        if self._together == (block, block.version, block.length):
            return self._views(block.num_sequences, block.length)
        return self.assemble(block, block.num_sequences, block.length)

    def assemble(self, block: BlockTable, sequences: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer with room for ``num_tokens``, [sequences, heads, num_tokens, dim], contiguous.

        The tokens that the layer holds are in it; the rest is for the caller to write.  They are views of the end of
        the pool, which the next layer overwrites, unless somebody still holds them: then that one gets other memory.
        """
        self._grow_end(sequences * self.shape.pages(num_tokens))
        self._together = None
        keys, values = self._views(sequences, num_tokens, writing=True)
        if block.length:
            self._gather(self.attended(block), block.length, keys, values)
        self._together = (block, block.version, num_tokens) if self._is_end(keys) else None
        return keys, values

    def _gather(self, pages: Ids, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the tokens of pages to where the layer is put together, a chunk at a time."""
        chunk = self.at_once()
        order = list(product(range(len(pages)), range(0, pages.shape[1], chunk)))
        if len(pages) > 1 and len(np.unique(pages)) < pages.size:
            order.sort(key=lambda at: at[1])  # a page of several sequences is used for all of them while it is there
        for sequence, begin in order:
            part = pages[sequence, begin : begin + chunk]
            with self.frames.holding(part):
                self._copy_out(part, begin, length, keys[sequence], values[sequence])
            self.lanes.point(Lane.COMPUTE)

    def _copy_out(self, pages: Ids, column: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Frames to [heads, tokens, dim]; ``column`` is that of the first page."""
        tokens = self.shape.tokens
        for begin, frame, count in runs(self.frames.table.frame[pages]):
            self.frames.claim(Lane.COMPUTE, frame, count)
            first = (column + begin) * tokens
            whole = min(count, (length - first) // tokens)
            behind = first + whole * tokens
            for target, source in ((keys, self._keys), (values, self._values)):
                if whole:
                    stretch = _by_page(target[:, first:behind], tokens)
                    stretch.copy_(source[frame : frame + whole].permute(1, 0, 2, 3))
                if whole < count:
                    target[:, behind:length].copy_(source[frame + whole, :, : length - behind])

    # New tokens

    def store(self, block: BlockTable, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Bring the tokens behind those that a layer holds from where it was put together to pages of its own.

        If there is no room for them the layer is as before.
        """
        frames, length, columns = self.frames, block.length, block.pages.shape[1]
        last = block.pages[:, -1:].copy()
        frames.share(np.unique(last))
        try:
            self._own_last(block)
            self._append(block, keys, values)
        except BaseException:
            after = block.cut(max(columns - 1, 0))
            if columns:
                block.extend(last)
                frames.share(last)
            else:
                block.clear()
            block.length = length
            frames.release(after)
            frames.release(np.unique(last))
            raise
        frames.release(np.unique(last))
        if self._is_end(keys):
            self._together = (block, block.version, block.length)

    def _own_last(self, block: BlockTable) -> None:
        """Give each sequence a last page of its own; its tokens are in the layer that was put together."""
        if block.length % self.shape.tokens == 0:
            return
        last, frames = block.pages[:, -1], self.frames
        for sequence in np.flatnonzero(frames.refs[last] > 2):  # one reference is that of `store`
            if frames.refs[last[sequence]] > 2:  # the last sequence that refers to it keeps it
                frames.release(last[sequence : sequence + 1].copy())
                last[sequence] = frames.new(1)[0]

    def _append(self, block: BlockTable, keys: torch.Tensor, values: torch.Tensor) -> None:
        sequences, _, end, _ = keys.shape
        begin, first = block.length, block.length // self.shape.tokens
        missing = self.shape.pages(end) - block.pages.shape[1]
        if missing:
            block.extend(self.frames.new(sequences * missing).reshape(sequences, missing))
        self._reserve(block)
        block.length = end
        shared = self._sharing.share(self, block, begin, keys, values)
        kept, last = self.kept(block), block.pages.shape[1] - 1
        cuts = sorted({*range(first, last, self._chunk), min(max(kept, first), last), last, last + 1})
        for sequence in range(sequences):
            new = _New(begin, end, keys[sequence], values[sequence])
            for low, high in pairwise(cuts):
                for _, column, count in runs(low + np.flatnonzero(~shared[sequence, low:high])):
                    pages = block.pages[sequence, column : column + count]
                    self._write(pages, column, new, staying=low < kept or low == last)
        self.lanes.point(Lane.COMPUTE)

    def _write(self, pages: Ids, column: int, new: _New, *, staying: bool) -> None:
        """New tokens to pages from ``column`` on; one without a frame is written as a whole."""
        frames, table, at = self.frames, self.frames.table, 0
        while at < len(pages):
            page, start = int(pages[at]), (column + at) * self.shape.tokens
            if table.state[page] == LOADING:
                frames.land(pages[at : at + 1])
            if table.state[page] == RESIDENT:
                frame, count, start = int(table.frame[page]), 1, max(new.begin, start)
            else:
                _, _, count = next(runs(pages[at:]))
                frame, count = frames.fill(page, count, staying=staying)
            table.dirty[page : page + count] = True
            frames.claim(Lane.COMPUTE, frame, count)
            self._copy_in(frame, count, column + at, start, new)
            at += count

    def _copy_in(self, frame: int, count: int, column: int, start: int, new: _New) -> None:
        """[heads, tokens, dim] to frames, from the token ``start`` on, which lies in the first of them."""
        tokens, first = self.shape.tokens, column * self.shape.tokens
        whole = min(count, (new.end - first) // tokens) if start == first else 0
        behind = first + whole * tokens
        low, high = max(start, behind), min(new.end, first + count * tokens)
        for source, target in ((new.keys, self._keys), (new.values, self._values)):
            if whole:
                stretch = _by_page(source[:, first:behind], tokens)
                target[frame : frame + whole].permute(1, 0, 2, 3).copy_(stretch)
            if low < high:
                target[frame + whole, :, low - behind : high - behind].copy_(source[:, low:high])

    # The end of the pool

    def _views(self, sequences: int, num_tokens: int, *, writing: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        rows = sequences * shape.heads * num_tokens * shape.dtype.itemsize
        values_at = -(-rows * shape.key_dim // ALIGNMENT) * ALIGNMENT
        end = values_at + rows * shape.value_dim
        with torch.inference_mode(False), torch.no_grad():
            assert self._end is not None
            memory = self._end.tensor
            if writing and (end > memory.numel() or self._end.num_views()):
                # Whoever kept the keys or values of a layer goes on to see them.
                self.num_lent += 1
                memory = torch.empty(end, dtype=torch.uint8, device=self.lanes.torch_device)
            elif writing:
                self.lanes.follow()  # keys of another stream are gone, but not all that it was given of them
            keys = memory[: rows * shape.key_dim].view(shape.dtype)
            values = memory[values_at:end].view(shape.dtype)
        heads = (sequences, shape.heads, num_tokens)
        return keys.view(*heads, shape.key_dim), values.view(*heads, shape.value_dim)

    def _is_end(self, keys: torch.Tensor) -> bool:
        return self._end is not None and self._end.is_under(keys)

    def _grow_end(self, needed: int) -> None:
        """Let the end of the pool hold ``needed`` pages; pages in the frames that it takes leave them."""
        if needed <= self._end_pages:
            return
        if needed > self.max_pages:
            raise MemoryBudgetError(
                f"kv_cache_max_pages={self.max_pages} is less than one layer of these sequences, to which all tokens "
                f"attend: it has {needed} pages of {self.shape.tokens} tokens; give at least as many"
            )
        if self._end is not None and self._end.num_views():
            return  # a larger one would lie over what somebody still looks at: that layer gets other memory
        wanted = min(self.max_pages, needed + int(needed * HEADROOM))
        first = self.max_pages + 1 - wanted
        self.frames.give_up(first)
        start = -(-first * self.shape.num_bytes // ALIGNMENT) * ALIGNMENT
        self._end, self._together = self.slab.part(start, self.slab.num_bytes - start), None
        self._end_pages = wanted
        self._reserve(self.layers[self.current])

    def _give_end_back(self) -> None:
        """All pages are frames again, unless somebody still looks at the keys or values of a layer."""
        if self._end is None or self._end.num_views():
            return
        self.lanes.follow()
        first, count = self.frames.num_frames, self.frames.table.num_frames
        self.frames.claim(Lane.COMPUTE, first, count - first)
        self.frames.num_frames = count
        self._end, self._end_pages, self._together = None, 0, None

    # Size

    def resize(self, max_pages: int, *, emptied: bool = False) -> None:
        """Take other memory, of so many pages.  A larger one gets the frames of the old one, which is there meanwhile.

        For a smaller one, or if it is to be ``emptied``, all pages leave their frames first: never both are there.

        Raises:
            MemoryBudgetError: a tier has no room, or the device; the pool has the size that it had.
        """
        frames, before = self.frames, self.max_pages
        emptied = emptied or max_pages < before
        if emptied:
            frames.give_up(0)
            del self.slab
            frames.memory = self._keys = self._values = torch.empty(0)
            self._end = None
        try:
            memory = self._take_memory(max_pages)
        except MemoryBudgetError:
            if emptied:
                self._adopt(self._take_memory(before))
            raise
        self._adopt(memory)

    def _adopt(self, memory: torch.Tensor) -> None:
        with torch.no_grad():
            self.frames.become(memory)
        self._end, self._end_pages, self._together = None, 0, None

    # Books

    @property
    def is_used(self) -> bool:
        """Whether anything is in it."""
        return any(layer.length and layer not in self.left for layer in self.layers)

    @property
    def is_closed(self) -> bool:
        """Whether its host memory was given back."""
        return not self._finalizer.alive

    def check(self) -> None:
        """Verify the laws of pages, references and homes."""
        for block in self.layers:
            columns, needed = block.pages.shape[1], self.shape.pages(block.length)
            assert columns == needed, f"{columns} pages for {block.length} tokens"
        assert self._keys.data_ptr() == self.frames.memory.data_ptr(), "frames lie in other memory than their pages"
        tables = [block.pages.ravel() for block in self.layers]
        self.frames.check(np.concatenate(tables) if tables else np.empty(0, np.int32))

    @property
    def device_bytes(self) -> int:
        """Fast memory that is taken."""
        packer = self.frames.packer
        return self.slab.num_bytes + (packer.device_bytes if packer is not None else 0)

    def is_sound(self) -> bool:
        """Whether the laws hold, for somebody who left in the middle of a change."""
        try:
            self.check()
        except Exception:  # any: arrays that do not fit, say
            return False
        return True

    def close(self) -> None:
        """Give host memory and the file back; the frames go with the last tensor over them.  May be called again."""
        self._finalizer()


def _by_page(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """[heads, n * tokens, dim] as [heads, n, tokens, dim]; a view."""
    heads, length, dim = tensor.shape
    return tensor.view(heads, length // tokens, tokens, dim)


def _called(method: weakref.WeakMethod[Any], wanted: int) -> int:
    bound = method()
    assert bound is not None
    return int(bound(wanted))
