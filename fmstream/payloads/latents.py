"""Latents that go back and forth between a step on the device and a stage on the host, several at a time."""

from __future__ import annotations

import contextvars
import inspect
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fmstream.actors.stages import SLICE_SECONDS, Job, StagePool
from fmstream.core.telemetry import Span, Telemetry
from fmstream.device.ferry import Crossing, Ferry, open_ferry
from fmstream.device.modes import Modes
from fmstream.errors import CancelledRun, ClosedError, ConfigError, StageError
from fmstream.payloads.relay import relay

MAX_THREADS = 64

Step = Callable[..., Tensor]
Stage = Callable[..., Tensor | None]


class Turn(NamedTuple):
    """One step and stage of one item: which item, and in which round, both from 0."""

    index: int
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
            if self.job is not None and self.job.done.is_set() and self.job.carried_out:
                self.value = ferry.arrive(self.crossing)
                self.box = []
            else:
                self.box = [self.crossing.output]
        self.crossing = self.job = None


class Crew:
    """A ferry and the threads of the stage, for one run at a time."""

    def __init__(self, device: torch.device, window: int, num_threads: int) -> None:
        self.device = device
        self.ferry: Ferry = open_ferry(device, window)
        self.pool = StagePool(num_threads, self.ferry.settle, self.ferry.close)
        self.release = weakref.finalize(self, self.pool.release)
        """For a crew that is dropped, and at exit."""

    def close(self) -> None:
        """Let the threads end, which give the memory up."""
        self.pool.close()
        self.release.detach()


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
        self._step = with_turn(step)
        self._stage = with_turn(host_stage)
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

    def _take_crew(self, device: torch.device) -> Crew:
        crew, self._idle = self._idle, None
        if crew is not None and crew.device == device:
            return crew
        if crew is not None:
            crew.close()
        return Crew(device, self.window, self.num_threads)

    def _return_crew(self, crew: Crew) -> None:
        if self._keeps and self._idle is None:
            self._idle = crew
        else:
            crew.close()


