"""Latents that go back and forth between a step on the device and a stage on the host, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from fmstream.core.telemetry import Telemetry
from fmstream.errors import ConfigError, StageError
from fmstream.payloads.latent_run import LatentRun
from fmstream.payloads.trips import Crew, with_turn

MAX_THREADS = 64

Step = Callable[..., Tensor]
Stage = Callable[..., Tensor | None]


class LatentLoop:
    """A step on the device and a stage on the host in turn, for many items at once.

    The results are those of the sequential loop::

        for round in range(rounds):
            for index, item in enumerate(items):
                items[index] = host_stage(step(item).cpu()).to(device)

    but while one item is in ``step``, others are copied to the host, are in ``host_stage``, or are copied back.  A step
    of the next round waits for its own item only.

    Args:
        step: takes an item and returns a tensor on the device where it computed (on the CPU nothing is copied).  It is
            called in the thread that takes the results, in the order of rounds and items.
        host_stage: takes that tensor in host memory, which it may change, and returns one in host memory, or None to
            leave the latents as they are.  What has another shape or type than it was given comes back more slowly.
            Both functions are given the `Turn` as well if they have a second parameter without a default.
        window: how many items may be under way at once; 1 is the sequential loop.  Each takes pinned memory of its
            size.  Some stages fill the window at 4; more help where times vary.
        num_threads: threads that call ``host_stage``.  With one, the calls come one after the other in the order of
            the loop; with more, several items are in it at once, in any order.
        telemetry: takes a span of each call of ``host_stage``, for a timeline.

    As a context manager a loop keeps threads and pinned memory from run to run; else they are given up at the end of
    each one.

    Raises:
        ConfigError: ``window`` or ``num_threads`` is out of range, or something cannot be called.
    """

    def __init__(
        self,
        step: Step,
        host_stage: Stage,
        window: int = 4,
        *,
        num_threads: int = 1,
        telemetry: Telemetry | None = None,
    ) -> None:
        check_count("window", window, None)
        check_count("num_threads", num_threads, MAX_THREADS)
        for name, function in (("step", step), ("host_stage", host_stage)):
            if not callable(function):
                raise ConfigError(f"{name}={function!r} cannot be called: give a function that takes a tensor")
        self.window = window
        self.num_threads = num_threads
        self.telemetry = telemetry
        self.step = with_turn(step)
        self.stage = with_turn(host_stage)
        self._keeps = False
        self._idle: Crew | None = None

    def __call__(self, items: Iterable[Any], rounds: int = 1) -> LatentRun:
        """Begin a run: an iterator, and asynchronous iterator, of the results of the last round, in order.

        Args:
            items: what the first round's steps are given.  With one round they are taken as they are needed.
            rounds: how often each item takes its turn.

        Raises:
            ConfigError: ``rounds`` is no number from 1 on.
        """
        check_count("rounds", rounds, None)
        return LatentRun(self, iter(items), rounds)

    def run(self, items: Iterable[Any], rounds: int = 1) -> list[Tensor]:
        """The results of the last round, in order.

        Raises:
            StageError: a stage failed; its ``finished`` has the results before it, its ``run`` can go on.
        """
        run, results = self(items, rounds), []
        try:
            for result in run:
                results.append(result)  # noqa: PERF402 - what there is when a stage fails is handed on
        except StageError as error:
            error.finished = results
            raise
        except BaseException:
            run.close()
            raise
        return results

    def close(self) -> None:
        """Give up what is kept for further runs; the loop can be used again."""
        self._keeps = False
        crew, self._idle = self._idle, None
        if crew is not None:
            crew.close()

    def __enter__(self) -> Self:
        self._keeps = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take_crew(self, device: torch.device) -> Crew:
        """The crew that is kept, or a new one."""
        crew, self._idle = self._idle, None
        if crew is not None and crew.device == device:
            return crew
        if crew is not None:
            crew.close()
        return Crew(device, self.num_threads)

    def return_crew(self, crew: Crew) -> None:
        """Take a crew back that is at rest."""
        if self._keeps and self._idle is None:
            self._idle = crew
        else:
            crew.close()


def check_count(name: str, value: object, most: int | None) -> None:
    """Raise ConfigError for what is no number from 1 to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        limit = "at least 1" if most is None else f"from 1 to {most}"
        raise ConfigError(f"{name}={value!r} is no number that can be used: give an int, {limit}")
