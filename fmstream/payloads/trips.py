"""One item's way from a step through a stage, and who carries it."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmstream.actors.stages import Job, StagePool
from fmstream.core.telemetry import Span, Telemetry
from fmstream.device.ferry import Crossing, Ferry, open_ferry
from fmstream.device.modes import Modes


class Turn(NamedTuple):
    """One step and stage of one item: which item, and in which round, both from 0."""

    item: int
    round: int


class Trip:
    """A turn that has begun; exactly one of the fields below says how far it is.

    Attributes:
        input: what the step is given, until it was called.
        box: what the step returned, in a list of one, until it is sent.
        crossing, job: on its way to the host and back.
        value: what came back.
    """

    __slots__ = ("box", "crossing", "input", "job", "turn", "value")

    def __init__(self, turn: Turn, given: Any) -> None:
        self.turn = turn
        self.input: Any = given
        self.box: list[Tensor] = []
        self.crossing: Crossing | None = None
        self.job: Job | None = None
        self.value: Tensor | None = None

    def fall_back(self, ferry: Ferry) -> None:
        """After its crew ended: what did not come back has to be sent again."""
        if self.crossing is not None:
            if self.job is not None and self.job.done and self.job.carried_out:
                self.value = ferry.arrive(self.crossing)
                self.box = []
            else:
                self.box = [self.crossing.output]
        self.crossing = self.job = None


class Crew:
    """A ferry and the threads of the stage, for one run at a time."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        self.device = device
        self.ferry: Ferry = open_ferry(device)
        self.pool = StagePool(num_threads, self.ferry.settle, self.ferry.close)
        self.release = weakref.finalize(self, self.pool.release)
        """For a crew that is dropped, and at exit."""

    def close(self) -> None:
        """Let the threads end, which give the memory up."""
        self.pool.close()
        self.release.detach()


def staged(
    stage: Callable[[Tensor, Turn], Tensor | None],
    turn: Turn,
    crossing: Crossing,
    ferry: Ferry,
    modes: Modes,
    telemetry: Telemetry | None,
) -> Callable[[str], None]:
    """The work of a stage's thread: take the latents off the ferry, call the stage, put them on again."""
    context = contextvars.copy_context()

    def work(lane: str) -> None:
        host = ferry.land(crossing)
        num_bytes = host.numel() * host.element_size()
        start = time.perf_counter()
        with modes.entered():
            box = [context.run(stage, host, turn)]
        del host
        ferry.embark(crossing, box)
        if telemetry is not None:
            name = f"item {turn.item}, round {turn.round}"
            telemetry.spans.append(Span(lane, name, start, time.perf_counter(), num_bytes))

    return work


def with_turn(function: Callable[..., Any]) -> Callable[[Any, Turn], Any]:
    """The function as one of two arguments: it is given the turn if it needs two."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    num_needed = 1
    with contextlib.suppress(TypeError, ValueError):  # a built-in that does not tell its parameters
        parameters = inspect.signature(function).parameters.values()
        num_needed = sum(p.kind in positional and p.default is p.empty for p in parameters)
    return function if num_needed >= 2 else lambda given, _turn: function(given)
