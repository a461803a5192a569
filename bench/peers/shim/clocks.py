"""The host's virtual clock goes along where one thread waits for another.

Every thread of the emulated machine has a clock of its own. What a thread gets from a `queue.Queue`, and what it learns
by starting and joining threads, cannot have happened before it was sent: without this, a peer that stages in threads
would look as if they waited for nothing. Locks, conditions and executors' futures carry no clock.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from bench.peers.shim.patches import Patches
from fmstream import emulator


def install(patches: Patches) -> None:
    """Stamp what is put into queues and threads, and advance the clock of who takes it out."""
    patches.wrap(queue.Queue, "_put", _putting)
    patches.wrap(queue.Queue, "_get", _getting)
    patches.wrap(threading.Thread, "start", _starting)
    patches.wrap(threading.Thread, "join", _joining)


def _now() -> float:
    return emulator.machine().now


def _wait_until(seconds: float) -> None:
    emulator.machine().join_clock(seconds)


def _stamps(line: Any) -> deque[float]:
    """One for each item in the queue; 0 for items from before the shim."""
    stamps: deque[float] = vars(line).setdefault("_clock_stamps", deque())
    stamps.extendleft([0.0] * (len(line.queue) - len(stamps)))
    return stamps


def _putting(put: Callable[..., None]) -> Callable[..., None]:
    # Queue calls both with its mutex held.  Its subclasses order items their own way and are left alone.
    def stamped(self: Any, item: Any) -> None:
        _stamps(self).append(_now())
        put(self, item)

    return stamped


def _getting(get: Callable[..., Any]) -> Callable[..., Any]:
    def stamped(self: Any) -> Any:
        _wait_until(_stamps(self).popleft())
        return get(self)

    return stamped


def _starting(start: Callable[..., None]) -> Callable[..., None]:
    def started(self: Any) -> None:
        run, born = self.run, _now()

        def stamped() -> None:
            _wait_until(born)
            try:
                run()
            finally:
                self._clock_at_end = _now()

        self.run = stamped
        start(self)

    return started


def _joining(join: Callable[..., None]) -> Callable[..., None]:
    def joined(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        _wait_until(getattr(self, "_clock_at_end", 0.0))

    return joined