class LatentRun:
    """A run of a `LatentLoop`: iterate over it for the results.

    Whatever is raised while it waits or steps (by a step, a stage, `cancel`, Ctrl-C), the run stops, gives up its
    threads and its pinned memory, and keeps what it has.  Going on with the iteration goes on from there: a step or stage
    that failed is called again with the same latents (on the CPU, with what the failed call made of them).  `replace`
    puts something else in place of what a failed stage should have made.
    """

    def __init__(self, loop: LatentLoop, items: Iterator[Any], rounds: int) -> None:
        self._loop = loop
        self._items = items
        self._rounds = rounds
        self._trips: deque[Trip] = deque()
        self._values: dict[int, Tensor] = {}
        self._ready: deque[Tensor] = deque()
        self._next = Turn(0, 0)
        self._num_items: int | None = None
        self._crew: Crew | None = None
        self._modes = Modes()
        self._cancelled: str | None = None
        self._closed = False

    # What the user calls

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        """The next result.

        Raises:
            StageError: a stage failed; the message names its item.
            CancelledRun: the run was cancelled.
            ClosedError: the run was closed.
        """
        if self._closed:
            raise ClosedError("this run of a LatentLoop is closed: begin another one")
        try:
            while not self._ready:
                self._top_up()
                if not self._trips:
                    self._end()
                    break
                self._file(self._trips[0])
        except BaseException as error:
            self._suspend()
            if isinstance(error, StopIteration):  # it would end the iteration without a word
                raise RuntimeError("a step raised StopIteration") from error
            raise
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def __aiter__(self) -> AsyncIterator[Tensor]:
        """Iterate in a thread, so that the event loop goes on; cancelling the task stops the run as `cancel` does."""
        return relay(self)

    def cancel(self, reason: str = "the run was cancelled") -> None:
        """Let the iteration raise `CancelledRun` at its next step or wait; from any thread."""
        self._cancelled = reason

    def replace(self, latents: Tensor | None) -> None:
        """Put latents in place of what the oldest stage that has not come back should have made; None leaves them.

        They are what the next step, or the user, is given: on the device.

        Raises:
            ConfigError: no item waits for its stage.
        """
        self._suspend()
        trip = next((trip for trip in self._trips if trip.value is None), None)
        if trip is None or not trip.box:
            raise ConfigError("no item waits for its stage: replace() is for what a stage failed to make")
        trip.value = trip.box.pop() if latents is None else latents

    def give_back(self, latents: Tensor) -> None:
        """Take back a result that did not reach the user; it is the next one."""
        self._ready.appendleft(latents)

    def close(self) -> None:
        """End the run, whatever is under way."""
        self._closed = True
        self._suspend()
        self._trips.clear()
        self._values.clear()
        self._ready.clear()

    @property
    def num_under_way(self) -> int:
        """Items between the beginning of a step and the return of the latents from its stage."""
        return len(self._trips)

    @property
    def latents(self) -> dict[int, Tensor]:
        """Of each item that was not handed out, by index, the latest latents that came back from the stage."""
        back = {trip.turn.index: trip.value for trip in self._trips if trip.value is not None}
        return self._values | back

    # Steps

    def _top_up(self) -> None:
        """Begin turns while the window has room and their latents are there."""
        for trip in self._trips:
            self._send(trip)
        while len(self._trips) < self._loop.window and self._begin():
            self._send(self._trips[-1])

    def _begin(self) -> bool:
        """Begin the next turn; False if there is none, or its latents are still under way."""
        turn = self._next
        if turn.round == 0:
            try:
                given = next(self._items)
            except StopIteration:
                self._num_items = turn.index
                turn = self._next = Turn(0, 1)
        if turn.round == 0:
            self._next = Turn(turn.index + 1, 0)
        else:
            if turn.round >= self._rounds or turn.index not in self._values:
                return False
            given = self._values.pop(turn.index)
            is_last = turn.index + 1 == self._num_items
            self._next = Turn(0, turn.round + 1) if is_last else Turn(turn.index + 1, turn.round)
        self._trips.append(Trip(turn, given))
        return True

    def _send(self, trip: Trip) -> None:
        """Bring a trip as far as its stage."""
        if trip.value is not None or trip.crossing is not None:
            return
        if not trip.box:
            self._raise_if_cancelled()
            trip.box = [self._loop._step(trip.input, trip.turn)]
            self._check(trip)
            trip.input = None
        if self._crew is None:
            self._crew = self._loop._take_crew(trip.box[0].device)
        elif self._crew.device != trip.box[0].device:
            raise ConfigError(
                f"step returned latents on {trip.box[0].device} for item {trip.turn.index} and on {self._crew.device} "
                "before: return all of them on one device"
            )
        crew = self._crew
        trip.crossing = crossing = crew.ferry.leave(trip.box)
        trip.box = []
        work = staged(self._loop, crew.ferry, crossing, trip.turn, self._modes)
        trip.job = job = Job(work)
        crew.pool.submit(job)

    def _check(self, trip: Trip) -> None:
        output: object = trip.box[0]
        if not isinstance(output, Tensor):
            trip.box = []
            raise ConfigError(f"step returned {type(output).__name__} for item {trip.turn.index}: return a tensor")
        if output.requires_grad:
            trip.box = []
            raise ConfigError(
                f"step returned latents that require a gradient for item {trip.turn.index}: a stage on the host has "
                "none; call the loop under torch.no_grad(), or detach() them"
            )

    def _file(self, trip: Trip) -> None:
        """Wait for the oldest trip and put what it brought where it is looked for next."""
        if trip.value is None:
            self._wait(trip)
            assert self._crew is not None and trip.crossing is not None
            trip.value = self._crew.ferry.arrive(trip.crossing)
            trip.crossing = trip.job = None
        is_result = trip.turn.round + 1 == self._rounds
        self._trips.popleft()
        if is_result:
            self._ready.append(trip.value)
        else:
            self._values[trip.turn.index] = trip.value

    def _wait(self, trip: Trip) -> None:
        job = trip.job
        assert job is not None
        while not job.done.wait(SLICE_SECONDS):
            self._raise_if_cancelled()
        if job.error is None and job.carried_out:
            return
        if isinstance(job.error, Exception):
            index, round = trip.turn
            where = f"item {index}" + (f" in round {round}" if self._rounds > 1 else "")
            failure = StageError(
                f"host_stage failed for {where}: {type(job.error).__name__}: {job.error}; go on with the run to call it "
                "again, or replace() its result",
                index,
                round,
            )
            failure.run = self
            raise failure from job.error
        raise job.error if job.error is not None else CancelledRun("the stage's threads were stopped")

    # Ends

    def _raise_if_cancelled(self) -> None:
        reason, self._cancelled = self._cancelled, None
        if reason is not None:
            raise CancelledRun(reason)

    def _suspend(self) -> None:
        """Stop, keep what there is, give up threads and pinned memory."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()
            for trip in self._trips:
                trip.fall_back(crew.ferry)

    def _end(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            self._loop._return_crew(crew)


def staged(
    loop: LatentLoop, ferry: Ferry, crossing: Crossing, turn: Turn, modes: Modes
) -> Callable[[str], None]:
    """The work of a stage's thread: take the latents off the ferry, call the stage, put them on again."""
    stage, telemetry, context = loop._stage, loop.telemetry, contextvars.copy_context()

    def work(lane: str) -> None:
        host = ferry.land(crossing)
        num_bytes = host.numel() * host.element_size()
        start = time.perf_counter()
        with modes.entered():
            result = context.run(stage, host, turn)
        del host
        ferry.embark(crossing, result)
        if telemetry is not None:
            name = f"item {turn.index}, round {turn.round}"
            telemetry.spans.append(Span(lane, name, start, time.perf_counter(), num_bytes))

    return work


def with_turn(function: Callable[..., Any]) -> Callable[[Any, Turn], Any]:
    """The function as one of two arguments: it is given the turn if it needs two."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in that does not tell its parameters
        parameters = {}.values()  # type: ignore[assignment]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return function if len(needed) >= 2 else lambda given, _turn: function(given)


def check_count(name: str, value: object, most: int | None) -> None:
    """Raise ConfigError for what is no number from 1 to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        limit = "at least 1" if most is None else f"from 1 to {most}"
        raise ConfigError(f"{name}={value!r} is no number that can be used: give an int, {limit}")
