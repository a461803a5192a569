"""The digests of a layer's pages, kept on the device as pages fill up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from fmstream.payloads.page_select import digest

CHUNK_BYTES: Final = 16 << 20
"""Keys that are summed up at once."""
ROOM: Final = 1 / 8
"""Part by which there is more room than is needed now."""
LEAST_ROOM: Final = 16
OUT_OF_REACH: Final = -(2.0**14)
"""Half width of a page without a token that may be attended to: no query finds it."""


class LayerDigests:
    """Centre and half width of each complete page, [batch, heads, room, dim] each.

    Attributes:
        count: pages that are summed up, from the first.
        hidden: pages of which it is known whether they may be attended to.
    """

    def __init__(self) -> None:
        self.count = 0
        self.hidden = 0
        self.centre: torch.Tensor | None = None
        self.radius: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Device memory that they take."""
        return sum(part.nbytes for part in self._parts())

    def _parts(self) -> Iterator[torch.Tensor]:
        return (part for part in (self.centre, self.radius) if part is not None)

    def add(self, keys: torch.Tensor, tokens: int) -> None:
        """Sum up further pages: keys [batch, heads, pages * tokens, dim]."""
        batch, heads, length, dim = keys.shape
        num_pages = length // tokens
        if not num_pages:
            return
        self._make_room(keys, self.count + num_pages)
        assert self.centre is not None
        assert self.radius is not None
        step = max(1, CHUNK_BYTES // (batch * heads * tokens * dim * keys.element_size()))
        for begin in range(0, num_pages, step):
            end = min(begin + step, num_pages)
            part = keys[:, :, begin * tokens : end * tokens].reshape(batch, heads, end - begin, tokens, dim)
            centre, radius = digest(part)
            self.centre[:, :, self.count + begin : self.count + end] = centre
            self.radius[:, :, self.count + begin : self.count + end] = radius
        self.count += num_pages

    def _make_room(self, keys: torch.Tensor, wanted: int) -> None:
        if not self.count:
            self.clear()  # there may be other sequences now
        old = self.centre
        if old is not None and old.shape[2] >= wanted:
            return
        room = wanted + max(LEAST_ROOM, int(wanted * ROOM))
        grown = []
        for part in (self.centre, self.radius):
            new = keys.new_zeros((keys.shape[0], keys.shape[1], room, keys.shape[3]))
            if part is not None:
                new[:, :, : self.count] = part[:, :, : self.count]
            grown.append(new)
        self.centre, self.radius = grown

    def hide(self, reachable: torch.Tensor) -> None:
        """Say of all pages whether they hold a token that may be attended to: bool [batch, 1 or heads, pages]."""
        assert self.centre is not None
        assert self.radius is not None
        new = ~reachable[:, :, : self.count].unsqueeze(-1)
        self.centre[:, :, : self.count].masked_fill_(new, 0)
        self.radius[:, :, : self.count].masked_fill_(new, OUT_OF_REACH)
        self.hidden = self.count

    def cut(self, count: int) -> None:
        """Forget pages from ``count`` on."""
        self.count = min(self.count, count)
        self.hidden = min(self.hidden, self.count)

    def choose(self, sequences: torch.Tensor) -> None:
        """Put other sequences in place of those that are there, by index on the device."""
        if self.centre is not None and self.radius is not None:
            self.centre, self.radius = (part.index_select(0, sequences) for part in (self.centre, self.radius))

    def clear(self) -> None:
        """Forget everything."""
        self.count = self.hidden = 0
        self.centre = self.radius = None

    def copy(self) -> LayerDigests:
        """The same in memory of its own."""
        other = LayerDigests()
        other.count, other.hidden = self.count, self.hidden
        if self.centre is not None and self.radius is not None:
            other.centre, other.radius = self.centre.clone(), self.radius.clone()
        return other
