"""What a step attends to in a layer of chosen pages: the decision brought to the host, and what it is made with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fmstream.core.choices import SelectionCounts
from fmstream.core.order import Lane, Places
from fmstream.device.lanes import HostBlock, Lanes
from fmstream.payloads.page_select import Choice, Digests, Limits, select

NUM_EXEMPT: Final = 2
"""Layers from the first on that attend to everything: their attention is spread, and all others build on them."""
NUM_SINKS: Final = 1
"""Pages at the start, and"""
NUM_RECENT: Final = 1
"""complete pages at the end that are always chosen; the page that is being filled is there anyway."""
LEAST_CHOSEN: Final = NUM_SINKS + NUM_RECENT + 1
"""Pages of each head for which there is room, however small the budget."""
NARROWING: Final = 0.5
"""Part by which the first layers that choose have more pages than the mean, and the last have less: attention is spread
in the first ones and narrow in the last (PyramidKV, 2024)."""
HORIZON: Final = 64
"""Coming positions that pages are fetched ahead for."""
AHEAD_SHARE: Final = 1 / 8
"""Part of a layer's frames for pages that were not chosen but may be soon, where there are"""
LEAST_FOR_AHEAD: Final = 32
"""frames at least for each row."""
STAY: Final = 2.5
"""Scores by which a page must promise more than one in memory to be fetched instead of it."""
GATE: Final = 0.9
"""Share of the attention that may be left out by the bounds, which are far above what keys score."""

Columns = NDArray[np.int32]


class Decision(NamedTuple):
    """A `Choice` on the host, by row: a sequence's KV head; pages are columns of the block table, -1 for none.

    Attributes:
        chosen: int32 [rows, num_chosen], attended to.
        ahead: int32 [rows, num_ahead], to be fetched for later steps.
        victims: int32 [rows, ...], in frames and least wanted.
        left_out: float32 [rows], as in `Choice`.
    """

    chosen: Columns
    ahead: Columns
    victims: Columns
    left_out: NDArray[np.float32]


Chooser = Callable[[torch.Tensor, Digests, Limits, NDArray[np.bool_]], Decision]
"""Decides: (query [batch, heads, head dim], digests, limits, which pages are in frames [rows, pages]) -> decision."""


class Watcher(Protocol):
    """Is told of every decision before pages move for it, such as `fmstream.payloads.kv.hits.HitMeter`."""

    def __call__(self, seen: Seen) -> None:
        """Look at a decision."""
        ...


class Seen(NamedTuple):
    """What a watcher is shown: the layer, the query [batch, heads, 1, dim], the mask and the scale of its attention,
    the decision, whether the gate lets the layer attend to everything, and what was in frames before it or on its way
    there, bool [rows, pages]."""

    layer: Any
    query: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    decision: Decision
    falls_back: bool
    resident: NDArray[np.bool_]


@dataclass(slots=True)
class Selection:
    """How a cache chooses pages; shared by its layers.

    Attributes:
        choose: stands in place of the decision, where values are not known (a run of shapes and times only); None
            asks `select` and waits for its answer.
        gate: a layer attends to everything at a step where by the bounds more than this share would be left out.
        watch: is told of every decision.
        context_window: tokens, the newest included, that a position may attend to; None sets no limit.
        implementation: says what attention the model is set to now.
    """

    counts: SelectionCounts
    implementation: Callable[[], str | None]
    rotation: Callable[[torch.device, int], tuple[torch.Tensor, torch.Tensor]]
    choose: Chooser | None = None
    gate: float = GATE
    watch: Watcher | None = None
    context_window: int | None = None
    num_sinks: int = NUM_SINKS
    num_recent: int = NUM_RECENT
    ahead_share: float = AHEAD_SHARE
    stay: float = STAY

    def falls_back(self, decision: Decision) -> bool:
        """Whether so much would be left out that the layer attends to everything."""
        return float(decision.left_out.max()) >= self.gate

    def has_choice(self, limits: Limits | None, complete: int) -> bool:
        """Whether there is anything to decide: where all pages may be chosen, everything is attended to."""
        return limits is not None and complete > limits.num_chosen

    def limits(self, num_frames: int) -> Limits | None:
        """How many pages a row may name with so many frames; None where those that are always chosen do not fit."""
        least = max(1, self.num_sinks + self.num_recent)
        if num_frames < least:
            return None
        ahead = int(num_frames * self.ahead_share) if num_frames >= LEAST_FOR_AHEAD else 0
        ahead = min(ahead, num_frames - least)
        return Limits(num_frames - ahead, num_frames, ahead, self.num_sinks, self.num_recent, self.stay)


