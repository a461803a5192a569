"""Pages in transit, shared pages and many of them: what other caches got wrong, on a device that works late."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from fmstream import PagedCache, emulator
from fmstream.core.order import Lane
from fmstream.core.pages import RESIDENT
from fmstream.emulator.backlog import Execution
from fmstream.payloads.kv.pool import Pool
from tests.kv.kit import ORDERS, compare, fresh, llama, model_on, prompt

HEADS, DIM, TOKENS = 2, 4, 4
PAGE_BYTES = 2 * HEADS * DIM * TOKENS * 4


def made(layers: int, pages: int, **options: Any) -> Any:
    """A cache of its own kind of pages."""
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=16, num_attention_heads=2)
    return PagedCache(config, pages, page_tokens=TOKENS, **options)


def filled(value: float, rows: int = 1, tokens: int = TOKENS) -> Tensor:
    """Keys that all have one value."""
    return torch.full((rows, HEADS, tokens, DIM), value, device="emu")


def pool_of(cache: Any) -> Pool:
    """The only pool."""
    (pool,) = cache.pools
    return pool  # type: ignore[no-any-return]


@pytest.mark.parametrize("host", [1000, 0])
@pytest.mark.parametrize("execution", ORDERS)
def test_a_page_that_left_at_once_comes_back_as_it_was(execution: Execution, host: int, tmp_path: Path) -> None:
    fresh(execution)
    cache = made(1, 20, kv_host_memory=host * PAGE_BYTES, spill_dir=tmp_path)
    plain = torch.empty(1, HEADS, 0, DIM)
    for _ in range(40):
        new = torch.randn(1, HEADS, 5, DIM)
        cache.update(new.to("emu"), -new.to("emu"), 0)
        pool, plain = pool_of(cache), torch.cat([plain, new], 2)
        pages = cache.layers[0].block.pages[0]
        pool.frames.evict(pages[pool.frames.table.state[pages] == RESIDENT])  # right behind the kernels that wrote them
        pool.frames.recall(pages[:3].copy())
        if plain.shape[2] > 60:
            assert torch.equal(cache.layers[0].keys.cpu(), plain)
            assert torch.equal(cache.layers[0].values.cpu(), -plain)
            cache.crop(-50)
            plain = plain[:, :, :-50]
    assert cache.statistics().recalled_bytes > 0
    assert not emulator.machine().reports
    cache.check()
    cache.close()


@pytest.mark.parametrize("execution", ORDERS)
def test_both_ends_of_a_transfer_are_kept(execution: Execution) -> None:
    fresh(execution)
    pools = [made(2, 3, kv_host_memory=4 * PAGE_BYTES) for _ in range(2)]
    held: dict[tuple[int, int], list[Tensor]] = {}
    for page in range(2):
        for which, cache in enumerate(pools):
            for layer in range(2):
                new = filled(100.0 * (2 * which + layer) + page)
                keys, values = cache.update(new, 2 * new, layer)
                held.setdefault((which, layer), []).append(new.cpu())
                assert torch.equal(keys.cpu(), torch.cat(held[which, layer], 2))
                assert torch.equal(values.cpu(), 2 * torch.cat(held[which, layer], 2))
        other = pools[page]
        other.reset()  # frees what is being copied, and its frames and homes are used again
        for layer in range(2):
            held[page, layer] = []
    for which, cache in enumerate(pools):
        for layer in range(2):
            if held[which, layer]:
                assert torch.equal(cache.layers[layer].keys.cpu(), torch.cat(held[which, layer], 2))
        cache.check()
        cache.close()
    assert not emulator.machine().reports


@pytest.mark.parametrize("execution", ORDERS)
def test_sequences_change_places_while_values_are_in_transfer(execution: Execution) -> None:
    fresh(execution)
    cache, plain = made(3, 30), []
    for layer in range(3):
        new = torch.randn(4, HEADS, 10, DIM)
        cache.update(new.to("emu"), -new.to("emu"), layer)
        plain.append(new)
    pool = pool_of(cache)
    pages = np.unique(cache.layers[1].block.pages)
    pool.frames.evict(pages[pool.frames.table.state[pages] == RESIDENT])
    cache.reorder_cache(torch.tensor([1, 0, 2, 2]))
    plain = [tensor[[1, 0, 2, 2]] for tensor in plain]
    for layer in range(3):  # the two that came from one go different ways
        new = torch.randn(4, HEADS, 1, DIM)
        keys, _ = cache.update(new.to("emu"), -new.to("emu"), layer)
        plain[layer] = torch.cat([plain[layer], new], 2)
        assert torch.equal(keys.cpu(), plain[layer])
        del keys
    cache.check()
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, True]))
    cache.crop(-6)
    for layer in range(3):
        expected = plain[layer][[0, 2]].repeat_interleave(2, 0)[[0, 2, 3]][:, :, :5]
        assert torch.equal(cache.layers[layer].keys.cpu(), expected)
        assert torch.equal(cache.layers[layer].values.cpu(), -expected)
    cache.check()
    cache.close()
    assert not emulator.machine().reports


def test_sequences_that_begin_alike_share_pages() -> None:
    fresh("late")
    model = model_on(llama, "emu")
    alike = prompt(40).repeat(4, 1)
    alike[:, 30:] = prompt(10, 4, seed=2)
    shared = compare(model, alike, 40).did
    apart = compare(model, prompt(40, 4), 40).did
    assert 0 < shared.recalled_bytes < apart.recalled_bytes
    assert shared.host_pages < apart.host_pages


def test_equal_values_of_different_bits_are_not_shared() -> None:
    fresh()
    cache, zeros = made(1, 20), filled(0.0, rows=3)
    zeros[1] = -0.0
    cache.update(zeros, zeros, 0)
    pages = cache.layers[0].block.pages
    assert pages[0, 0] == pages[2, 0] != pages[1, 0]
    assert torch.equal(torch.signbit(cache.layers[0].keys.cpu()), torch.signbit(zeros.cpu()))
    cache.check()


def test_the_host_waits_for_nothing_while_tokens_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fresh("late")
    cache = made(3, 20)
    for layer in range(3):
        cache.update(filled(1.0, tokens=40), filled(2.0, tokens=40), layer)
    waits: list[Any] = []
    monkeypatch.setattr(machine, "synchronize", lambda point=None: waits.append(point))
    before = machine.statistics().wait_seconds
    for number in range(10):
        for layer in range(3):
            cache.update(filled(float(number), tokens=1), filled(3.0, tokens=1), layer)
    assert cache.statistics().recalled_bytes > 0
    assert not waits
    assert machine.statistics().wait_seconds == before
    monkeypatch.undo()
    cache.close()


def test_the_next_layer_comes_while_this_one_computes() -> None:
    machine = fresh("eager")
    cache = made(4, 40)
    for layer in range(4):
        cache.update(filled(1.0, tokens=48), filled(2.0, tokens=48), layer)
    pool = pool_of(cache)
    cache.update(filled(1.0, tokens=1), filled(1.0, tokens=1), 0)
    following = cache.layers[1].block.pages[0]
    assert (pool.frames.table.state[following] != 0).all()
    lanes = pool.lanes
    machine.synchronize()
    assert lanes.has_passed(Lane.IN, lanes.upcoming(Lane.IN) - 1)
    cache.close()


def test_a_million_operations_on_pages_leave_nothing() -> None:
    config = LlamaConfig(num_hidden_layers=3, hidden_size=16, num_attention_heads=2)
    cache = PagedCache(config, 700, page_tokens=1)
    new = torch.ones(1, HEADS, 600, DIM)
    for layer in range(3):
        cache.update(new, new, layer)
    one, pool, process = new[:, :, :1], pool_of(cache), psutil.Process()
    blocks, memory = 0, 0
    for number in range(600):
        for layer in range(3):
            cache.update(one, one, layer)
        cache.crop(-1)
        if number == 60:
            gc.collect()
            blocks, memory = len(gc.get_objects()), process.memory_info().rss
    counts = pool.frames.counts
    assert counts.recalled + counts.dropped + counts.spilled > 1_000_000
    gc.collect()
    assert len(gc.get_objects()) < blocks + 500 + len(cache.samples)  # of these a limited number is kept
    assert process.memory_info().rss < memory + (8 << 20)
    assert pool.frames.table.num_pages < 4096
    cache.check()
    cache.close()
