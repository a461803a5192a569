"""A run of a loop between device and host: what is under way, in order, and what becomes of it when it stops."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from fmstream.actors.stages import SLICE_SECONDS, Job
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
        self._trips: deque[Trip] = deque()
        self._values: dict[int, Tensor] = {}
        self._ready: deque[Tensor] = deque()
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
        self.pause()
        trip = next((trip for trip in self._trips if trip.value is None), None)
        if trip is None or not trip.box:
            raise ConfigError("no item waits for its stage: replace() is for what a stage failed to make")
        trip.value = trip.box.pop() if latents is None else latents

    def give_back(self, latents: Tensor) -> None:
        """Take back a result that did not reach the user, for the run was cancelled; it is the next one."""
        self._ready.appendleft(latents)
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
        self._values.clear()
        self._ready.clear()

    @property
    def num_under_way(self) -> int:
        """Items between the beginning of a step and the return of the latents from its stage."""
        return len(self._trips)

    @property
    def latents(self) -> dict[int, Tensor]:
        """Of each item that was not handed out, by index, the latest latents that came back from the stage."""
        back = {trip.turn.item: trip.value for trip in self._trips if trip.value is not None}
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
                self._num_items = turn.item
                turn = self._next = Turn(0, 1)
        if turn.round == 0:
            self._next = Turn(turn.item + 1, 0)
        else:
            if turn.round >= self._rounds or turn.item not in self._values:
                return False
            given = self._values.pop(turn.item)
            is_last = turn.item + 1 == self._num_items
            self._next = Turn(0, turn.round + 1) if is_last else Turn(turn.item + 1, turn.round)
        self._trips.append(Trip(turn, given))
        return True

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
        is_result = trip.turn.round + 1 == self._rounds
        self._trips.popleft()
        if is_result:
            self._ready.append(trip.value)
        else:
            self._values[trip.turn.item] = trip.value

    def _wait(self, trip: Trip) -> None:
        job = trip.job
        assert job is not None
        while not job.done.wait(SLICE_SECONDS):
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