def share_of_layer(each: float, columns: int, layer: int, count: int) -> int:
    """Pages for each row of one of ``count`` layers, if they have ``each`` in the mean and are of so many ``columns``.

    They fall evenly from the first layer to the last, none gets more than it has, and those of all layers together are
    what there is, rounded down.
    """
    free, slope = max(0.0, each - LEAST_CHOSEN), NARROWING
    if each + free * slope > columns:
        slope = max(0.0, columns - each) / free if free else 0.0

    def of_first(layers: int) -> int:
        steepness = layers * (count - layers) / max(1, count - 1)
        return math.floor(layers * each + free * slope * steepness)

    return of_first(layer + 1) - of_first(layer)


class Desk:
    """Small arrays on their way between host and device, in the order of the compute lane.

    Each makes a point in that lane, so that frames are claimed behind it.

    The host waits only where it reads an answer, and before it writes where the last array is still being copied from.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._blocks: dict[str, tuple[HostBlock, Places]] = {}

    def upload(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """An array as a tensor on the device; arrays of one ``name`` go through one place."""
        array = np.ascontiguousarray(array)
        block, places = self._block(name, array.nbytes)
        places.join(0, 1)
        given = torch.from_numpy(array)
        source = block.tensor[: array.nbytes].view(given.dtype).view(array.shape)
        source.copy_(given)
        places.claim(Lane.COMPUTE, 0, 1)
        target = torch.empty(array.shape, dtype=source.dtype, device=self._lanes.torch_device)
        target.copy_(source, non_blocking=True)
        self._lanes.point(Lane.COMPUTE)
        return target

    def decide(self, query: torch.Tensor, digests: Digests, limits: Limits, resident: NDArray[np.bool_]) -> Decision:
        """Let `select` decide, and wait for its answer: one copy of the lists, and one event."""
        choice: Choice = select(query, digests, limits)
        parts = (choice.chosen, choice.ahead, choice.victims, choice.left_out.view(torch.int32).unsqueeze(-1))
        lists = torch.cat(parts, dim=-1).flatten(0, 1)
        rows, width = lists.shape
        block, places = self._block("answer", lists.numel() * 4)
        answer = block.tensor[: lists.numel() * 4].view(torch.int32).view(rows, width)
        places.claim(Lane.COMPUTE, 0, 1)
        answer.copy_(lists, non_blocking=True)
        self._lanes.point(Lane.COMPUTE)
        places.join(0, 1)
        numbers = answer.clone().numpy()
        cuts = np.cumsum([limits.num_chosen, limits.num_ahead, limits.num_victims])
        chosen, ahead, victims, left_out = np.split(numbers, cuts, axis=1)
        return Decision(chosen, ahead, victims, left_out.copy().view(np.float32)[:, 0])

    def _block(self, name: str, num_bytes: int) -> tuple[HostBlock, Places]:
        kept = self._blocks.get(name)
        if kept is None or kept[0].num_bytes < num_bytes:
            if kept is not None:
                kept[1].join(0, 1)
                self._lanes.free(kept[0])
            self._blocks[name] = kept = self._lanes.block(max(4096, 2 * num_bytes)), Places(1, self._lanes)
        return kept

    def close(self) -> None:
        """Give host memory back once nothing is copied from it; may be called again."""
        for block, places in self._blocks.values():
            places.join(0, 1)
            self._lanes.free(block)
        self._blocks.clear()
