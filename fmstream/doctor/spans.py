"""A stretch of work in a stream, timed by the device between two events."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fmstream.device.accelerator import Accelerator, Mark


class Span(NamedTuple):
    """Two points in a stream, both timed."""

    began: Mark
    ended: Mark

    def seconds(self) -> float:
        """How long the device took from one to the other; waits for the second."""
        self.ended.event.synchronize()
        return float(self.began.event.elapsed_time(self.ended.event)) / 1e3


def enqueue_copies(device: Accelerator, stream: Any, target: Tensor, source: Tensor, count: int) -> Span:
    """Copy ``source`` to ``target`` that many times in a stream."""
    began = device.mark(stream, timed=True)
    with device.module.stream(stream):
        for _ in range(count):
            target.copy_(source, non_blocking=True)
    return Span(began, device.mark(stream, timed=True))
