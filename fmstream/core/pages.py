"""The page table: which page lies in which frame, in what state, and who still needs it.

The run operations below are plain Python functions over numpy arrays.  They are compiled when the first table is
made, so that importing this module costs nothing, and they can be tested without the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from fmstream.core.compiling import native

ABSENT, LOADING, RESIDENT, SPILLING = range(4)
STATE_NAMES = ("absent", "loading", "resident", "spilling")
NEVER = 1 << 62
"""``next_use`` of a page that is not known to be used again."""

_OUT_OF_TABLE = -1
_FRAMES_OUT_OF_TABLE = -2
# Any other code names a place in the run, counted from 1: positive a page, at or below _FRAME_TAKEN a taken frame.
_FRAME_TAKEN = -3


class PageError(AssertionError):
    """An operation would break a law of the page table: a fault of the caller inside this package, not of the user."""


def _load(
    state: NDArray[np.uint8],
    frame: NDArray[np.int32],
    owner: NDArray[np.int32],
    start: int,
    count: int,
    first: int,
) -> int:
    if start < 0 or count < 1 or start + count > state.shape[0]:
        return -1
    if first < 0 or first + count > owner.shape[0]:
        return -2
    for i in range(count):
        if state[start + i] != 0:
            return i + 1
        if owner[first + i] != -1:
            return -3 - i
    for i in range(count):
        state[start + i] = 1
        frame[start + i] = first + i
        owner[first + i] = start + i
    return 0


def _turn(
    state: NDArray[np.uint8],
    pins: NDArray[np.int32],
    generation: NDArray[np.int64],
    start: int,
    count: int,
    before: int,
    after: int,
) -> int:
    """Change the state of a run that keeps its frames."""
    if start < 0 or count < 1 or start + count > state.shape[0]:
        return -1
    for i in range(count):
        if state[start + i] != before or pins[start + i] != 0:
            return i + 1
    for i in range(count):
        state[start + i] = after
        if after == 2:
            generation[start + i] += 1
    return 0


def _free(
    state: NDArray[np.uint8],
    frame: NDArray[np.int32],
    owner: NDArray[np.int32],
    pins: NDArray[np.int32],
    dirty: NDArray[np.bool_],
    start: int,
    count: int,
    before: int,
) -> int:
    """Take the frames from a run."""
    if start < 0 or count < 1 or start + count > state.shape[0]:
        return -1
    for i in range(count):
        page = start + i
        if state[page] != before or pins[page] != 0 or (before == 2 and dirty[page]):
            return i + 1
    for i in range(count):
        page = start + i
        state[page] = 0
        owner[frame[page]] = -1
        frame[page] = -1
        dirty[page] = False
    return 0


def _pin(state: NDArray[np.uint8], pins: NDArray[np.int32], start: int, count: int, delta: int) -> int:
    if start < 0 or count < 1 or start + count > state.shape[0]:
        return -1
    for i in range(count):
        if state[start + i] != 2 or pins[start + i] + delta < 0:
            return i + 1
    for i in range(count):
        pins[start + i] += delta
    return 0


def _find_free(owner: NDArray[np.int32], count: int, low: int, high: int) -> int:
    run = 0
    for i in range(low, high):
        if owner[i] == -1:
            run += 1
            if run == count:
                return i - count + 1
        else:
            run = 0
    return -1


class Operations(NamedTuple):
    """The run operations, compiled or not.  Each returns 0, or a code that ``PageTable._refuse`` explains."""

    load: Callable[..., int]
    turn: Callable[..., int]
    free: Callable[..., int]
    pin: Callable[..., int]
    find_free: Callable[..., int]


PYTHON = Operations(_load, _turn, _free, _pin, _find_free)
"""The operations as plain Python: the meaning of the compiled ones."""


@lru_cache(maxsize=1)
def compiled() -> Operations:
    """The operations as native code, cached on disk where the cache can be written."""
    import numba

    u8, i32, i64, flag = numba.uint8[::1], numba.int32[::1], numba.int64[::1], numba.boolean[::1]
    n = numba.int64
    return Operations(
        load=native(n(u8, i32, i32, n, n, n), nogil=True)(_load),
        turn=native(n(u8, i32, i64, n, n, n, n), nogil=True)(_turn),
        free=native(n(u8, i32, i32, i32, flag, n, n, n), nogil=True)(_free),
        pin=native(n(u8, i32, n, n, n), nogil=True)(_pin),
        find_free=native(n(i32, n, n, n), nogil=True)(_find_free),
    )


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How many frames are free, or held by pages in each state; the sum is the number of frames."""

    free: int
    loading: int
    resident: int
    spilling: int


