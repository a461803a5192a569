"""The device's memory: a stream-ordered caching allocator in the manner of PyTorch's for CUDA.

Sizes are rounded to 512 bytes.  Up to 1 MiB they come from segments of 2 MiB; from 20 MiB up to 10 MiB; larger ones
have segments of their own, rounded to 2 MiB.  A freed block is joined to its free neighbours and serves its own stream
at once; one that other streams used (``record_stream``) serves again when these have passed the point of the free.
(c10/cuda/CUDACachingAllocator.cpp)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from threading import RLock
from typing import Final, Protocol

from fmstream.emulator.clocks import Mark, VectorClock
from fmstream.emulator.reserve import Reserve
from fmstream.errors import FmstreamError

ROUNDING: Final = 512
SEGMENT_BYTES: Final = 2 << 20
"""A segment of small blocks, which are up to half as large; other segments are multiples of it.  CUDA's."""


class CapacityError(FmstreamError, RuntimeError):
    """The device's memory does not hold an allocation, even with all cached segments given back."""


def round_up(num_bytes: int, to: int) -> int:
    """The least multiple of ``to`` that is not smaller."""
    return -(-num_bytes // to) * to


def is_small(size: int, unit: int = SEGMENT_BYTES) -> bool:
    """Whether a block of ``size`` bytes shares a small segment with others."""
    return size <= unit // 2


def segment_bytes(size: int, unit: int = SEGMENT_BYTES) -> int:
    """What is taken from the device for a block of ``size`` bytes: small ones one unit, those below five units ten."""
    if is_small(size, unit):
        return unit
    return 10 * unit if size < 5 * unit else round_up(size, unit)


class Order(Protocol):
    """What the allocator asks of the machine."""

    def record(self, stream: int) -> Mark:
        """The point that a stream has reached."""

    def passed(self, mark: Mark) -> bool:
        """Whether a point lies behind; if so, the work before it has been done."""

    def synchronize(self, point: Mark | int | None = None) -> None:
        """Let the host wait for a mark, or for everything."""

    def poison(self, block: Block) -> None:
        """Spoil the bytes of a free block, in the order of its stream."""

    def opened(self, segment: Segment) -> None:
        """A segment was taken from the device."""

    def closed(self, segment: Segment) -> None:
        """A segment was given back."""

    def waited(self, block: Block, clock: VectorClock) -> None:
        """The next user of a block comes after all that ``clock`` knows."""

    def freed_twice(self, block: Block) -> None:
        """A block that is free was freed."""


@dataclass(slots=True, eq=False)
class Segment:
    """A stretch of device memory that the allocator holds for one stream."""

    address: int
    size: int
    stream: int
    small: bool


class Block:
    """A stretch of a segment, allocated or free.

    ``nbytes`` is what was asked for, ``size`` what it takes; ``born`` is how many operations the machine had seen when
    it was given out.
    """

    __slots__ = ("address", "after", "allocated", "before", "born", "free", "nbytes", "segment", "size", "uses")

    def __init__(self, address: int, size: int, segment: Segment) -> None:
        self.address = address
        self.size = size
        self.nbytes = 0
        self.segment = segment
        self.allocated = False
        self.free = False
        """Whether it may be given out; one that other streams may still use is neither allocated nor free."""
        self.born = 0
        self.uses: set[int] = set()
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def stream(self) -> int:
        """The stream that it was allocated for."""
        return self.segment.stream


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """A snapshot.  Allocated bytes are those of whole blocks; retries are attempts with the cache emptied."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    num_ooms: int
    num_retries: int


class Allocator:
    """Gives out stretches of ``reserve``, of which at most ``capacity`` bytes are held at a time.

    ``unit`` is the size of a small segment.  ``lock`` is the machine's.  A block may be freed at any moment, also by a
    finalizer that runs while its thread is at work in here: such a free is put off until the next call.
    """

    def __init__(
        self,
        order: Order,
        lock: RLock,
        reserve: Reserve,
        capacity: int,
        *,
        poison: bool,
        unit: int = SEGMENT_BYTES,
    ) -> None:
        self.capacity = capacity
        self.unit = unit
        self.num_operations = 0
        """Operations that the machine has seen, by which a block's birth is told."""
        self._order = order
        self._lock = lock
        self._reserve = reserve
        self._poison = poison
        self._idle: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
        """Free blocks by stream and pool: (size, address), in order."""
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._pending: deque[tuple[Block, list[Mark]]] = deque()
        self._dead: deque[Block] = deque()
        self._allocated = self._reserved = self._peak_allocated = self._peak_reserved = 0
        self._num_ooms = self._num_retries = 0

    @property
    def address(self) -> int:
        """The first address of the device."""
        return self._reserve.base

    @property
    def num_bytes(self) -> int:
        """Addresses of the device, a multiple of its capacity; all blocks lie among them."""
        return self._reserve.num_bytes

    def allocate(self, nbytes: int, stream: int) -> Block:
        """A block of at least ``nbytes`` for ``stream``.  Raises CapacityError."""
        with self._lock:
            self._reap()
            self._collect()
            size = max(ROUNDING, round_up(nbytes, ROUNDING))
            block = self._fit(size, stream) or self._grow(size, stream) or self._retry(size, stream)
            if block is None:
                self._num_ooms += 1
                raise CapacityError(
                    f"the emulated device is out of memory: {nbytes} bytes asked for, {self._allocated} allocated and "
                    f"{self._reserved} reserved of {self.capacity}; free tensors, or give it a greater capacity"
                )
            self._split(block, size)
            block.nbytes, block.allocated, block.born = nbytes, True, self.num_operations
            self._allocated += block.size
            self._peak_allocated = max(self._peak_allocated, self._allocated)
            return block

    def free(self, block: Block) -> None:
        """Take a block back, in the order of its stream and of those recorded on it."""
        self._dead.append(block)
        if not self._lock._is_owned():  # type: ignore[attr-defined]  # else a finalizer, amid whatever goes on
            with self._lock:
                self._reap()

    def record_stream(self, block: Block, stream: int) -> None:
        """Let the block, once freed, serve again only when ``stream`` has passed that point."""
        if stream != block.stream:
            block.uses.add(stream)

    def empty_cache(self) -> None:
        """Give segments without an allocated block back; the host waits for the device, as ``cudaFree`` does."""
        with self._lock:
            self._reap()
            self._wait_pending()
            spare = [b for b in self._blocks.values() if b.free and b.before is None and b.after is None]
            if not spare:
                return
            self._order.synchronize()
            for block in spare:
                self._take_idle(block)
                self._forget(block)
                segment = block.segment
                self._order.closed(segment)
                self._reserve.give(segment.address, segment.size)
                self._reserved -= segment.size

    def block_at(self, address: int) -> Block | None:
        """The block that an address lies in, allocated or free."""
        block = self._blocks.get(address)
        if block is None:
            index = bisect_right(self._starts, address)
            block = self._blocks[self._starts[index - 1]] if index else None
        return block if block is not None and address < block.address + block.size else None

    def statistics(self) -> MemoryStatistics:
        """A snapshot."""
        with self._lock:
            self._reap()
            return MemoryStatistics(
                self._allocated,
                self._reserved,
                self._peak_allocated,
                self._peak_reserved,
                self._num_ooms,
                self._num_retries,
            )

    def reset_peaks(self) -> None:
        """Let the peaks begin at what is held now."""
        with self._lock:
            self._reap()
            self._peak_allocated, self._peak_reserved = self._allocated, self._reserved

    def check(self) -> None:
        """Raise AssertionError unless blocks tile their segments, free neighbours are joined, and the sums agree."""
        with self._lock:
            self._reap()
            blocks = [self._blocks[start] for start in self._starts]
            assert len(blocks) == len(self._blocks)
            for left, right in pairwise(blocks):
                assert left.address + left.size <= right.address
                joined = left.segment is right.segment
                assert (left.after is right) == (right.before is left) == joined
                assert not joined or left.address + left.size == right.address
                assert not (joined and left.free and right.free)
            segments = {id(block.segment): block.segment for block in blocks}.values()
            assert sum(b.size for b in blocks) == sum(s.size for s in segments) == self._reserved <= self.capacity
            assert sum(b.size for b in blocks if b.allocated) == self._allocated
            idle = sorted((size, address) for entries in self._idle.values() for size, address in entries)
            assert idle == sorted((b.size, b.address) for b in blocks if b.free)
            pending = {id(block) for block, _ in self._pending}
            assert pending == {id(b) for b in blocks if not b.free and not b.allocated}

    def _fit(self, size: int, stream: int) -> Block | None:
        """The smallest free block that holds ``size``."""
        idle = self._idle[stream, is_small(size, self.unit)]
        index = bisect_left(idle, (size, 0))
        if index == len(idle):
            return None
        block = self._blocks[idle.pop(index)[1]]
        block.free = False
        return block

    def _grow(self, size: int, stream: int) -> Block | None:
        """A block that takes a new segment, if the capacity allows one."""
        wanted = segment_bytes(size, self.unit)
        if self._reserved + wanted > self.capacity:
            return None
        address = self._reserve.take(wanted)
        if address is None:
            return None
        segment = Segment(address, wanted, stream, is_small(size, self.unit))
        self._reserved += wanted
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        self._order.opened(segment)
        return self._add(Block(address, wanted, segment))

    def _retry(self, size: int, stream: int) -> Block | None:
        """The last resort: a new segment after all cached ones were given back."""
        self._num_retries += 1
        self.empty_cache()
        return self._grow(size, stream)

    def _split(self, block: Block, size: int) -> None:
        """Leave what a block has beyond ``size`` to others, if it is worth it."""
        rest = block.size - size
        if rest < ROUNDING or (not block.segment.small and is_small(rest, self.unit)):
            return
        block.size = size
        other = self._add(Block(block.address + size, rest, block.segment))
        other.before, other.after = block, block.after
        if block.after is not None:
            block.after.before = other
        block.after = other
        self._put_idle(other)

    def _reap(self) -> None:
        """Carry out the frees that came in."""
        while self._dead:
            block = self._dead.popleft()
            if not block.allocated:
                self._order.freed_twice(block)
                continue
            block.allocated = False
            self._allocated -= block.size
            if block.uses:
                self._pending.append((block, [self._order.record(stream) for stream in sorted(block.uses)]))
                block.uses = set()
            else:
                self._release(block)

    def _collect(self) -> None:
        """Take in the blocks whose last users have passed the point of the free."""
        for _ in range(len(self._pending)):
            block, marks = self._pending.popleft()
            if all(self._order.passed(mark) for mark in marks):
                self._take_in(block, marks)
            else:
                self._pending.append((block, marks))

    def _wait_pending(self) -> None:
        while self._pending:
            block, marks = self._pending.popleft()
            for mark in marks:
                self._order.synchronize(mark)
            self._take_in(block, marks)

    def _take_in(self, block: Block, marks: list[Mark]) -> None:
        for mark in marks:
            self._order.waited(block, mark.clock)
        self._release(block)

    def _release(self, block: Block) -> None:
        """Make a block free, and one with its free neighbours."""
        if self._poison:
            self._order.poison(block)
        before, after = block.before, block.after
        if before is not None and before.free:
            self._take_idle(before)
            block = self._join(before, block)
        if after is not None and after.free:
            self._take_idle(after)
            block = self._join(block, after)
        self._put_idle(block)

    def _join(self, left: Block, right: Block) -> Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        self._forget(right)
        return left

    def _put_idle(self, block: Block) -> None:
        block.free = True
        insort(self._idle[block.stream, block.segment.small], (block.size, block.address))

    def _take_idle(self, block: Block) -> None:
        block.free = False
        idle = self._idle[block.stream, block.segment.small]
        del idle[bisect_left(idle, (block.size, block.address))]

    def _add(self, block: Block) -> Block:
        self._blocks[block.address] = block
        insort(self._starts, block.address)
        return block

    def _forget(self, block: Block) -> None:
        del self._blocks[block.address]
        del self._starts[bisect_left(self._starts, block.address)]
