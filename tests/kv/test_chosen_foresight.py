"""What comes to frames before the first step, and how frames are shared among the layers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmstream.emulator.backlog import Execution
from fmstream.payloads.kv.choosing import LEAST_CHOSEN, Seen, share_of_layer
from tests.kv.kit import checked, fresh, gemma, generate, llama, model_on, plain_cache, prompt
from tests.kv.test_selective import TOKENS, chosen_cache


@pytest.mark.parametrize("chunk", [240, 80])
@pytest.mark.parametrize(("device", "execution"), [("cpu", "eager"), ("emu", "late"), ("emu", 1)])
def test_the_end_of_a_prompt_brings_what_its_last_query_chooses(device: str, execution: Execution, chunk: int) -> None:
    fresh(execution)
    model, ids = model_on(llama, device), prompt(240)
    seen: list[Seen] = []
    with checked(chosen_cache(model, 12)) as cache, cache.selecting(model), torch.no_grad():
        cache.selection.watch = seen.append
        for part in torch.split(ids.to(device), chunk, 1):
            model(part, cache=cache, logits_to_keep=1)
        assert not seen, "a prompt is no decision"
        (pool,) = cache.pools
        for layer in cache.layers[2:]:
            meant = layer._meant[:, : 240 // TOKENS]
            limits = cache.selection.limits(pool.quota(layer.block))
            assert (meant.sum(1) == limits.num_chosen).all()
            there = pool.resident(layer.block.pages)[meant]
            assert there.mean() > 0.8, "others only pass"
        did = cache.statistics().selection
        assert did.ahead > 0
        assert did.decisions == did.chosen == did.recalled == 0
        model(ids[:, :1].to(device), cache=cache)
        assert len(seen) == 2
        assert cache.statistics().selection.ahead_used > 0
        pages = seen[1].decision.chosen
        assert np.take_along_axis(seen[1].resident, pages, 1).mean() > 0.5


def test_only_the_queries_of_the_tokens_that_came_last_are_asked() -> None:
    fresh()
    model, ids = model_on(llama, "cpu"), prompt(60)
    with checked(chosen_cache(model, 3)) as cache, cache.selecting(model), torch.no_grad():
        model(ids, cache=cache)
        layer, before = cache.layers[3], cache.layers[3]._meant.copy()
        assert before.any()
        for length in (1, 4):  # as where a decoder looks at what its encoder said
            layer.foresee(100 * torch.randn(1, 4, length, 8), None, None)
            assert np.array_equal(layer._meant, before)
        layer.foresee(100 * torch.randn(1, 4, 60, 8), None, None)
        assert not np.array_equal(layer._meant, before)
        exempt = cache.layers[1]
        exempt.foresee(torch.randn(1, 4, 60, 8), None, None)
        assert not exempt._meant.any()


@pytest.mark.parametrize("build", [llama, gemma], ids=lambda build: build.__name__)
def test_a_prompt_is_read_as_without(build: object) -> None:
    fresh("late")
    model, ids = model_on(build, "emu"), prompt(61, 2)  # type: ignore[arg-type]
    mask = torch.ones(2, 61, dtype=torch.long)
    mask[1, :9] = 0
    expected = generate(model, ids, plain_cache(model), attention_mask=mask, max_new_tokens=1)
    with checked(chosen_cache(model, 3)) as cache, cache.selecting(model):
        assert torch.equal(generate(model, ids, cache, attention_mask=mask, max_new_tokens=1), expected)
        for layer in cache.layers[2:]:
            if hasattr(layer, "_meant") and layer._meant.size:
                assert not layer._meant[2:, 1].any(), "a page of nothing but padding is fetched"


@given(
    each=st.floats(0, 300),
    columns=st.integers(1, 400),
    count=st.integers(1, 80),
)
def test_shares_of_layers(each: float, columns: int, count: int) -> None:
    shares = [share_of_layer(each, columns, layer, count) for layer in range(count)]
    assert count * each - 1 < sum(shares) <= count * each
    assert all(before >= after - 1 for before, after in pairwise(shares))
    assert min(shares) >= min(int(each), LEAST_CHOSEN)
    if each <= columns:
        assert max(shares) <= columns + 1


def test_shares_fall_from_one_and_a_half_to_a_half() -> None:
    shares = [share_of_layer(103, 1000, layer, 30) for layer in range(30)]
    assert shares[0] == 3 + 150
    assert shares[-1] == 3 + 50
    assert [share_of_layer(103, 103, layer, 30) for layer in (0, 29)] == [103, 103]
    assert share_of_layer(3, 50, 0, 30) == share_of_layer(3, 50, 29, 30) == 3