class PageTable:
    """Pages, frames, and the state that joins them: a structure of arrays.

    Arrays by page: ``state`` uint8, ``frame`` int32 (-1: none), ``pins`` int32, ``dirty`` bool (the frame holds what
    the master copy does not), ``home`` int64 (where the master copy lies, as the table's owner counts it),
    ``next_use`` int64, ``generation`` int64 (loads completed so far).  Array by frame: ``owner`` int32, the page in it
    (-1: free).

    Operations take a run of ``count`` pages from ``start``.  Each checks the whole run before it changes anything and
    raises `PageError` if a page is not in the state that it needs.  The table has one writer and takes no lock.
    """

    def __init__(self, num_pages: int, num_frames: int, operations: Operations | None = None) -> None:
        self.num_pages = num_pages
        self.num_frames = num_frames
        self.state = np.zeros(num_pages, np.uint8)
        self.frame = np.full(num_pages, -1, np.int32)
        self.pins = np.zeros(num_pages, np.int32)
        self.dirty = np.zeros(num_pages, np.bool_)
        self.home = np.full(num_pages, -1, np.int64)
        self.next_use = np.full(num_pages, NEVER, np.int64)
        self.generation = np.zeros(num_pages, np.int64)
        self.owner = np.full(num_frames, -1, np.int32)
        self._do = operations or compiled()

    def load(self, start: int, count: int, frame: int) -> None:
        """Absent to loading, on the free frames ``[frame, frame + count)``."""
        code = self._do.load(self.state, self.frame, self.owner, start, count, frame)
        if code:
            self._refuse("load", start, count, code, frame)

    def ready(self, start: int, count: int) -> None:
        """Loading to resident; each page's generation grows by one."""
        code = self._do.turn(self.state, self.pins, self.generation, start, count, LOADING, RESIDENT)
        if code:
            self._refuse("ready", start, count, code)

    def cancel(self, start: int, count: int) -> None:
        """Loading to absent; the frames are free again."""
        code = self._do.free(self.state, self.frame, self.owner, self.pins, self.dirty, start, count, LOADING)
        if code:
            self._refuse("cancel", start, count, code)

    def evict(self, start: int, count: int) -> None:
        """Resident, unpinned and clean to absent; the frames are free again."""
        code = self._do.free(self.state, self.frame, self.owner, self.pins, self.dirty, start, count, RESIDENT)
        if code:
            self._refuse("evict", start, count, code)

    def spill(self, start: int, count: int) -> None:
        """Resident and unpinned to spilling: the pages are being written home and keep their frames."""
        code = self._do.turn(self.state, self.pins, self.generation, start, count, RESIDENT, SPILLING)
        if code:
            self._refuse("spill", start, count, code)

    def spilled(self, start: int, count: int) -> None:
        """Spilling to absent: the pages are home and clean, the frames are free again."""
        code = self._do.free(self.state, self.frame, self.owner, self.pins, self.dirty, start, count, SPILLING)
        if code:
            self._refuse("spilled", start, count, code)

    def pin(self, start: int, count: int) -> None:
        """Keep resident pages from being evicted or spilled until they are unpinned as often."""
        code = self._do.pin(self.state, self.pins, start, count, 1)
        if code:
            self._refuse("pin", start, count, code)

    def unpin(self, start: int, count: int) -> None:
        """Undo one `pin`."""
        code = self._do.pin(self.state, self.pins, start, count, -1)
        if code:
            self._refuse("unpin", start, count, code)

    def pin_each(self, pages: NDArray[np.int32], delta: int = 1) -> None:
        """`pin` pages in any order, each named once; -1 as ``delta`` undoes it."""
        bad = (self.state[pages] != RESIDENT) | (self.pins[pages] + delta < 0)
        if bad.any():
            self._refuse("pin", int(pages[np.argmax(bad)]), 1, 1)
        self.pins[pages] += delta

    def grow(self, num_pages: int) -> None:
        """Add absent pages behind those that are there."""
        more = num_pages - self.num_pages
        if more <= 0:
            return
        self.num_pages = num_pages
        self.state = np.pad(self.state, (0, more))
        self.frame = np.pad(self.frame, (0, more), constant_values=-1)
        self.pins = np.pad(self.pins, (0, more))
        self.dirty = np.pad(self.dirty, (0, more))
        self.home = np.pad(self.home, (0, more), constant_values=-1)
        self.next_use = np.pad(self.next_use, (0, more), constant_values=NEVER)
        self.generation = np.pad(self.generation, (0, more))

    def resize(self, num_frames: int) -> None:
        """Have more frames, or fewer, where none of those that go is taken."""
        if (self.owner[num_frames:] >= 0).any():
            raise PageError(f"resize to {num_frames} frames: a page lies in one of those that would go")
        more = max(0, num_frames - self.num_frames)
        self.owner = np.pad(self.owner[:num_frames], (0, more), constant_values=-1)
        self.num_frames = num_frames

    def find_free(self, count: int, low: int = 0, high: int | None = None) -> int:
        """First of ``count`` contiguous free frames, the lowest within ``[low, high)``, or -1."""
        high = self.num_frames if high is None else high
        if count < 1 or low < 0 or high > self.num_frames:
            raise PageError(f"find_free: {count} frames in [{low}, {high}); the table has {self.num_frames} frames")
        return self._do.find_free(self.owner, count, low, high)

    def counts(self) -> PageCounts:
        """A snapshot of the frames by state, counted from the arrays."""
        by_state = np.bincount(self.state, minlength=len(STATE_NAMES))
        return PageCounts(
            free=int(np.count_nonzero(self.owner == -1)),
            loading=int(by_state[LOADING]),
            resident=int(by_state[RESIDENT]),
            spilling=int(by_state[SPILLING]),
        )

    def check(self) -> None:
        """Verify the laws of the table; raises `PageError` that names the law and the first offender."""
        counts = self.counts()
        total = counts.free + counts.loading + counts.resident + counts.spilling
        if total != self.num_frames:
            raise PageError(f"{counts} adds up to {total}, but there are {self.num_frames} frames")
        self._expect("an absent page has no frame, any other has one", (self.state == ABSENT) == (self.frame == -1))
        held = np.flatnonzero(self.frame != -1)
        holders = np.full(self.num_frames, -1, np.int32)
        holders[self.frame[held]] = held
        self._expect("a frame's owner is the page in it", holders == self.owner)
        self._expect("pins are not negative", self.pins >= 0)
        self._expect("only a resident page is pinned", (self.pins == 0) | (self.state == RESIDENT))
        self._expect("only a page with a frame is dirty", ~self.dirty | (self.state != ABSENT))

    def _expect(self, law: str, holds: NDArray[np.bool_]) -> None:
        if not holds.all():
            raise PageError(f"{law}; broken at {int(np.argmin(holds))}")

    def _refuse(self, what: str, start: int, count: int, code: int, frame: int = -1) -> NoReturn:
        run = f"{what} of pages [{start}, {start + count})"
        if code == _OUT_OF_TABLE:
            raise PageError(f"{run}: the table has {self.num_pages} pages")
        if code == _FRAMES_OUT_OF_TABLE:
            raise PageError(f"{run}: frames [{frame}, {frame + count}) of {self.num_frames}")
        if code <= _FRAME_TAKEN:
            taken = frame + _FRAME_TAKEN - code
            raise PageError(f"{run}: frame {taken} is taken by page {int(self.owner[taken])}")
        page = start + code - 1
        state = STATE_NAMES[self.state[page]]
        dirty = ", dirty" if self.dirty[page] else ""
        raise PageError(f"{run}: page {page} is {state}, pinned {int(self.pins[page])} times{dirty}")
