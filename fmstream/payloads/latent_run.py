"""A run of a loop between device and host: what is under way, in order, and what becomes of it when it stops."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from fmstream.actors.stages import SLICE_SECONDS, Job
from fmstream.device.ferry import check_strided
from fmstream.device.modes import Modes
from fmstream.errors import CancelledRun, ClosedError, ConfigError, StageError
from fmstream.payloads.relay import relay
from fmstream.payloads.trips import Crew, Trip, Turn, staged

if TYPE_CHECKING:
    from fmstream.payloads.latents import LatentLoop


class LatentRun:
    """A run of a `LatentLoop`: iterate over it for the results.

    Whatever is raised while it waits or steps (by a step, a stage, `cancel`, Ctrl-C), the run stops, gives up its
    threads and its pinned memory, and keeps what it has.  Going on with the iteration goes on from there: a step or
    stage that failed is called again with the same latents (on the CPU, with what the failed call made of them).
    `replace` puts something else in place of what a failed stage should have made.
    """

    def __init__(self, loop: LatentLoop, items: Iterator[Any], rounds: int) -> None:
        self._loop = loop
        self._items = items
        self._rounds = rounds
        # An interrupt is raised after a call at the earliest, so each line below that changes two of these leaves a
        # state from which `_repair` knows what was done.
        self._fetched: deque[Any] = deque()
        """The next item, once it was asked for."""
        self._trips: deque[Trip] = deque()
        """Under way, the oldest first."""
        self._back: dict[int, Trip] = {}
        """Of each item that waits for its next round, the last trip."""
        self._ready: deque[Trip] = deque()
        """Results."""
        self._next = Turn(0, 0)
        self._num_items: int | None = None
        self._crew: Crew | None = None
        self._modes = Modes()
        self._cancelled: str | None = None
        self._closed = False
        self._is_stopping = False

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
        if self._is_stopping:  # an interrupt came while it stopped
            self.pause()
        try:
            while not self._ready:
                self._top_up()
                if not self._trips:
                    self._end()
                    break
                self._file(self._trips[0])
        except BaseException as error:
            self.pause()
            if isinstance(error, StopIteration):  # it would end the iteration without a word
                raise RuntimeError("a step raised StopIteration") from error
            raise
        if not self._ready:
            raise StopIteration
        return self._hand_out(self._ready[0])

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
        self.pause()
        trip = next((trip for trip in self._trips if trip.value is None), None)
        if trip is None or not trip.box:
            raise ConfigError("no item waits for its stage: replace() is for what a stage failed to make")
        trip.value = trip.box.pop() if latents is None else latents

    def give_back(self, latents: Tensor) -> None:
        """Take back a result that did not reach the user, for the run was cancelled; it is the next one."""
        trip = Trip(Turn(0, self._rounds - 1), None)
        trip.value = latents
        self._ready.appendleft(trip)
        self._cancelled = None

    def pause(self) -> None:
        """Give up threads and pinned memory until the iteration goes on; a stage that is running is waited for.

        After a second it is left behind: it will be called again, and what it returns is forgotten.
        """
        self._is_stopping = True
        crew = self._crew
        if crew is not None:
            crew.close()
            for trip in self._trips:
                trip.fall_back(crew.ferry)
            self._crew = None
        self._is_stopping = False

    def close(self) -> None:
        """End the run, whatever is under way."""
        self._closed = True
        self.pause()
        self._trips.clear()
        self._back.clear()
        self._ready.clear()

    @property
    def num_under_way(self) -> int:
        """Items between the beginning of a step and the return of the latents from its stage."""
        return len(self._trips)

    @property
    def latents(self) -> dict[int, Tensor]:
        """Of each item that was not handed out, by index, the latest latents that came back from the stage."""
        trips = (*self._back.values(), *self._trips)
        return {trip.turn.item: trip.value for trip in trips if trip.value is not None}

    # Steps

    def _top_up(self) -> None:
        """Begin turns while the window has room and their latents are there."""
        self._repair()
        for trip in self._trips:
            self._send(trip)
        while len(self._trips) < self._loop.window and self._begin():
            self._send(self._trips[-1])

    def _begin(self) -> bool:
        """Begin the next turn; False if there is none, or its latents are still under way."""
        if self._next.round == 0:
            if not self._fetched:
                self._fetched.extend(islice(self._items, 1))
            if self._fetched:
                self._trips.append(Trip(self._next, self._fetched[0]))
                self._step_on()
                return True
            self._num_items = self._next.item
            self._next = Turn(0, 1)
        item, round = self._next
        if round >= self._rounds or item not in self._back:
            return False
        self._trips.append(Trip(self._next, self._back[item].value))
        self._step_on()
        return True

    def _step_on(self) -> None:
        """The next turn has begun: let go of what it began with, and look to the one after it."""
        item, round = self._next
        (self._back.pop(item, None) if round else self._fetched.clear())
        self._next = Turn(0, round + 1) if item + 1 == self._num_items else Turn(item + 1, round)

    def _repair(self) -> None:
        """Finish what an interrupt left half done."""
        if self._trips and self._trips[-1].turn == self._next:
            self._step_on()
        while self._trips and (
            any(trip is self._trips[0] for trip in self._ready)
            or self._back.get(self._trips[0].turn.item) is self._trips[0]
        ):
            self._trips.popleft()

    def _send(self, trip: Trip) -> None:
        """Bring a trip as far as its stage."""
        if trip.value is not None or trip.crossing is not None:
            return
        if not trip.box:
            self._raise_if_cancelled()
            trip.box = [self._loop.step(trip.input, trip.turn)]
            self._check(trip)
            trip.input = None
        if self._crew is None:
            self._crew = self._loop.take_crew(trip.box[0].device)
        elif self._crew.device != trip.box[0].device:
            raise ConfigError(
                f"step returned latents on {trip.box[0].device} for item {trip.turn.item} and on {self._crew.device} "
                "before: return all of them on one device"
            )
        crew = self._crew
        trip.crossing = crossing = crew.ferry.leave(trip.box)
        trip.box = []
        loop = self._loop
        work = staged(loop.stage, trip.turn, crossing, crew.ferry, self._modes, loop.telemetry)
        trip.job = job = Job(work)
        crew.pool.submit(job)

    def _check(self, trip: Trip) -> None:
        output: object = trip.box[0]
        if not isinstance(output, Tensor):
            trip.box = []
            raise ConfigError(f"step returned {type(output).__name__} for item {trip.turn.item}: return a tensor")
        if output.layout != torch.strided or output.is_quantized:
            trip.box = []
            check_strided(output, f"step, for item {trip.turn.item},")
        if output.requires_grad:
            trip.box = []
            raise ConfigError(
                f"step returned latents that require a gradient for item {trip.turn.item}: a stage on the host has "
                "none; call the loop under torch.no_grad(), or detach() them"
            )

    def _file(self, trip: Trip) -> None:
        """Wait for the oldest trip and put what it brought where it is looked for next."""
        if trip.value is None:
            self._wait(trip)
            assert self._crew is not None
            assert trip.crossing is not None
            trip.value = self._crew.ferry.arrive(trip.crossing)
            trip.crossing = trip.job = None
        if trip.turn.round + 1 == self._rounds:
            self._ready.append(trip)
        else:
            self._back[trip.turn.item] = trip
        self._trips.popleft()

    def _hand_out(self, trip: Trip) -> Tensor:
        assert trip.value is not None
        try:
            self._ready.popleft()
        except BaseException:
            self._ready.appendleft(trip)
            raise
        return trip.value

    def _wait(self, trip: Trip) -> None:
        job = trip.job
        assert job is not None
        while not job.wait(SLICE_SECONDS):
            self._raise_if_cancelled()
        if job.error is None and job.carried_out:
            return
        if isinstance(job.error, Exception):
            item, round = trip.turn
            where = f"item {item}" + (f" in round {round}" if self._rounds > 1 else "")
            failure = StageError(
                f"host_stage failed for {where}: {type(job.error).__name__}: {job.error}; go on with the run to call "
                "it again, or replace() its result",
                item,
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

    def _end(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            self._loop.return_crew(crew)
