"""A worker that is one long native call: it never needs the GIL, so nothing that Python does holds it up.

Importing this loads numba and the compiled code; see `fmstream.actors.lanes`.
"""

from __future__ import annotations

import threading
from typing import Final

from fmstream.core import _native
from fmstream.core.clib import symbols
from fmstream.core.jobs import Job, Outcome, Status
from fmstream.core.native_ring import ALIGNMENT, Block, ring_bytes
from fmstream.core.wake import Wake, open_wake

CAPACITY: Final = 512
"""Jobs on their way to or in one worker; more wait with the one who asks."""
_RECORDS: Final = 2 * CAPACITY  # a job and its outcome are two records each
_BATCH: Final = 64  # outcomes taken at once


class NativeLane:
    """One native worker in a daemon thread, its rings and its outcomes; see `fmstream.actors.lanes.Lane`.

    All that the worker touches lies in one block: control words, the demand ring, the completion ring, and a cell for
    each job on its way, in which it finds its sequence if it is cancelled.
    """

    native = True

    def __init__(self, name: str, completions: Wake) -> None:
        """Start the worker; raises OSError where the platform lacks what it calls."""
        self.failure: BaseException | None = None
        self.keeps: dict[int, object] = {}
        self._completions = completions  # the worker writes to its descriptor
        self._demand_wake = open_wake(blocking=True)
        self._on_the_way: set[int] = set()
        self._interrupted = False
        self._lay_out()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _lay_out(self) -> None:
        step = ring_bytes(_RECORDS) + -ring_bytes(_RECORDS) % ALIGNMENT
        self._block = block = Block(_native.LANE_BYTES + 2 * step + 8 * CAPACITY)
        self._peeked = Block(2 * _native.RECORD_BYTES * _BATCH)
        self._lane = block.address
        self._posted = block.words[_native.POSTED // 8 :][:8]
        self._demand = block.address + _native.LANE_BYTES
        self._done = self._demand + step
        self._cancels = self._done + step
        c = symbols()
        for place, value in (
            (_native.DEMAND, self._demand),
            (_native.COMPLETIONS, self._done),
            (_native.CANCELS, self._cancels),
            (_native.CANCEL_MASK, CAPACITY - 1),
            (_native.DEMAND_FD, self._demand_wake.fd),
            (_native.SIGNAL_FD, self._completions.signal_fd),
            (_native.CLOCK, c.clock),
            (_native.READ, c.read),
            (_native.WRITE, c.write),
            (_native.PREAD, c.pread),
            (_native.ERRNO, c.errno),
            (_native.GETTIME, c.gettime),
            (_native.LANE_BYTES + _native.MASK, _RECORDS - 1),
            (_native.LANE_BYTES + step + _native.MASK, _RECORDS - 1),
        ):
            block.words[place // 8] = value

    @property
    def alive(self) -> bool:
        """Whether the worker still runs."""
        return self._thread.is_alive()

    def post(self, job: Job) -> bool:
        """Hand a job over; False if there is no room for it now."""
        if len(self._on_the_way) >= CAPACITY and job.sequence not in self._on_the_way:
            return False
        self._on_the_way.add(job.sequence)
        self._posted[:] = (job.op, job.sequence, *job.words, 0, 0, 0)[:8]
        # An interruption after the push would leave the worker asleep that this should wake: the next post, of the same
        # job, makes up for it.
        must_wake, self._interrupted = self._interrupted, True
        posted = _native.push_all(self._demand, self._lane + _native.POSTED, 2)
        if posted == 2 or must_wake:
            self._demand_wake.signal()
        self._interrupted = False
        return bool(posted)

    def cancel(self, sequence: int) -> None:
        """Let a posted job end as soon as it can."""
        _native.store(self._cancels + 8 * (sequence % CAPACITY), sequence)

    def peek(self) -> list[Outcome]:
        """Outcomes that have not been released, oldest first, a batch at most."""
        count = _native.peek_many(self._done, self._peeked.address, 2 * _BATCH) // 2
        if not count:
            return []
        rows = self._peeked.words[: 8 * count].reshape(-1, 8).tolist()
        return [
            Outcome(Status(status), detail, place, sequence, start, end)
            for status, detail, place, sequence, start, end, _, _ in rows
        ]

    def release(self, count: int) -> None:
        """Forget the ``count`` oldest outcomes."""
        if count:
            self._on_the_way.difference_update(self._peeked.words[3 : 8 * count : 8].tolist())
            _native.release(self._done, 2 * count)

    def park(self) -> bool:
        """Ask to be signalled at the next outcome; False if there is one already."""
        return bool(_native.park(self._done))

    def stop(self) -> None:
        """Let the worker end after the step that it is in.  Takes no lock: it also runs as a finaliser."""
        _native.store(self._lane + _native.STOP, 1)
        self._demand_wake.signal()

    def join(self, timeout: float) -> None:
        """Wait for the worker's end."""
        self._thread.join(timeout)

    def close(self) -> None:
        """Close the descriptor on which the worker slept; it has ended."""
        self._demand_wake.close()

    def _work(self) -> None:
        try:
            _native.work(self._lane)
        except BaseException as error:  # nobody would hear of it
            self.failure = error
