"""Loads to an accelerator: enqueued on its copy stream, and waited for by its compute stream, not by the host.

What lies in pinned memory is copied from there.  Everything else comes through pinned *staging*, to which the prefetch
actor brings it in chunks; the host waits only where that is late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from fmstream.actors.chunks import Piece
from fmstream.actors.loads import GRACE_SECONDS, MAX_REQUESTS, Loads
from fmstream.actors.prefetch import DONE, PrefetchActor
from fmstream.actors.runs import Loaded, Payload, Run
from fmstream.actors.staging import StagingRing
from fmstream.actors.tape import StreamTape, Timeline
from fmstream.core.pages import PageTable
from fmstream.core.ring import Record
from fmstream.core.telemetry import Telemetry
from fmstream.device.accelerator import Accelerator, DeviceSlab, Mark, Stream
from fmstream.device.device import Slab
from fmstream.device.homes import MemoryHome
from fmstream.device.pinned import PinnedBlock

CHUNK_BYTES: Final = 16 << 20
"""Staged at once: large enough for the disk, small enough to copy early."""
STAGED_RUNS: Final = 3
"""Staging holds so many runs of the largest size seen,"""
STAGING_BYTES: Final = 256 << 20
"""but is no larger than this."""

Copies = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Targets and sources."""


class _Use(NamedTuple):
    """Frames that something was computed with, up to a mark."""

    start: int
    end: int
    mark: Mark


@dataclass(slots=True, eq=False)
class _Chunk:
    """A stretch of a run that goes through staging; ``place`` is where, once it has been asked for."""

    loaded: Loaded
    start: int
    num_bytes: int
    place: int = -1


