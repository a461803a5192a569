"""The law of twins: a paged cache gives what a plain one gives, bit by bit, and its pages have moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from fmstream import PagedCache, emulator
from fmstream.emulator.backlog import Execution
from tests.kv.kit import MODELS, ORDERS, PAGE_TOKENS, checked, compare, fresh, gemma, llama, model_on, prompt

LAYER = 7
"""Pages of one layer of a sequence of 30 tokens and 20 new ones."""


def left_padded(batch: int, length: int) -> dict[str, Any]:
    """Ids and mask of sequences of different lengths."""
    ids, mask = prompt(length, batch), torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        ids[row, : 4 * row], mask[row, : 4 * row] = 0, 0
    return {"ids": ids, "attention_mask": mask}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"ids": prompt(30)},
    "sampling": {"ids": prompt(30), "do_sample": True, "temperature": 0.9, "top_k": 20},
    "beams": {"ids": prompt(30), "num_beams": 3},
    "several beams of several": {"ids": prompt(30, 2), "num_beams": 2, "num_return_sequences": 2},
    "left-padded batch": left_padded(3, 30),
    "chunked prefill": {"ids": prompt(30), "prefill_chunk_size": 7},
}


def rows(way: dict[str, Any]) -> int:
    """Sequences in the cache."""
    return int(way["ids"].shape[0]) * int(way.get("num_beams", 1))


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_every_model_in_every_order(build: Callable[[], nn.Module], execution: Execution) -> None:
    fresh(execution)
    model = model_on(build, "emu")
    outcome = compare(model, prompt(30, 2), 2 * LAYER + 1, max_new_tokens=12, do_sample=True)
    assert outcome.also.recalled_bytes > 0
    assert outcome.also.spilled_bytes > 0
    assert outcome.plain.unique().numel() > 8
    assert not emulator.machine().reports


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_every_way_to_generate_with_pools_of_any_size(way: dict[str, Any], device: str) -> None:
    fresh("late")
    model, layer = model_on(llama, device), LAYER * rows(way)
    for pages in (layer, 2 * layer) if device == "emu" else (layer + 1,):
        outcome = compare(model, pages=pages, **way)
        assert outcome.did.recalled_bytes > 0
    compare(model, pages=3 * layer + 5, **way)  # beams share so many that these may be enough
    assert compare(model, pages=6 * layer, **way).did.recalled_bytes == 0


@pytest.mark.parametrize("build", [llama, gemma], ids=lambda build: build.__name__)
def test_prompt_lookup_takes_tokens_back(build: Callable[[], nn.Module]) -> None:
    fresh("late")
    ids = prompt(6).repeat(1, 5)
    outcome = compare(model_on(build, "emu"), ids, LAYER + 2, prompt_lookup_num_tokens=4)
    assert outcome.did.recalled_bytes > 0


def test_several_calls_on_one_cache() -> None:
    fresh("late")
    outcome = compare(model_on(llama, "emu"), prompt(20), 12, times=3)
    assert outcome.paged.shape[1] == 80
    assert outcome.did.recalled_bytes > 0


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_logits_are_equal_and_not_only_tokens(device: str) -> None:
    fresh("late")
    model, ids = model_on(llama, device), prompt(50).to(device)
    plain = DynamicCache(config=model.config)
    with torch.no_grad(), checked(PagedCache(model.config, 9, page_tokens=PAGE_TOKENS)) as paged:
        for begin, end in ((0, 31), (31, 32), (32, 33), (33, 49), (49, 50)):
            theirs = model(ids[:, begin:end], cache=plain).logits.cpu()
            ours = model(ids[:, begin:end], cache=paged).logits.cpu()
            assert torch.equal(theirs, ours)
        assert paged.statistics().recalled_bytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    fresh("late")
    assert compare(model_on(llama, "emu").to(dtype), prompt(30), LAYER).did.recalled_bytes > 0


def test_a_pool_without_a_size_takes_what_is_needed() -> None:
    fresh("late")
    outcome = compare(model_on(llama, "emu"), prompt(10), pages=None, max_new_tokens=60)  # type: ignore[arg-type]
    assert outcome.did.recalled_bytes == 0
    assert outcome.did.device_pages < 3 * 5 * 9


def test_the_memory_of_the_pool_is_what_was_given() -> None:
    machine = fresh()
    model = model_on(llama, "emu")
    with checked(PagedCache(model.config, LAYER, page_tokens=PAGE_TOKENS)) as cache, torch.no_grad():
        ids = prompt(50).to("emu")
        model(ids[:, :49], cache=cache, logits_to_keep=1)
        machine.synchronize()
        before = machine.statistics().allocated
        cache.close()
        machine.synchronize()
        did = before - machine.statistics().allocated
        given = (LAYER + 1) * 2 * 2 * 8 * PAGE_TOKENS * 4
        hashes = model.config.num_hidden_layers * 512  # 8 bytes for each page, in blocks of the allocator
        assert given <= did <= given + 2048 + hashes
