"""Frames of fast memory and the pages in them: recall, spill, and who refers to a page."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fmstream.core.freeruns import FreeRuns
from fmstream.core.order import Lane, Places
from fmstream.core.pages import ABSENT, LOADING, RESIDENT, SPILLING, PageTable
from fmstream.device.lanes import Lanes
from fmstream.errors import StreamError
from fmstream.payloads.kv.blocks import Ids, first_set, longest, runs, steps
from fmstream.payloads.kv.filereads import Reading
from fmstream.payloads.kv.packing import Packer
from fmstream.payloads.kv.tiers import FILE, PACKED, Tiers


@dataclass(slots=True)
class PageCounts:
    """Pages that were recalled and in how many bytes, written home, and dropped because a good copy was at home."""

    recalled: int = 0
    recalled_bytes: int = 0
    spilled: int = 0
    dropped: int = 0


@dataclass(slots=True, eq=False)
class _Coming:
    """Pages of consecutive numbers that are being read from the file for consecutive frames."""

    start: int
    count: int
    frame: int
    reading: Reading


class Frames:
    """Moves pages between frames and their homes.

    All is enqueued: the host waits only for what goes to a file, and for what no worker has read when it is needed.

    A spill is a transaction: the page keeps its frame while it is being written home.  Once the copy is enqueued the
    frame can be taken, for whoever takes it waits in order for the copy, and so does whoever reads the home.  A page is
    dropped only if its home holds the same.

    Attributes:
        memory: the frames, uint8 [n, page_bytes].
        num_frames: frames that may be used, from the first.
        make_room: asked to let so many pages leave their frames; how many did.
        packer: packs pages that are home; None where they stay as they are.
        first_passing: the first frame that pages pass through; those before are for pages that stay, unless
        has_spare: more of these are there than pages that will come to stay.
    """

    def __init__(self, lanes: Lanes, tiers: Tiers, memory: torch.Tensor, make_room: Callable[[int], int]) -> None:
        self.lanes = lanes
        self.tiers = tiers
        self.memory = memory
        self.num_frames = len(memory)
        self.make_room = make_room
        self.packer: Packer | None = None
        self.table = PageTable(0, self.num_frames)
        self.refs = np.zeros(0, np.int32)
        self.counts = PageCounts()
        self._free_ids = FreeRuns()
        self._places = Places(self.num_frames, lanes)
        self.first_passing = self._next = 0
        self.has_spare = True
        self._spilling: list[tuple[int, int, int]] = []
        """Runs that are being written home: (first page, count, point of the lane OUT)."""
        self._coming: list[_Coming] = []

    # Pages

    def new(self, count: int) -> Ids:
        """Absent pages with one reference each, of consecutive numbers where possible."""
        found: list[Ids] = [np.empty(0, np.int32)]
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
        pages = np.concatenate(found)
        self.refs[pages] = 1
        return pages

    def share(self, pages: Ids) -> None:
        """Add a reference for each time a page occurs."""
        np.add.at(self.refs, pages.ravel(), 1)

    def release(self, pages: Ids) -> None:
        """Take a reference for each time a page occurs; what nobody refers to is forgotten, wherever it lies."""
        np.subtract.at(self.refs, pages.ravel(), 1)
        gone = np.unique(pages)
        gone = gone[self.refs[gone] == 0]
        self.end_spills(gone)
        self.vacate(gone)
        homes = self.table.home[gone]
        for _, home, count in runs(homes[homes >= 0]):
            self.tiers.give(home, count)
        self.table.home[gone] = -1
        for _, start, count in runs(gone):
            self._free_ids.give(start, count)

    def vacate(self, pages: Ids) -> None:
        """Let pages leave their frames, whatever is in them; with some that are being read all read with them leave."""
        for coming in self._coming_among(pages):
            self._forget(coming)
        self._leave(pages)

    def _leave(self, pages: Ids) -> None:
        state = self.table.state[pages]
        self.table.dirty[pages] = False
        for _, start, count in runs(pages[state == LOADING]):
            self.table.cancel(start, count)
        for _, start, count in runs(pages[state == RESIDENT]):
            self.table.evict(start, count)

    # Frames

    def claim(self, lane: Lane, frame: int, count: int) -> None:
        """Let a lane use frames, behind what every other lane does with them."""
        self._places.claim(lane, frame, count)

    def claim_each(self, lane: Lane, frames: Ids) -> None:
        """The same for frames in any order."""
        self._places.claim_each(lane, frames)

    def num_free(self) -> int:
        """Frames that can be taken without a page having to leave."""
        free = int(np.count_nonzero(self.table.owner[: self.num_frames] == -1))
        return free + sum(count for _, count, _ in self._spilling)

    def num_free_for_passing(self) -> int:
        """The same for pages that pass through."""
        first = 0 if self.has_spare else self.first_passing
        free = int(np.count_nonzero(self.table.owner[first : self.num_frames] == -1))
        return free + sum(count for _, count, _ in self._spilling)

    def use_spare(self) -> bool:
        """Let pages pass through frames that were for others; whether that is new and any is free."""
        is_new, self.has_spare = not self.has_spare, True
        return is_new and self.num_free() > 0

    def num_taken(self) -> int:
        """Frames with a page."""
        return int(np.count_nonzero(self.table.owner[: self.num_frames] != -1))

    def take(self, wanted: int, *, staying: bool = False) -> tuple[int, int]:
        """Consecutive free frames, up to ``wanted``: (first, count).  Pages leave where there are none.

        For pages that stay they are the first; the others go round behind these, so that what comes in order lies in
        order, and leaves in order.
        """
        while True:
            free = self.table.owner[: self.num_frames] == -1
            first, count = self._first_free(free, wanted) if staying else self._next_free(free, wanted)
            if count:
                return first, count
            if self._spilling:  # all of them, for they lie side by side
                self._hand_over_all()
            elif not self.make_room(wanted):
                raise AssertionError(f"all {self.num_frames} frames are pinned")

    def _first_free(self, free: NDArray[np.bool_], wanted: int) -> tuple[int, int]:
        first, count = longest(free[: self.first_passing], wanted)
        return (first, count) if count else longest(free, wanted)

    def _next_free(self, free: NDArray[np.bool_], wanted: int) -> tuple[int, int]:
        """The first run behind what was taken last; one of the frames for pages that stay only if these are spare."""
        found = self.first_passing + np.flatnonzero(free[self.first_passing :])
        if not len(found) and self.has_spare:
            found = np.flatnonzero(free)
        if not len(found):
            return 0, 0
        at = int(np.searchsorted(found, self._next)) % len(found)
        first, count = int(found[at]), steps(found[at : at + wanted])
        self._next = first + count
        return first, count

    def fill(self, start: int, count: int, *, staying: bool) -> tuple[int, int]:
        """Frames for absent pages of consecutive numbers, up to ``count``, that the compute lane writes next."""
        self.end_spills(np.arange(start, start + count, dtype=np.int32))
        frame, count = self.take(count, staying=staying)
        self.table.load(start, count, frame)
        self.table.ready(start, count)
        return frame, count

    # Spill

    def evict(self, pages: Ids) -> None:
        """Resident pages leave their frames: dirty ones for their homes, the others for nowhere."""
        dirty = self.table.dirty[pages]
        for _, start, count in runs(pages[~dirty]):
            self.table.evict(start, count)
            self.counts.dropped += count
        for _, start, count in runs(pages[dirty]):
            self._spill(start, count)

    def _spill(self, start: int, count: int) -> None:
        """Write resident pages of consecutive numbers home."""
        table, end = self.table, start + count
        self._give_packed(start, count)
        while start < end:
            frame, home = int(table.frame[start]), int(table.home[start])
            count = steps(table.frame[start:end])
            count = (
                steps(table.home[start : start + count])
                if home >= 0
                else first_set(table.home[start : start + count] >= 0)
            )
            is_new = home < 0
            if is_new:
                home, count = self.tiers.take(count)
            try:
                self.claim(Lane.OUT, frame, count)
                self.tiers.write(self.memory[frame : frame + count], home)
            except BaseException:
                if is_new:
                    self.tiers.give(home, count)
                raise
            table.spill(start, count)
            table.home[start : start + count] = np.arange(home, home + count)
            point = self.lanes.upcoming(Lane.OUT)
            self._spilling.append((start, count, point))
            self.lanes.point(Lane.OUT)
            if self.packer is not None and home < PACKED:
                self.packer.written(start, count, point)
            self.counts.spilled += count
            start += count

    def _give_packed(self, start: int, count: int) -> None:
        """Let none of some pages have a packed home: they have changed since, and are written as they are."""
        homes = self.table.home[start : start + count]
        packed = (homes >= PACKED) & (homes < FILE)
        for _, home, number in runs(homes[packed]):
            self.tiers.give(home, number)
        homes[packed] = -1

    def _hand_over(self, spilling: tuple[int, int, int]) -> None:
        """The frames of pages that are being written home are free: whoever takes one waits for the copy."""
        start, count, _ = spilling
        self.table.spilled(start, count)

    def _hand_over_all(self) -> None:
        for spilling in self._spilling:
            self._hand_over(spilling)
        self._spilling.clear()

    def end_spills(self, pages: Ids) -> None:
        """As far as the table goes, none of these pages is being written home any more."""
        if self._spilling and (self.table.state[pages] == SPILLING).any():
            self._hand_over_all()

    def retire(self) -> None:
        """Free the frames of pages that have come home, enqueue the copies of those that were read, and pack some."""
        while self._spilling and self.lanes.has_passed(Lane.OUT, self._spilling[0][2]):
            self._hand_over(self._spilling.pop(0))
        for coming in [coming for coming in self._coming if self.tiers.reads.is_read(coming.reading)]:
            self._bring(coming)
        if self.packer is not None:
            self.packer.work()

    def give_up(self, first: int) -> None:
        """Use only the frames before ``first`` from now on; the compute lane may write to the others."""
        inside = self.table.owner[first : self.num_frames]
        inside = np.sort(inside[inside >= 0])
        self.end_spills(inside)
        state = self.table.state[inside]
        self.vacate(inside[state == LOADING])
        self.evict(inside[state == RESIDENT])
        self.end_spills(inside)
        if first < self.num_frames:
            self.claim(Lane.COMPUTE, first, self.num_frames - first)
            self.num_frames = first

    # Recall

    def recall(self, pages: Ids, *, staying: bool = False) -> None:
        """Enqueue the copies of pages that are in no frame; room is made for them.

        Pages in the file are only begun to be read, as many as there is room for: the host waits for none.
        """
        self.end_spills(pages)
        for _, start, count in runs(pages[self.table.state[pages] == ABSENT]):
            while count and (done := self._recall_run(start, count, staying=staying, patient=False)):
                start, count = start + done, count - done

    def recall_each(self, pages: Ids) -> None:
        """The same for absent pages that lie apart, as far as frames are free: each comes to any of them."""
        self.end_spills(pages)
        free = np.flatnonzero(self.table.owner[: self.num_frames] == -1)
        for page, frame in zip(pages.tolist(), free.tolist(), strict=False):
            if self.table.home[page] < FILE or self._has_room_to_read(patient=False):
                self._enqueue(page, 1, frame)
        self.lanes.point(Lane.IN)

    def _recall_run(self, start: int, count: int, *, staying: bool, patient: bool) -> int:
        """Enqueue the copy of the first of some absent pages of consecutive numbers; how many, 0 if it is not worth it.

        ``patient``: wait for room to read to.
        """
        home = int(self.table.home[start])
        assert home >= 0, f"page {start} lies nowhere"
        count = steps(self.table.home[start : start + count])
        if home >= FILE:
            if not self._has_room_to_read(patient):
                return 0
            count = min(count, self.tiers.reads.room())
        frame, count = self.take(count, staying=staying)
        # Pages that had to leave may have had others packed, these among them: their homes need not go on by one.
        count = steps(self.table.home[start : start + count])
        self._enqueue(start, count, frame)
        self.lanes.point(Lane.IN)
        return count

    def _enqueue(self, start: int, count: int, frame: int) -> None:
        """Let absent pages with consecutive homes come to free frames; workers read those in the file."""
        home = int(self.table.home[start])
        if home >= FILE:
            reading = self.tiers.reads.begin(home - FILE, count)
            assert reading.count == count
            self._coming.append(_Coming(start, count, frame, reading))
        elif home >= PACKED:
            assert self.packer is not None
            target = self.memory[frame : frame + count]
            self.packer.bring(home, target, lambda at, number: self.claim(Lane.UNPACK, frame + at, number))
            self._count_recalled(count, self.packer.packed_bytes)
        else:
            self.claim(Lane.IN, frame, count)
            self.tiers.read(home, self.memory[frame : frame + count])
            self._count_recalled(count, self.tiers.page_bytes)
        self.table.load(start, count, frame)

    def _count_recalled(self, count: int, page_bytes: int) -> None:
        self.counts.recalled += count
        self.counts.recalled_bytes += count * page_bytes

    def copy_home(self, home: int, target: torch.Tensor) -> int:
        """Enqueue copies of pages from consecutive homes to memory that is no frame; of how many of them."""
        if home < FILE:
            self.tiers.read(home, target)
            return len(target)
        self._has_room_to_read(patient=True)
        reading = self.tiers.reads.begin(home - FILE, len(target))
        self.tiers.reads.land(reading, target[: reading.count])
        return reading.count

    def _has_room_to_read(self, patient: bool) -> bool:
        reads = self.tiers.reads
        while not reads.room():
            if not patient:
                return False
            if not reads.make_room():
                oldest = self._coming[0]
                try:
                    self._bring(oldest)
                except StreamError:
                    if self.table.pins[oldest.start]:  # it is needed now, not later
                        raise
                    self._forget(oldest)
        return True

    def _coming_among(self, pages: Ids) -> list[_Coming]:
        """What is being read for any of these pages."""
        if not self._coming:
            return []
        named = np.zeros(self.table.num_pages, np.bool_)
        named[pages] = True
        return [coming for coming in self._coming if named[coming.start : coming.start + coming.count].any()]

    def _bring(self, coming: _Coming) -> None:
        """Wait for what is being read, and enqueue its copy to its frames.

        Raises:
            StreamError: it cannot be read; its pages are in no frame.
        """
        frame, count = coming.frame, coming.count
        self.claim(Lane.IN, frame, count)
        self.tiers.reads.land(coming.reading, self.memory[frame : frame + count])
        self.lanes.point(Lane.IN)
        self._count_recalled(count, self.tiers.page_bytes)
        self._coming.remove(coming)

    def land(self, pages: Ids) -> None:
        """Count pages that are on their way as being in their frames: whoever uses one waits in order.

        Those that were begun to be read ahead, and could not be, are in no frame: whoever needs them tries again.
        """
        self._bring_or_forget(self._coming_among(pages))
        for _, start, count in runs(pages[self.table.state[pages] == LOADING]):
            self.table.ready(start, count)

    @contextlib.contextmanager
    def holding(self, pages: Ids, *, staying: bool = False) -> Iterator[None]:
        """Keep pages in frames for the body: what is in none is recalled, what is on its way is waited for in order.

        Each page is named once; those that are recalled pass, or are ``staying``.
        """
        table: PageTable = self.table
        pinned: list[Ids] = []
        self.end_spills(pages)
        self.land(pages)
        try:
            state = table.state[pages]
            pinned.append(pages[state == RESIDENT])
            table.pin_each(pinned[0])
            for _, start, count in runs(pages[state == ABSENT]):
                while count:
                    done = self._recall_run(start, count, staying=staying, patient=True)
                    table.ready(start, done)
                    table.pin(start, done)
                    pinned.append(np.arange(start, start + done, dtype=np.int32))
                    start, count = start + done, count - done
            for coming in self._coming_among(pages):  # only now, so that all of them are read side by side
                self._bring(coming)
            yield
        finally:
            for held in pinned:
                table.pin_each(held, -1)
            for coming in self._coming_among(pages):
                self._forget(coming)

    def _bring_or_forget(self, wanted: list[_Coming]) -> None:
        for coming in wanted:
            try:
                self._bring(coming)
            except StreamError:
                self._forget(coming)

    def _forget(self, coming: _Coming) -> None:
        """Let pages that did not come leave the frames that they were to have."""
        self._coming.remove(coming)
        self.tiers.reads.drop(coming.reading)
        self._leave(np.arange(coming.start, coming.start + coming.count, dtype=np.int32))

    # Books

    def become(self, memory: torch.Tensor) -> None:
        """Use other memory, with the frames of the old one, as far as they were used, copied to its beginning.

        No frame of the old one may be used where the new one has fewer.
        """
        self._bring_or_forget(list(self._coming))
        count, num_frames = min(self.num_frames, len(memory)), len(memory)
        if (self.table.owner >= 0).any():
            self.claim(Lane.COMPUTE, 0, count)
            memory[:count].copy_(self.memory[:count])
        self.table.resize(num_frames)
        self._places = Places(num_frames, self.lanes)
        self.claim(Lane.COMPUTE, 0, num_frames)
        self.memory, self.num_frames = memory, num_frames

    def check(self, held: Ids) -> None:
        """Verify the laws of the table and the tiers; ``held`` are all pages that block tables refer to, each time."""
        self.table.check()
        self.tiers.check()
        assert len(self.memory) == self.table.num_frames, "there is no memory for the frames"
        assert sum(count for _, count, _ in self._spilling) == self.table.counts().spilling, "spills do not add up"
        refs = np.bincount(held, minlength=self.table.num_pages)
        assert (refs == self.refs).all(), "references do not add up"
        nowhere = (refs > 0) & (self.table.state == ABSENT) & (self.table.home < 0)
        nowhere |= (refs > 0) & (self.table.state == RESIDENT) & ~self.table.dirty & (self.table.home < 0)
        assert not nowhere.any(), f"page {int(np.argmax(nowhere))} lies nowhere"
        assert int(np.count_nonzero(refs)) + self._free_ids.num_free == self.table.num_pages
        homes, tiers = self.table.home[self.table.home >= 0], self.tiers.counts()
        assert len(np.unique(homes)) == len(homes) == tiers.host_pages + tiers.file_pages, "homes do not add up"
        assert not (self.table.owner[self.num_frames :] >= 0).any(), "a page lies where layers are put together"
        assert not self.table.pins.any(), "a page is still pinned"
