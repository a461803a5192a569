"""How well pages are chosen for a real model that reads a real text: three hit rates, and what they should be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from fmstream.doors.inputs import cache_name
from fmstream.errors import ConfigError
from fmstream.report.units import format_share
from fmstream.validate.models import Speaker
from fmstream.validate.outcome import Outcome, Verdict
from fmstream.validate.place import Place

if TYPE_CHECKING:
    from fmstream.payloads.kv.hits import HitRates

PART: Final = "choice of pages"
BUDGET: Final = 0.135
"""Part of the keys and values that lies on the device."""
PAGE_TOKENS: Final = 16
TOKENS: Final = 2048
"""Tokens of the text that are read, the last"""
STEPS: Final = 64
"""of them one by one, as if they had been decoded."""
MOST_FALLBACKS: Final = 0.05
"""Part of the decisions that may fall back to all pages: else the rates say little."""
LEAST_TOKENS: Final = 512
"""Below, hardly a page is left to choose."""
CHUNK: Final = 256


class _Rate(NamedTuple):
    name: str
    mark: float
    meaning: str


RATES: Final = (
    _Rate("importance", 0.92, "attention that the chosen pages got, over what the best as many would have got"),
    _Rate("position", 0.88, "of the pages that mattered most, those that were there before they were chosen"),
    _Rate("paging", 0.95, "of the pages that were attended to, those that lay in frames when they were needed"),
)


def tokens_of(speaker: Speaker, text: str) -> torch.Tensor:
    """The first tokens of a text, [1, n] on the CPU, as many as are read.

    Raises:
        ConfigError: it has too few.
    """
    most = min(TOKENS, getattr(speaker.model.config, "max_position_embeddings", TOKENS))
    ids = speaker.tokenizer(text[: 16 * TOKENS])["input_ids"][:most]
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(
            f"the text has {len(ids)} tokens that the model can read, and at least {LEAST_TOKENS} are needed to choose "
            "pages among them: give a longer text (--prompt), or a model for longer ones"
        )
    return torch.tensor([ids])


def try_hits(place: Place, speaker: Speaker, ids: torch.Tensor) -> Iterator[Outcome]:
    """Let a model read tokens, the last ones one by one with chosen pages, and hold the hit rates against their marks.

    Raises:
        ConfigError: its attention cannot be exchanged, or no page was chosen.
    """
    began = time.perf_counter()
    with place.worlds[0](), torch.no_grad():
        rates = measure(speaker.model.to(place.device), ids.to(place.device))
    seconds = time.perf_counter() - began
    for name, mark, meaning in RATES:
        found: float = getattr(rates, name)
        verdict = Verdict.PASS if found >= mark else Verdict.FAIL
        yield Outcome(PART, name, verdict, f"{found:.1%}, at least {format_share(mark)} asked: {meaning}")
    verdict = Verdict.PASS if rates.fallbacks <= MOST_FALLBACKS else Verdict.FAIL
    read = (
        f"{rates.fallbacks:.1%} of {rates.num_decisions} decisions fell back to all pages, at most "
        f"{format_share(MOST_FALLBACKS)} asked: {STEPS} steps after {ids.shape[1] - STEPS} tokens, {BUDGET:.1%} of the "
        "keys and values on the device"
    )
    yield Outcome(PART, "decisions", verdict, read, seconds)


def measure(model: Any, ids: Any) -> HitRates:
    """Hit rates of a model that reads token ids [1, n]."""
    from fmstream.payloads.kv.cache import PagedCache
    from fmstream.payloads.kv.hits import measuring

    cache = PagedCache(model.config, kv_budget=BUDGET, page_tokens=PAGE_TOKENS)
    name, first = cache_name(model), ids.shape[1] - STEPS
    parts = [*ids[:, :first].split(CHUNK, 1), *ids[:, first:].split(1, 1)]
    try:
        with cache.selecting(model), measuring(cache) as meter:
            for part in parts:
                model(part, **{name: cache}, use_cache=True, logits_to_keep=1)
            return meter.rates()
    finally:
        cache.close()
