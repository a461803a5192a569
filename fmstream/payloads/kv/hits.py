"""How well pages are chosen: measured on a model while it decodes, against the attention that it would have paid."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fmstream.errors import ConfigError
from fmstream.payloads.kv.choosing import Seen

if TYPE_CHECKING:
    from fmstream.payloads.kv.cache import PagedCache


@dataclass(frozen=True, slots=True)
class HitRates:
    """Shares from 0 to 1, each the mean over decisions: of a layer and KV head at a step.

    The page that is being filled counts as chosen and there, as it is.

    Attributes:
        importance: attention that the chosen pages get, over what the best pages in the same number would: all of it
            counts, that on the first and the newest tokens too.
        position: of the attention to the pages that get the most of it in truth, as many as were chosen, the part on
            pages that lay in frames or were on their way before the decision.
        paging: of the pages that were attended to, those that were.
        num_decisions: how many decisions were looked at.
        fallbacks: part of the decisions in which the gate let a layer attend to everything.
    """

    importance: float
    position: float
    paging: float
    num_decisions: int
    fallbacks: float


class HitMeter:
    """Watches the decisions of a cache.

    To know what attention would have been it reads all keys of a layer, for which no page moves; it is slow.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(3)
        self._decisions = 0
        self._fallbacks = 0

    def __call__(self, seen: Seen) -> None:
        """Compare a decision with the truth."""
        self._decisions += len(seen.resident)
        if seen.falls_back:
            self._fallbacks += len(seen.resident)
            return
        mass, rest = (part.cpu().numpy() for part in true_masses(seen))
        chosen = np.zeros(mass.shape, np.bool_)
        np.put_along_axis(chosen, seen.decision.chosen.astype(np.int64), True, 1)
        num_chosen = seen.decision.chosen.shape[1]
        best = np.argsort(-mass, axis=1, kind="stable")[:, :num_chosen]
        wanted = np.take_along_axis(mass, best, 1)
        importance = ((mass * chosen).sum(1) + rest) / (wanted.sum(1) + rest)
        there = seen.resident
        position = ((wanted * np.take_along_axis(there, best, 1)).sum(1) + rest) / (wanted.sum(1) + rest)
        paging = ((chosen & there).sum(1) + 1) / (num_chosen + 1)  # and the page that is being filled
        self._sums += [importance.sum(), position.sum(), paging.sum()]

    def rates(self) -> HitRates:
        """What was seen so far.

        Raises:
            ConfigError: nothing was chosen: the prompt is too short for the budget, or no step was made.
        """
        seen = self._decisions - self._fallbacks
        if not seen:
            raise ConfigError(
                f"none of {self._decisions} decisions chose pages: give a longer prompt, a smaller kv_budget, or let "
                "the model make some steps of one token"
            )
        importance, position, paging = (self._sums / seen).tolist()
        return HitRates(importance, position, paging, self._decisions, self._fallbacks / self._decisions)


@contextlib.contextmanager
def measuring(cache: PagedCache) -> Iterator[HitMeter]:
    """Measure what a cache chooses while the body lets a model use it.

    Raises:
        ConfigError: the cache has no ``kv_budget``.
    """
    if cache.selection is None:
        raise ConfigError("this cache attends to everything: there are no hits to measure; give it a kv_budget")
    before, meter = cache.selection.watch, HitMeter()
    cache.selection.watch = meter
    try:
        yield meter
    finally:
        cache.selection.watch = before


def measure_hits(model: Any, ids: torch.Tensor, cache: PagedCache, num_steps: int) -> HitRates:
    """Let a model read a prompt and go on greedily for some steps, with the hits of the cache measured.

    Args:
        model: one that generates, of transformers.
        ids: the prompt, [batch, tokens].
        cache: an empty `PagedCache` with a ``kv_budget``.
        num_steps: tokens to generate, at least 2: the first comes from the prompt, for which nothing is chosen.

    Raises:
        ConfigError: nothing was chosen, or the model's attention cannot choose.
    """
    with measuring(cache) as meter, cache.selecting(model):
        model.generate(ids, cache=cache, max_new_tokens=num_steps, min_new_tokens=num_steps, do_sample=False)
    return meter.rates()


def true_masses(seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that pages would get from exact attention.

    Returns:
        That of each complete page, [rows, pages], and of the page that is being filled, [rows]; the sum over the
        queries of a KV head, divided by their number.
    """
    layer = seen.layer
    rows, complete = seen.resident.shape
    tokens = layer.pool.shape.tokens
    keys = layer.pool.look(layer.block).float()
    query = seen.query[:, :, 0].float().reshape(rows, -1, keys.shape[-1])
    scores = query @ keys.mT * seen.scale
    if seen.mask is not None:
        mask = seen.mask.expand(-1, seen.query.shape[1], -1, -1).reshape(scores.shape)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    window = layer.selection.context_window
    if window is not None:
        scores[..., : max(0, scores.shape[-1] - window)] = -torch.inf
    mass = scores.softmax(-1).mean(1)
    pages = mass[:, : complete * tokens].view(rows, complete, tokens).sum(-1)
    return pages, mass[:, complete * tokens :].sum(-1)