class Uploads(Loads):
    """Enqueues copies to an accelerator."""

    has_streams = True

    def __init__(
        self,
        payload: Payload,
        device: Accelerator,
        prefetch: PrefetchActor,
        telemetry: Telemetry,
        timeline: Timeline,
    ) -> None:
        super().__init__(payload, prefetch, telemetry)
        self.device = device
        self.timeline = timeline
        self.staging = StagingRing(device)
        self._tape: StreamTape | None = None
        self._copies: dict[tuple[int, int], tuple[Run, DeviceSlab, Copies]] = {}
        self._uses: list[_Use] = []
        self._users: dict[int, dict[int, Stream]] = {}
        """Streams that were let to use what a ticket brought."""
        self._stream = -1
        """The stream that was let to use all that is shown, or -1."""
        self._waiting: deque[_Chunk] = deque()
        """Chunks for which there is no room in staging yet."""
        self._reading: dict[int, _Chunk] = {}
        """Chunks that are being brought to staging, by the prefetch actor's tickets."""
        self._num_left: dict[int, int] = {}
        """Chunks of a ticket that have not been copied yet."""

    def begin(self, pages: PageTable) -> None:
        """Work for a new page table; nothing is on its way."""
        super().begin(pages)
        self.barrier()
        self._copies.clear()
        self._uses.clear()
        self._users.clear()
        self._num_left.clear()
        self._waiting.clear()
        if not self.staging.is_whole(len(self._reading)):
            self._leave_behind()  # something was interrupted

    def tape(self) -> StreamTape:
        """What takes the times of a pass that begins now."""
        self._tape = StreamTape(self.device, self.telemetry, self.timeline)
        return self._tape

    def homes_changed(self) -> None:
        """Masters may lie elsewhere by now."""
        super().homes_changed()
        self._copies.clear()

    # On the way

    def _start(self, loaded: Loaded, slab: Slab) -> None:
        assert isinstance(slab, DeviceSlab)
        loaded.slab = slab
        copies = self._direct(loaded.run, loaded.part.address, slab)
        if copies is None:
            starts = range(0, loaded.run.num_bytes, CHUNK_BYTES)
            self._num_left[loaded.ticket] = len(starts)
            self._waiting += [_Chunk(loaded, at, min(CHUNK_BYTES, loaded.run.num_bytes - at)) for at in starts]
            self._pump()
        else:
            self._has_come(loaded, self._enqueue(loaded, copies))
            self._count(loaded, copies)

    def _count(self, loaded: Loaded, copies: Copies) -> None:
        """Count what copies take by what the link was seen to do: to time each would cost more than it tells."""
        costs, telemetry = self.device.costs, self.telemetry
        telemetry.link_bytes += loaded.run.num_bytes
        if costs is not None:
            telemetry.link_seconds += len(copies) * costs.latency_seconds
            telemetry.link_seconds += loaded.run.num_bytes / costs.bytes_per_second

    def _direct(self, run: Run, address: int, slab: DeviceSlab) -> Copies | None:
        """The copies of a run whose masters are all pinned, neighbours joined; None if one is not."""
        known = self._copies.get((run.start, address))
        if known is not None and known[0] is run and known[1] is slab:
            return known[2]
        joined: list[tuple[PinnedBlock, int, int, int]] = []
        for piece in self.pieces(run, address):
            if piece.num_bytes == 0:
                continue
            home = piece.home
            block = self.device.pins.find(home.address, home.num_bytes) if isinstance(home, MemoryHome) else None
            if block is None:
                return None
            assert isinstance(home, MemoryHome)
            source = home.address + piece.home_offset - block.address
            target = piece.dst - slab.address
            if joined:
                before, from_, to, num_bytes = joined[-1]
                gap = source - from_ - num_bytes
                if before is block and 0 <= gap == target - to - num_bytes:
                    joined[-1] = (block, from_, to, num_bytes + gap + piece.num_bytes)
                    continue
            joined.append((block, source, target, piece.num_bytes))
        with torch.inference_mode(False):
            copies = tuple(
                (slab.memory[target : target + num_bytes], block.tensor[source : source + num_bytes])
                for block, source, target, num_bytes in joined
            )
        if len(self._copies) >= MAX_REQUESTS:
            self._copies.clear()
        self._copies[run.start, address] = (run, slab, copies)
        return copies

    def _enqueue(self, loaded: Loaded, copies: Copies) -> Mark:
        """Copy when nothing uses the frames any more; the mark behind the copies."""
        device, tape = self.device, self._recording()
        self._wait_for_uses(loaded)
        with device.copying():
            before = device.mark(device.copies, timed=True) if tape is not None else None
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            behind = device.mark(device.copies, timed=before is not None)
        if before is not None and tape is not None:
            num_bytes = sum(target.numel() for target, _ in copies)
            tape.copies.append((loaded.run.name, before, behind, num_bytes))
        return behind

    def _wait_for_uses(self, loaded: Loaded) -> None:
        """Let the copy stream wait until what was computed with these frames is done."""
        start, end = loaded.frame, loaded.frame + loaded.run.count
        left: list[_Use] = []
        latest: dict[int, Mark] = {}
        for use in self._uses:
            if use.end <= start or end <= use.start:
                left.append(use)
                continue
            latest[use.mark.stream] = use.mark  # marks of one stream are in order
            if use.start < start:
                left.append(_Use(use.start, start, use.mark))
            if end < use.end:
                left.append(_Use(end, use.end, use.mark))
        for mark in latest.values():
            self.device.wait(mark, self.device.copies)
        self._uses = left

    def _has_come(self, loaded: Loaded, behind: Mark) -> None:
        """All copies of a run are enqueued, before a mark."""
        loaded.ready = behind
        self.pages.ready(loaded.run.start, loaded.run.count)
        self.pending.pop(loaded.ticket)

    # Arriving

    def arrive(self, loaded: Loaded) -> None:
        """Let what is computed next wait for a run; raises `StreamError` if its load failed."""
        self.check_stop()
        tape = self._recording()
        since = tape.stamp() if tape is not None else 0.0
        if loaded.ticket in self.pending:
            began = time.perf_counter()
            try:
                super().land(loaded)
            finally:
                self.waited += time.perf_counter() - began
        elif self._reading or self._waiting:
            self._pump()
        self.raise_failure(loaded)
        self._follow(loaded)
        if tape is not None:
            tape.wait(loaded.run.name, since)

    def land(self, loaded: Loaded) -> None:
        """Let what is enqueued next find the bytes of a run in place, unless its load has failed."""
        super().land(loaded)
        if loaded.ready is not None:
            self._follow(loaded)

    def follow(self, used: Iterable[Loaded]) -> None:
        """Let the present stream wait for runs, if it has not yet."""
        stream = self.device.current_stream().stream_id
        if stream == self._stream:
            return
        for loaded in used:
            if stream not in self._users.get(loaded.ticket, {}):
                self._follow(loaded)
        self._stream = stream

    def _follow(self, loaded: Loaded) -> None:
        """Let the present stream wait for a run, and remember that it may use it."""
        assert loaded.ready is not None
        assert loaded.slab is not None
        stream = self.device.current_stream()
        self.device.wait(loaded.ready, stream)
        loaded.slab.used_on(stream)
        self._users.setdefault(loaded.ticket, {})[stream.stream_id] = stream
        if stream.stream_id != self._stream:
            self._stream = -1  # the streams take turns: each call looks

    def _recording(self) -> StreamTape | None:
        """The tape, where it takes the times of what goes on now."""
        tape = self._tape
        return tape if tape is not None and tape.timed and tape.is_open else None

    def released(self, loaded: Loaded) -> None:
        """Nothing that is enqueued from here on uses the frames of a run."""
        for stream in self._users.pop(loaded.ticket, {}).values():
            self._uses.append(_Use(loaded.frame, loaded.frame + loaded.run.count, self.device.mark(stream)))

    def barrier(self) -> None:
        """Let later copies wait for all that was computed with any frame."""
        device = self.device
        streams = {stream.stream_id: stream for users in self._users.values() for stream in users.values()}
        present = device.current_stream()
        streams[present.stream_id] = present
        marks = {use.mark.stream: use.mark for use in self._uses}
        for mark in (*marks.values(), *map(device.mark, streams.values())):
            device.wait(mark, device.copies)

    # Staging

    def _pump(self) -> None:
        """Bring on what is staged, as far as it goes without waiting."""
        self.collect_ready()
        while self._waiting:
            chunk = self._waiting[0]
            wanted = min(STAGED_RUNS * chunk.loaded.run.num_bytes, STAGING_BYTES)
            place = self.staging.take(chunk.num_bytes, wanted)
            if place is None:
                return
            chunk.place = place
            self._waiting.popleft()
            self._ticket += 1
            self._reading[self._ticket] = chunk
            self._read(self._ticket, chunk)
            self.collect_ready()

    def _read(self, ticket: int, chunk: _Chunk) -> None:
        """Ask for the bytes of a chunk."""
        pieces = self._cut(chunk, self.staging.address(chunk.place))
        self.prefetch.submit(ticket, self.prefetch.prepare(pieces), self.staging.block, chunk.loaded.run.name)

    def _cut(self, chunk: _Chunk, address: int) -> Sequence[Piece]:
        """The parts of a run's pieces that lie in a chunk, to be brought to ``address``."""
        pieces = []
        for home, home_offset, offset, num_bytes in self.pieces(chunk.loaded.run, 0):
            low, high = max(offset, chunk.start), min(offset + num_bytes, chunk.start + chunk.num_bytes)
            if low < high:
                pieces.append(Piece(home, home_offset + low - offset, address + low - chunk.start, high - low))
        return pieces

    def collect(self, enough: Callable[[], bool], until: float | None = None) -> None:
        """Bring loads on until ``enough()``."""
        self._pump()
        while not enough():
            if until is None:
                self.check_stop()
            elif time.perf_counter() > until:
                return
            if not self._reading and self.staging.is_used:
                self.staging.wait()
            else:
                super().collect(self._advanced(enough), until)
            self._pump()

    def _advanced(self, enough: Callable[[], bool]) -> Callable[[], bool]:
        """Whether a chunk came, or there was enough already."""
        before = len(self._reading)
        return lambda: len(self._reading) < before or enough()

    def complete(self, record: Record) -> None:
        """A chunk is in staging: enqueue its copy to the device."""
        chunk = self._reading.pop(record.sequence, None)
        if chunk is None:
            return
        loaded, error = chunk.loaded, self.prefetch.error(record.sequence)
        if loaded.ticket not in self.pending:  # dropped, or another chunk failed
            self.staging.leave(chunk.place, None)
        elif record.op == DONE and error is None:
            self._copy_staged(chunk)
        else:
            self.staging.leave(chunk.place, None)
            if error is not None:
                self._failed[loaded.ticket] = error
            self._give_up({loaded.ticket})

    def _copy_staged(self, chunk: _Chunk) -> None:
        loaded = chunk.loaded
        assert loaded.slab is not None
        start = loaded.part.address - loaded.slab.address + chunk.start
        with torch.inference_mode(False):
            target = loaded.slab.memory[start : start + chunk.num_bytes]
            behind = self._enqueue(loaded, ((target, self.staging.bytes(chunk.place, chunk.num_bytes)),))
        self.staging.leave(chunk.place, behind)
        self._num_left[loaded.ticket] -= 1
        if not self._num_left[loaded.ticket]:
            del self._num_left[loaded.ticket]
            self._has_come(loaded, behind)

    # Giving up

    def settle(self) -> None:
        """Wait until nothing is on its way and no copy reads host memory."""
        super().settle()
        self.device.settle()

    def _give_up(self, tickets: set[int]) -> None:
        """Take loads for not wanted; what was asked for comes to staging and no further."""
        self._waiting = deque(chunk for chunk in self._waiting if chunk.loaded.ticket not in tickets)
        for ticket in tickets:
            loaded = self.pending.pop(ticket, None)
            self._num_left.pop(ticket, None)
            if loaded is not None:
                self.pages.cancel(loaded.run.start, loaded.run.count)

    def cancel(self, tickets: Iterable[int]) -> bool:
        """Stop loads; a copy that was enqueued is not stopped, and does no harm.

        Always True: a read that is blocked writes to staging, not to the slab.
        """
        dropped = set(tickets)
        asked = [ticket for ticket, chunk in self._reading.items() if chunk.loaded.ticket in dropped]
        self._give_up(dropped)
        if asked:
            self.prefetch.cancel(asked)
            self.collect(lambda: not any(t in self._reading for t in asked), time.perf_counter() + GRACE_SECONDS)
        for ticket in dropped:
            self._failed.pop(ticket, None)
        if any(ticket in self._reading for ticket in asked):
            self._leave_behind()
        return True

    def _leave_behind(self) -> None:
        """A read is blocked: leave staging and the workers to it, and ask anew for what others wanted."""
        self.prefetch.abandon()
        wanted = [chunk for chunk in self._reading.values() if chunk.loaded.ticket in self.pending]
        self._reading.clear()
        self._waiting.extendleft(reversed(wanted))
        self.staging.drop()

    def close(self) -> None:
        """Give up staging."""
        self.staging.drop()
