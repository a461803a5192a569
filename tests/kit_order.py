"""A prefetch actor without threads, which carries out each read at a moment of the test's choosing.

``early`` makes a read when it is asked for, so that memory which is still in use is overwritten at once.  ``late``
makes it only while somebody waits, so that whoever does not wait sees what was there before: bytes of all ones, which
are NaN in every floating type.  ``newest`` is as late, in the opposite order; ``seeded`` mixes all of these.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from fmstream.actors.chunks import Piece
from fmstream.actors.compute import Executor
from fmstream.actors.prefetch import CANCELLED, DONE, PrefetchActor, Request
from fmstream.actors.runs import Loaded
from fmstream.core.ring import Record, Ring
from fmstream.device.files import Staging
from fmstream.payloads import session

MODES = ("early", "late", "newest", "seeded")
POISON = 0xFF


class OrderedActor(PrefetchActor):
    """Carries out requests in the thread that asks and waits."""

    mode = "early"
    seed = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.completions = OrderedRing(self)
        self.queued: list[tuple[int, Request]] = []
        self.most_queued = 0
        self.order = random.Random(self.seed)

    def submit(self, ticket: int, pieces: Sequence[Piece] | Request, keep: object, name: str) -> None:
        """Poison the destinations, then read now or keep the request."""
        request = pieces if isinstance(pieces, Request) else self.prepare(pieces)
        for piece in request.pieces:
            ctypes.memset(piece.dst, POISON, piece.num_bytes)
        self.queued.append((ticket, request))
        self.most_queued = max(self.most_queued, len(self.queued))
        if self.mode == "early" or (self.mode == "seeded" and self.order.random() < 0.5):
            self.read_one()

    def read_one(self) -> None:
        """Make the read of one request, and report it."""
        at = {"early": 0, "late": 0, "newest": -1, "seeded": self.order.randrange(len(self.queued))}[self.mode]
        ticket, request = self.queued.pop(at)
        extent, staging = Staging(self._chunk_bytes), Staging(1 << 13)
        for chunk in request.chunks:
            chunk.carry_out(extent, staging)
            self._telemetry.link_bytes += chunk.num_bytes
        extent.close()
        staging.close()
        self.completions.push(Record(DONE, 0, 0, ticket))

    def cancel(self, tickets: Iterable[int]) -> None:
        """A read that was not made is never made."""
        dropped = set(tickets)
        for ticket, _ in self.queued:
            if ticket in dropped:
                self.completions.push(Record(CANCELLED, 0, 0, ticket))
        self.queued = [entry for entry in self.queued if entry[0] not in dropped]


class OrderedRing(Ring):
    """Lets its actor read while somebody waits for a record."""

    def __init__(self, actor: OrderedActor) -> None:
        super().__init__()
        self.actor = actor

    def pop(self, timeout: float | None = None) -> Record | None:
        """The oldest record; if there is none and the caller is ready to wait, a read is made first."""
        if timeout and not len(self) and self.actor.queued:
            self.actor.read_one()
        return super().pop(timeout)


def order_reads(monkeypatch: pytest.MonkeyPatch, mode: str, seed: int = 0) -> list[OrderedActor]:
    """Let handles that are opened from now on read in an order; returns their actors, to look into.

    What is given back is poisoned as well: a view of it that is used later gives NaN.
    """
    made: list[OrderedActor] = []

    def make(*args: Any, **kwargs: Any) -> OrderedActor:
        actor = OrderedActor(*args, **kwargs)
        actor.mode, actor.order = mode, random.Random(seed)
        made.append(actor)
        return actor

    monkeypatch.setattr(session, "PrefetchActor", make)
    poison_given_back(monkeypatch)
    return made


def poison_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill frames with ones when they are given back."""
    give_back = Executor._give_back

    def poisoning(executor: Executor, loaded: Loaded) -> None:
        give_back(executor, loaded)
        ctypes.memset(loaded.part.address, POISON, loaded.run.count * executor.page_bytes)

    monkeypatch.setattr(Executor, "_give_back", poisoning)
