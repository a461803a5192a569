"""Hit rates: what the meter says is what plain tensors say, and measuring moves no page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fmstream import PagedCache
from fmstream.emulator.backlog import Execution
from fmstream.errors import ConfigError
from fmstream.payloads.kv.choosing import Decision, Seen
from fmstream.payloads.kv.hits import HitMeter, measure_hits, measuring, true_masses
from tests.kv.kit import checked, fresh, generate, llama, model_on, prompt

TOKENS = 4


@pytest.mark.parametrize(("device", "execution"), [("cpu", "eager"), ("emu", "late"), ("emu", 1)])
def test_measuring_changes_nothing(device: str, execution: Execution) -> None:
    fresh(execution)
    model = model_on(llama, device)
    found = []
    for is_measured in (False, True):
        with checked(PagedCache(model.config, page_tokens=TOKENS, kv_budget=4)) as cache, cache.selecting(model):
            if is_measured:
                with measuring(cache) as meter:
                    tokens = generate(model, prompt(60), cache)
                assert cache.selection.watch is None
            else:
                tokens = generate(model, prompt(60), cache)
            found.append((tokens.tolist(), cache.statistics()))
    assert found[0] == found[1]
    rates = meter.rates()
    assert rates.num_decisions == found[0][1].selection.decisions
    assert 0 < rates.importance <= 1
    assert 0 < rates.paging < 1
    assert rates.position <= 1


@pytest.mark.parametrize(("device", "execution"), [("cpu", "eager"), ("emu", "late"), ("emu", 1)])
def test_looking_finds_the_keys_wherever_they_lie(device: str, execution: Execution) -> None:
    fresh(execution)
    model = model_on(llama, device)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with checked(PagedCache(model.config, page_tokens=TOKENS, kv_budget=3)) as cache, cache.selecting(model):

        def watch(decision: Seen) -> None:
            layer = decision.layer
            seen.append((layer.pool.look(layer.block).clone(), layer._together()[0].flatten(0, 1).clone()))

        cache.selection.watch = watch
        generate(model, prompt(60, 2), cache, max_new_tokens=6)
    assert len(seen) == 2 * 5
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in seen)


class Layer:
    """As much of a layer as a meter looks at: two rows of three complete pages of two tokens, and one token more."""

    def __init__(self, keys: torch.Tensor, window: int | None = None) -> None:
        self.keys = keys
        self.pool = self
        self.shape = self
        self.tokens = 2
        self.block = None
        self.selection = self
        self.context_window = window

    def look(self, _: Any) -> torch.Tensor:
        return self.keys


def made_up(chosen: list[list[int]], resident: list[list[bool]], **options: Any) -> Seen:
    """A decision where pages 0, 1 and 2 get 1, 2 and 4 parts of the attention, and the last token one part."""
    scores = torch.tensor([0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 1.0]).log()
    layer = Layer(scores.view(1, 7, 1).repeat(2, 1, 1), options.pop("window", None))
    nothing = np.full((2, 0), -1, np.int32)
    decision = Decision(np.array(chosen, np.int32), nothing, nothing, np.zeros(2, np.float32))
    falls_back = options.pop("falls_back", False)
    mask = options.pop("mask", None)
    return Seen(layer, torch.ones(1, 2, 1, 1), mask, 1.0, decision, falls_back, np.array(resident))


def test_rates_by_hand() -> None:
    meter = HitMeter()
    meter(made_up([[1, 2], [0, 2]], [[True, False, True], [False, True, False]]))
    rates = meter.rates()
    assert rates.importance == pytest.approx((7 / 7 + 6 / 7) / 2)
    assert rates.position == pytest.approx(((4 + 1) / 7 + (2 + 1) / 7) / 2)
    assert rates.paging == pytest.approx((2 / 3 + 1 / 3) / 2)
    meter(made_up([[0, 1], [0, 1]], [[False] * 3] * 2, falls_back=True))
    assert meter.rates().fallbacks == 0.5
    assert meter.rates().importance == rates.importance


def test_masses_know_masks_and_windows() -> None:
    pages, rest = true_masses(made_up([[0], [0]], [[True] * 3] * 2))
    torch.testing.assert_close(pages, torch.tensor([[1, 2, 4], [1, 2, 4]]) / 8)
    torch.testing.assert_close(rest, torch.tensor([1, 1]) / 8)
    pages, _ = true_masses(made_up([[0], [0]], [[True] * 3] * 2, window=3))
    torch.testing.assert_close(pages[0], torch.tensor([0, 0, 4]) / 5)
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    mask[..., :4] = False
    pages, _ = true_masses(made_up([[0], [0]], [[True] * 3] * 2, mask=mask))
    torch.testing.assert_close(pages[1], torch.tensor([0, 0, 4]) / 5)
    added = torch.zeros(1, 1, 1, 7).masked_fill(~mask, -1e9)
    again, _ = true_masses(made_up([[0], [0]], [[True] * 3] * 2, mask=added))
    torch.testing.assert_close(again, pages)


def test_measured_in_one_call() -> None:
    fresh()
    model = model_on(llama, "cpu")
    model.generation_config.pad_token_id = 0
    rates = measure_hits(model, prompt(60), PagedCache(model.config, page_tokens=TOKENS, kv_budget=4), 8)
    assert rates.num_decisions == 7 * 2 * 2
    with pytest.raises(ConfigError, match="none of 0 decisions chose pages: give a longer prompt"):
        measure_hits(model, prompt(9), PagedCache(model.config, page_tokens=TOKENS, kv_budget=4), 4)
    with (
        pytest.raises(ConfigError, match="this cache attends to everything"),
        measuring(PagedCache(model.config)),
    ):
        pass
