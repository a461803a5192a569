"""Every fence of the path to an accelerator, each with a way to take it away: a checker of order must notice.

`OURS` are the fences of the runtime, `PLAIN` those of a loop that streams by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from bench.latent_loops import fences as fences_of_latents
from bench.row_scenarios import few_rows, row_passes, windows_by_hand, windows_in_a_side_stream
from bench.scenarios import (
    PLAIN_FENCES,
    broken_off_pass,
    by_hand,
    edited_passes,
    pinned_passes,
    replaced,
    resident_passes,
    side_stream,
    staged_passes,
    switching_passes,
    without_fence,
)
from fmstream.actors.rows import DeviceRing, Rows
from fmstream.actors.runs import Loaded
from fmstream.actors.staging import StagingRing
from fmstream.actors.uploads import Uploads
from fmstream.device.accelerator import Accelerator, DeviceSlab
from fmstream.payloads.master import Master


class Breaker(NamedTuple):
    """A fence: its name, a context without it, and what shows that it is missing."""

    name: str
    broken: Callable[[], AbstractContextManager[Any]]
    scenario: Callable[[], None]


def without(owner: Any, name: str) -> AbstractContextManager[None]:
    """Let a method do nothing."""
    return replaced(owner, name, lambda _: lambda *_args, **_kwargs: None)


def not_followed(which: Callable[[Loaded], bool]) -> AbstractContextManager[None]:
    """Let computing not wait for some runs."""

    def make(follow: Any) -> Any:
        return lambda loads, loaded: None if which(loaded) else follow(loads, loaded)

    return replaced(Uploads, "_follow", make)


@contextmanager
def _without_both_barriers() -> Iterator[None]:
    # A new plan's barrier, which mostly comes right after, would stand in for the slab's own.
    with without(Accelerator, "let_copies_wait"), without(Uploads, "barrier"):
        yield


def _is_demand(loaded: Loaded) -> bool:
    return not loaded.run.name.startswith(("unit", "residents"))


def _ready_too_early(enqueue: Any) -> Any:
    def early(loads: Uploads, loaded: Loaded, copies: Any) -> Any:
        mark = loads.device.mark(loads.device.copies)
        enqueue(loads, loaded, copies)
        return mark

    return early


def _copy_before_the_read(read: Any) -> Any:
    def early(loads: Uploads, ticket: int, chunk: Any) -> None:
        with loads.device.copying():
            target = chunk.loaded.part.tensor[chunk.start : chunk.start + chunk.num_bytes]
            target.copy_(loads.staging.bytes(chunk.place, chunk.num_bytes), non_blocking=True)
        read(loads, ticket, chunk)

    return early


def _marked_on_the_copy_stream(mark: Any) -> Any:
    return lambda device, stream=None, *, timed=False: mark(device, device.copies, timed=timed)


def _left_at_once(leave: Any) -> Any:
    return lambda ring, place, _mark: leave(ring, place, None)


def _never_waiting(_follow: Any) -> Any:
    return lambda _rows, _batch: None


@contextmanager
def _copied_before_the_gather() -> Iterator[None]:
    """Copies of rows are enqueued first, and their gathers awaited then."""

    def make(copy: Any) -> Any:
        def early(rows: Rows, batch: Any) -> bool:
            done: bool = copy(rows, batch)
            if done and batch.ticket is not None:
                rows.gathers.wait(batch.ticket, lambda: None)
                batch.ticket = None
            return done

        return early

    with replaced(Rows, "_is_gathered", lambda _: lambda _rows, _batch: True), replaced(Rows, "_copy", make):
        yield


OURS: tuple[Breaker, ...] = (
    Breaker(
        "computing waits for a unit's bytes",
        lambda: not_followed(lambda loaded: loaded.run.name.startswith("unit")),
        pinned_passes,
    ),
    Breaker(
        "computing waits for the residents",
        lambda: not_followed(lambda loaded: loaded.run.name == "residents"),
        resident_passes,
    ),
    Breaker("computing waits for a demand load", lambda: not_followed(_is_demand), pinned_passes),
    Breaker(
        "the mark of a load is behind its copy", lambda: replaced(Uploads, "_enqueue", _ready_too_early), pinned_passes
    ),
    Breaker("a copy waits for the frames' uses", lambda: without(Uploads, "_wait_for_uses"), pinned_passes),
    Breaker(
        "a use is marked in the stream that computes",
        lambda: replaced(Accelerator, "mark", _marked_on_the_copy_stream),
        pinned_passes,
    ),
    Breaker("a new plan waits for the old one's uses", lambda: without(Uploads, "barrier"), switching_passes),
    Breaker("copies to a new slab wait for its memory", _without_both_barriers, pinned_passes),
    Breaker("memory is unpinned behind its copies", lambda: without(Accelerator, "settle"), broken_off_pass),
    Breaker("a slab that is dropped outlives its streams", lambda: without(DeviceSlab, "used_on"), side_stream),
    Breaker("an edit of weights follows their copy", lambda: without(Master, "_settle"), edited_passes),
    Breaker(
        "staging is kept until it was copied", lambda: replaced(StagingRing, "leave", _left_at_once), staged_passes
    ),
    Breaker(
        "a copy from staging follows the read", lambda: replaced(Uploads, "_read", _copy_before_the_read), staged_passes
    ),
    *(Breaker(*fence) for fence in fences_of_latents(without)),
)

ROWS: tuple[Breaker, ...] = (
    Breaker("rows are used behind their copy", lambda: replaced(Rows, "_follow", _never_waiting), windows_by_hand),
    Breaker("rows of a pass are used behind their copy", lambda: replaced(Rows, "_follow", _never_waiting), row_passes),
    Breaker("a copy of rows waits for the uses of its place", lambda: without(DeviceRing, "_await_use"), row_passes),
    Breaker(
        "rows are staged until they were copied", lambda: replaced(StagingRing, "leave", _left_at_once), windows_by_hand
    ),
    Breaker(
        "a few rows are staged until they were copied", lambda: replaced(StagingRing, "leave", _left_at_once), few_rows
    ),
    Breaker("rows are copied behind their gather", _copied_before_the_gather, windows_by_hand),
    Breaker(
        "copies to a new ring wait for its memory", lambda: without(Accelerator, "let_copies_wait"), windows_by_hand
    ),
    Breaker(
        "a ring that is dropped outlives its streams", lambda: without(DeviceSlab, "used_on"), windows_in_a_side_stream
    ),
)

PLAIN: tuple[Breaker, ...] = tuple(
    Breaker(f"by hand: {name}", partial(without_fence, name), by_hand) for name in PLAIN_FENCES
)
BREAKERS: tuple[Breaker, ...] = (*OURS, *ROWS, *PLAIN)
