"""Every fence of the path to an accelerator, each with a way to take it away: a checker of order must notice.

`OURS` are the fences of the runtime, `PLAIN` those of a loop that streams by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

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
)

PLAIN: tuple[Breaker, ...] = tuple(
    Breaker(f"by hand: {name}", partial(without_fence, name), by_hand) for name in PLAIN_FENCES
)
BREAKERS: tuple[Breaker, ...] = (*OURS, *PLAIN)
