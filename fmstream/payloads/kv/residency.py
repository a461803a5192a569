"""Which pages stay in frames where not all fit: the layers are read in turn, over and over.

Whatever was used last is needed last, so that keeping what is recent would always miss.  The same share of every layer
stays; the rest of a layer makes room as soon as it was read.  So the link has the same work in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fmstream.core.pages import LOADING, RESIDENT, PageTable
from fmstream.payloads.kv.blocks import BlockTable, Ids

ON_THE_WAY: Final = 1.25
"""Layers' worth of frames for what comes and goes, at most: the next layer's pages, while this one's are being left."""
AHEAD_SHARE: Final = 0.15
AHEAD_BYTES: Final = 48 << 20
"""What the link brings while a layer computes: this part of a layer, for attention takes longer the longer it is, and
so many bytes, for the rest of a layer takes as long whatever the context.  More frames than that for what comes would
lie idle: a layer is put together a chunk at a time, and the chunk's frames are free then for what has yet to come."""


def kept_columns(num_frames: int, num_layers: int, table: BlockTable, page_bytes: int) -> int:
    """Columns at the beginning of every layer that stay in frames."""
    sequences, columns, in_layer = table.num_sequences, int(table.pages.shape[1]), table.num_pages
    if num_frames >= in_layer * num_layers:
        return columns
    most = ON_THE_WAY if num_layers > 2 else ON_THE_WAY - 1
    moving = min(most, AHEAD_SHARE + AHEAD_BYTES / (in_layer * page_bytes))
    kept = (num_frames - moving * in_layer - sequences) / max(num_layers - moving, 0.75)
    return max(0, int(kept * columns) // in_layer)


def in_order_of_leaving(count: int, current: int) -> list[int]:
    """Layers from the one whose pages are needed last, but the one before the current comes first: its frames are free
    already when those of the current are still being read."""
    behind = [(current - step) % count for step in range(1, count)]
    return [*behind[:1], current, *behind[1:]]


class Kind(Enum):
    """Pages that may leave their frames: those that pass through, those that stay, those that are on their way."""

    PASSING = auto()
    STAYING = auto()
    LOADING = auto()


def leaving(
    table: PageTable, layers: Sequence[BlockTable], current: int, kept: Callable[[BlockTable], int], wanted: int
) -> Iterator[tuple[Ids, Kind]]:
    """Pages that may leave their frames, the best first, until ``wanted`` are found; one kind after the other.

    What passes through leaves a layer at a time, so that frames do not fall to pieces.
    """
    order = in_order_of_leaving(len(layers), current)
    for kind in Kind:
        for index in order:
            layer = layers[index]
            if kind is Kind.PASSING:
                found = passing(table, layer, kept(layer))
            elif kind is Kind.STAYING:
                found = unpinned(table, layer.pages)[:wanted]
            else:
                found = each_once(layer.pages, table.state == LOADING)[::-1][:wanted]
            if len(found):
                yield found, kind
                wanted -= len(found)
                if wanted <= 0:
                    return


def passing(table: PageTable, layer: BlockTable, kept: int) -> Ids:
    """Pages of a layer in frames that do not stay: behind those kept, before the last column, which is written to."""
    return unpinned(table, layer.pages[:, kept:-1])


def unpinned(table: PageTable, pages: Ids) -> Ids:
    """Those in frames that nobody pins, each once."""
    return each_once(pages, (table.state == RESIDENT) & (table.pins == 0))


def each_once(pages: Ids, which: NDArray[np.bool_]) -> Ids:
    """The pages of a block table that ``which`` names, those of several sequences once."""
    flat = pages.ravel()
    flat = flat[which[flat]]
    if pages.shape[0] < 2 or len(flat) < 2:
        return flat
    return flat[np.sort(np.unique(flat, return_index=True)[1])]
