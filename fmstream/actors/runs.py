"""What the compute actor moves: runs of pages, and the payload that knows what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fmstream.actors.chunks import Piece
from fmstream.device.accelerator import DeviceSlab, Mark
from fmstream.device.device import Part


class Payload(Protocol):
    """What the executor moves: parameters by id."""

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each parameter in fast memory, a multiple of 64."""

    def pieces(self, param: int, address: int) -> Iterable[Piece]:
        """The copies that bring a parameter to ``address``."""

    def bind(self, param: int, part: Part, offset: int) -> None:
        """Show the bytes at ``offset`` of ``part`` as the parameter."""

    def unbind(self, params: Sequence[int], offsets: Sequence[int], part: Part) -> None:
        """Show the stand-ins again; ``part`` and ``offsets`` are what they were bound to."""

    def rewrite(self, param: int, part: Part, offset: int) -> None:
        """Copy the master's present bytes to ``offset`` of ``part``."""

    def escaped(self, params: Sequence[int]) -> None:
        """Some of these are aliased by a tensor that outlived their use."""

    def outlived(self, params: Sequence[int], offsets: Sequence[int], part: Part) -> None:
        """Some of these are aliased by a tensor that outlived the pass; ``offsets`` are theirs in ``part``."""


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters that arrive and leave together, and the pages that they occupy."""

    name: str
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    start: int
    count: int


@dataclass(slots=True, eq=False)
class Loaded:
    """A run with frames: on its way, or in use."""

    run: Run
    frame: int
    ticket: int
    part: Part
    position: int | None = None
    """Place in the window; None for residents and demand loads."""
    bound: bool = False
    used: bool = False
    """Whether it has been bound."""
    slab: DeviceSlab | None = None
    ready: Mark | None = None
    """Behind its copy to an accelerator; None while it was not enqueued."""
