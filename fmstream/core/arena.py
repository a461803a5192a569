"""Room in fast memory: the circular window of streamed units, and the arena it shares with the residents."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from fmstream.core.plan import ALIGNMENT

MIN_PAGE_BYTES, MAX_PAGE_BYTES = 64, 65536
PAGES_WANTED = 4096
"""Pages into which the weights are cut: fine enough to waste little, few enough to be cheap to walk."""


def num_pages(num_bytes: int, page_bytes: int) -> int:
    """Whole pages that hold ``num_bytes``."""
    return -(-num_bytes // page_bytes)


def choose_page_bytes(total_bytes: int) -> int:
    """A power of two near ``total_bytes`` / 4096, within [64, 65536]."""
    wanted = max(1, total_bytes // PAGES_WANTED)
    return min(MAX_PAGE_BYTES, max(MIN_PAGE_BYTES, 1 << (wanted.bit_length() - 1)))


def pack(sizes: Iterable[int]) -> list[int]:
    """Offsets at which tensors of ``sizes`` bytes lie one behind the other, each aligned to 64 bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets


class _Run(NamedTuple):
    position: int
    end: int


class Window:
    """A circular allocator of contiguous runs of frames, given back in the order in which they were taken.

    Positions are absolute: they count all frames ever passed and never repeat, so ``position`` also says which is
    older.  A run that does not fit before the end of the ring skips that end and begins at its first frame.
    """

    def __init__(self, num_frames: int, first_frame: int = 0) -> None:
        self.num_frames = num_frames
        self.first_frame = first_frame
        self._head = 0
        self._tail = 0
        self._runs: deque[_Run] = deque()

    @property
    def free_frames(self) -> int:
        """Frames neither taken nor skipped; a run of that length may still not fit, for want of contiguity."""
        return self.num_frames - (self._head - self._tail)

    @property
    def num_runs(self) -> int:
        """Runs that are taken."""
        return len(self._runs)

    def frame_of(self, position: int) -> int:
        """The frame that an absolute position stands for."""
        return self.first_frame + position % self.num_frames

    def reserve(self, count: int) -> int | None:
        """Take ``count`` contiguous frames; their absolute position, or None while there is no room."""
        if count < 1 or count > self.num_frames:
            raise AssertionError(f"a run of {count} frames in a window of {self.num_frames}")
        position = self._head
        rest = self.num_frames - position % self.num_frames
        if rest < count:
            position += rest
        if not self._runs:  # whatever was skipped before is free as well
            self._tail = position
        elif position + count - self._tail > self.num_frames:
            return None
        self._runs.append(_Run(position, position + count))
        self._head = position + count
        return position

    def release(self, position: int) -> None:
        """Give back the oldest run, which must be the one at ``position``."""
        if not self._runs or self._runs[0].position != position:
            oldest = self._runs[0].position if self._runs else None
            raise AssertionError(f"release of the run at {position}, but the oldest is at {oldest}")
        self._runs.popleft()
        self._tail = self._runs[0].position if self._runs else self._head

    def cancel_newest(self, position: int) -> None:
        """Give back the newest run, which must be the one at ``position``: it was staged and is not wanted."""
        if not self._runs or self._runs[-1].position != position:
            newest = self._runs[-1].position if self._runs else None
            raise AssertionError(f"cancel of the run at {position}, but the newest is at {newest}")
        self._runs.pop()
        self._head = self._runs[-1].end if self._runs else self._tail

    def reset(self) -> None:
        """Give back every run; positions go on counting."""
        self._runs.clear()
        self._tail = self._head

    def check(self) -> None:
        """Verify that the runs are in order, contiguous, disjoint, and within one turn of the ring."""
        if not 0 <= self._head - self._tail <= self.num_frames:
            raise AssertionError(f"cursors {self._tail}..{self._head} in a ring of {self.num_frames}")
        end = self._tail
        for run in self._runs:
            if not end <= run.position < run.end:
                raise AssertionError(f"{run} begins before {end}")
            if run.position // self.num_frames != (run.end - 1) // self.num_frames:
                raise AssertionError(f"{run} passes the end of a ring of {self.num_frames}")
            end = run.end
        if end != self._head:
            raise AssertionError(f"the newest run ends at {end}, the head is {self._head}")


class Arena:
    """The frames of one budget of fast memory: residents first, the window behind them.

    ``num_bytes`` is rounded down to whole pages of ``page_bytes``.
    """

    def __init__(self, num_bytes: int, page_bytes: int) -> None:
        if page_bytes < ALIGNMENT or page_bytes & (page_bytes - 1):
            raise AssertionError(f"a page of {page_bytes} bytes is not a power of two of at least {ALIGNMENT}")
        self.page_bytes = page_bytes
        self.num_frames = num_bytes // page_bytes
        self.resident_frames = self.num_frames
        self.window = Window(0, self.num_frames)

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames."""
        return self.num_frames * self.page_bytes

    def offset_of(self, frame: int) -> int:
        """Byte offset of a frame from the start of the arena."""
        return frame * self.page_bytes

    def split(self, window_bytes: int) -> Window:
        """Give the last ``window_bytes`` (whole pages) to a new window, the frames before it to the residents."""
        frames = num_pages(window_bytes, self.page_bytes)
        if frames > self.num_frames:
            raise AssertionError(f"a window of {frames} frames in an arena of {self.num_frames}")
        if self.window.num_runs:
            raise AssertionError(f"split while the window holds {self.window.num_runs} runs")
        self.resident_frames = self.num_frames - frames
        self.window = Window(frames, self.resident_frames)
        return self.window
