"""When the bytes' work of an operation is really done: at once, as late as allowed, or in a random legal order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from fmstream.emulator.clocks import VectorClock
from fmstream.errors import ConfigError

Execution = Literal["eager", "late", "dry"] | int
Run = Callable[[], object]


class Task(NamedTuple):
    """Work that is still to be done: its step in its stream, and what goes before it."""

    tick: int
    clock: VectorClock
    run: Run


class Backlog:
    """Work enqueued and not yet done, one queue for each stream.

    ``eager`` keeps none.  ``late`` does nothing until ``force`` is called.  A seed makes a random choice after each
    submission: whichever order it takes, a machine could have taken it.  ``dry`` is told only of work worth doing
    (small tensors whose values are known), and does it at once.
    """

    def __init__(self, execution: Execution) -> None:
        if isinstance(execution, bool) or not (isinstance(execution, int) or execution in ("eager", "late", "dry")):
            raise ConfigError(f"execution={execution!r} is none of 'eager', 'late', 'dry' and an integer seed")
        self.immediate = execution in ("eager", "dry")
        self.running = False
        """Whether work is being done now."""
        self._random = random.Random(execution) if isinstance(execution, int) else None
        self._queues: dict[int, deque[Task]] = {}

    def add(self, stream: int, tick: int, clock: VectorClock, run: Run) -> None:
        """Take work on: step ``tick`` of ``stream``, after all that ``clock`` knows."""
        if self.immediate:
            self._do(run)
            return
        queue = self._queues.get(stream)
        if queue is None:
            queue = self._queues[stream] = deque()
        queue.append(Task(tick, dict(clock), run))
        if self._random is not None:
            self._advance(self._random)

    def force(self, clock: VectorClock) -> None:
        """Do everything that ``clock`` knows of, each task after those that it is ordered after."""
        if self.immediate:
            return
        for stream, tick in clock.items():
            queue = self._queues.get(stream)
            while queue and queue[0].tick <= tick:
                self._force_first(stream, queue)

    def _force_first(self, stream: int, queue: deque[Task]) -> None:
        task = queue[0]
        # None of this can come back to the task itself: whatever went before it knows only earlier steps of its stream.
        self.force({actor: tick for actor, tick in task.clock.items() if actor != stream})
        queue.popleft()
        self._do(task.run)

    def _advance(self, choose: random.Random) -> None:
        while choose.random() < 0.5:
            waiting = [stream for stream, queue in self._queues.items() if queue]
            if not waiting:
                return
            stream = choose.choice(waiting)
            self._force_first(stream, self._queues[stream])

    def _do(self, run: Run) -> None:
        outer, self.running = self.running, True
        try:
            run()
        finally:
            self.running = outer
