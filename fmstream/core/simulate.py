"""What a plan will cost: the link, the window and the compute clock played through a few passes.

The player is a plain Python function over numpy arrays, compiled when it is first used, as the operations of the page
table are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fmstream.core.compiling import native
from fmstream.core.plan import Costs, Unit
from fmstream.core.trace import Trace
from fmstream.core.units import closing_call

PASSES = 8
"""Passes that are played at most: fewer where one lasts as long as the one before it."""
SETTLED = 1e-9
"""Share by which two passes may differ and count as equally long."""


class Uses(NamedTuple):
    """The units of a pass as the simulation sees them, one entry for each.

    ``starts``, ``ends``: seconds on the compute clock (float64).  ``pages``: frames taken (int64).  ``loads``: seconds
    on the link (float64).
    """

    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    pages: NDArray[np.int64]
    loads: NDArray[np.float64]


def uses_of(
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
    num_bytes: NDArray[np.int64],
    page_bytes: int,
    costs: Costs,
) -> Uses:
    """Uses from when units are in use and what they hold (int64 bytes)."""
    loads = costs.latency_seconds + num_bytes / costs.bytes_per_second
    return Uses(starts, ends, -(-num_bytes // page_bytes), loads)


def load_seconds(num_bytes: int, costs: Costs) -> float:
    """Seconds that one load occupies the link."""
    return costs.latency_seconds + num_bytes / costs.bytes_per_second


def simulate(
    trace: Trace,
    units: Sequence[Unit],
    *,
    window_bytes: int,
    page_bytes: int,
    costs: Costs,
    lookahead: int | None,
    wrap: bool,
    across: int | None = None,
) -> float:
    """Seconds of a steady pass under a plan, from its start to its end.

    Args:
        trace: the pass; its clock says when each unit is entered and left, and ``between`` passes from pass to pass.
        units: what is streamed, as in a `Plan`.
        window_bytes, page_bytes: the circular window and its pages.
        costs: the link carries one load at a time, each for ``latency + bytes / rate``; compute may use it ``seen``
            seconds later.
        lookahead: units that may be issued ahead of the one in use; 0: at its entry; None: all that fit.
        wrap: whether units of the next pass may be issued before this one has ended,
        across: and how many of them; None: all that fit.
    """
    uses = uses_of(
        np.array([trace.calls[unit.first].start for unit in units], np.float64),
        np.array([trace.calls[closing_call(trace, unit)].end for unit in units], np.float64),
        np.array([unit.num_bytes for unit in units], np.int64),
        page_bytes,
        costs,
    )
    frames = window_bytes // page_bytes
    return play(uses, frames, trace.seconds, trace.between, costs.seen_seconds, lookahead, wrap, across)


def play(
    uses: Uses,
    num_frames: int,
    seconds: float,
    between: float,
    seen_seconds: float,
    lookahead: int | None,
    wrap: bool,
    across: int | None = None,
    shared: bool = False,
) -> float:
    """Seconds of a steady pass over ``uses``; the other arguments are those of `simulate`.

    With ``shared`` a pass begins with a copy of the user's, small but behind all that was issued, and its time counts
    from before that.  Where runs skip the window's end at another place in each pass, passes differ: then it is the
    mean of the last few.
    """
    count = len(uses.pages)
    if count == 0:
        return seconds
    largest = int(uses.pages.max())
    if largest > num_frames:
        raise AssertionError(f"a unit of {largest} pages in a window of {num_frames}")
    ahead = count - 1 if lookahead is None else min(lookahead, count - 1)
    most = -1 if across is None else across
    return compiled()(*uses, num_frames, seconds, between, seen_seconds, ahead, wrap, most, shared)


def play_plainly(
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
    pages: NDArray[np.int64],
    loads: NDArray[np.float64],
    num_frames: int,
    seconds: float,
    between: float,
    seen_seconds: float,
    ahead: int,
    wrap: bool,
    across: int,
    shared: bool,
) -> float:
    """The player as plain Python: the meaning of the compiled one.

    ``ahead`` units are issued before the one in use, ``across`` of them before their pass (-1: any number).
    Counters and positions in the window are absolute: they go on from pass to pass, as those of `Window` do.
    """
    count, total = starts.shape[0], starts.shape[0] * PASSES
    positions = np.zeros(total, np.int64)
    ready = np.zeros(total, np.float64)
    durations = np.zeros(PASSES, np.float64)
    head = tail = issued = index = 0
    busy_until = begin = 0.0
    for number in range(PASSES):
        waited = begin
        horizon = total
        if not wrap or across >= 0:
            horizon = min(total, (number + 1) * count + (across if wrap else 0))
        if shared and number > 0:
            waited = max(begin, busy_until)
        for unit in range(count):
            # At the unit's entry, when it is sure to fit, for all before it were released; then at its exit.  Before
            # the first one also when the pass begins.
            for leaving in range(-1 if wrap and unit == 0 and number > 0 else 0, 2):
                now = waited
                if leaving >= 0:
                    now += ends[unit] if leaving else starts[unit]
                limit = min(index + (leaving == 0) + ahead, horizon)
                while issued < limit:
                    need = pages[issued % count]
                    position = head
                    rest = num_frames - position % num_frames
                    if rest < need:  # runs are contiguous: this one skips the window's end
                        position += rest
                    if issued == index:  # nothing is in the window
                        tail = position
                    elif position + need - tail > num_frames:
                        break
                    head = position + need
                    busy_until = max(now, busy_until) + loads[issued % count]
                    positions[issued] = position
                    ready[issued] = busy_until + seen_seconds
                    issued += 1
                if leaving == 0:
                    waited += max(0.0, ready[index] - now)
                    index += 1
                    tail = positions[index] if index < issued else head
        durations[number] = waited + seconds - begin
        begin += durations[number] + between
        if number > 1 and abs(durations[number] - durations[number - 1]) <= SETTLED * durations[number]:
            return float(durations[number])
    return float(durations[PASSES // 2 :].mean())


@lru_cache(maxsize=1)
def compiled() -> Callable[..., float]:
    """The player as native code, cached on disk where the cache can be written."""
    import numba

    f64, i64, number = numba.float64[::1], numba.int64[::1], numba.float64
    n, flag = numba.int64, numba.boolean
    signature = number(f64, f64, i64, f64, n, number, number, number, n, flag, n, flag)
    return native(signature, nogil=True)(play_plainly)  # type: ignore[no-any-return]
