"""What passes took: known some time after the host has left them, where a device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fmstream.core.plan import Prediction
from fmstream.core.telemetry import PassRecord, Telemetry
from fmstream.payloads.passes import Pass
from fmstream.payloads.roots import Root


@dataclass(frozen=True, slots=True)
class Ended:
    """A pass that the host has left; the device may be at it still.

    ``seen`` is what the link had done before it began, ``held_bytes`` the fast memory that was allocated at its end.
    """

    root: Root
    current: Pass
    on_route: bool
    streamed_bytes: int
    resident_bytes: int
    window_bytes: int
    fault_bytes: int
    predicted: Prediction | None
    seen: tuple[float, int]
    key: Any
    held_bytes: int


class Passbook:
    """Writes the records of passes in order, and tells ``learn`` of each."""

    def __init__(self, telemetry: Telemetry, policy: str, learn: Callable[[Ended], None]) -> None:
        self._telemetry = telemetry
        self._policy = policy
        self._learn = learn
        self._unfinished: deque[Ended] = deque()

    def add(self, ended: Ended) -> None:
        """Take a pass; one whose calls were timed is waited for, for plans are made of it."""
        self._unfinished.append(ended)
        self.take_times(block=ended.current.tape.timed)

    def take_times(self, *, block: bool) -> None:
        """Write the records of passes that have ended on the device; ``block`` until it has ended all."""
        while self._unfinished and (block or self._unfinished[0].current.tape.is_done()):
            ended = self._unfinished.popleft()
            ended.current.take_times()
            self._write(ended)
            self._learn(ended)

    def _write(self, ended: Ended) -> None:
        root, current, tape = ended.root, ended.current, ended.current.tape
        if root.latest_tape is not None and (pause := tape.pause(root.latest_tape)) is not None:
            root.between = pause
        root.latest_tape = tape
        waited = tape.waited
        if not tape.timed and ended.on_route and current.route is not None:
            waited = max(0.0, tape.seconds - current.route.trace.seconds)
        self._telemetry.passes.append(
            PassRecord(
                root=root.name,
                policy=self._policy if ended.on_route or current.light else "trace",
                start=tape.start,
                end=tape.start + tape.seconds,
                compute_seconds=tape.seconds - waited,
                wait_seconds=waited,
                streamed_bytes=ended.streamed_bytes,
                resident_bytes=ended.resident_bytes,
                window_bytes=ended.window_bytes,
                fault_bytes=ended.fault_bytes,
                predicted=ended.predicted,
            )
        )
