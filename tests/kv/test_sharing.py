"""Sequences that begin alike share pages: in a batch, and across caches of one pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fmstream import PagedCache, emulator
from fmstream.payloads.kv import known, sharing
from fmstream.payloads.kv.known import KnownPages, Spot, hash_pages
from fmstream.payloads.kv.sharing import first_alike, stretches
from tests.kv.kit import ORDERS, checked, fresh, generate, llama, model_on, plain_cache, prompt

TOKENS = 8
LAYERS = 4


def with_beginning(length: int, seed: int) -> Tensor:
    """A prompt of 40 tokens of which the first ``length`` are always the same."""
    return torch.cat([prompt(length), prompt(40 - length, seed=seed)], 1)


def referred(cache: PagedCache) -> int:
    """Pages that somebody refers to."""
    (pool,) = cache.pools
    return int(np.count_nonzero(pool.frames.refs))


@pytest.mark.parametrize("pages", [12, 100])
@pytest.mark.parametrize("execution", ORDERS)
def test_a_later_sequence_shares_what_another_cache_has(execution: Any, pages: int) -> None:
    fresh(execution)
    model = model_on(llama, "emu")
    first, second = with_beginning(24, 7), with_beginning(24, 8)
    cache = PagedCache(model.config, pages, page_tokens=TOKENS)
    one = generate(model, first, cache, max_new_tokens=4)
    other = cache.fork()
    other.reset()
    before = referred(cache)
    two = generate(model, second, other, max_new_tokens=4)
    assert referred(cache) - before == LAYERS * (6 - 3), "three pages of each layer are shared"
    assert torch.equal(one, generate(model, first, plain_cache(model), max_new_tokens=4))
    assert torch.equal(two, generate(model, second, plain_cache(model), max_new_tokens=4))
    longer = torch.cat([one, prompt(3, seed=2)], 1)
    expected = generate(model, longer, plain_cache(model), max_new_tokens=9)
    assert torch.equal(generate(model, longer, cache, max_new_tokens=9), expected)
    other.reset()
    with checked(cache):
        assert not emulator.machine().reports


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_every_two_sequences_of_a_batch_share(device: str) -> None:
    fresh("late")
    model = model_on(llama, device)
    ids = torch.cat([with_beginning(8, 3), with_beginning(24, 4), with_beginning(24, 5), with_beginning(40, 6)])
    ids[1:, 8:24] = ids[1, 8:24]  # the last three begin alike, the first one only in its first page
    cache = PagedCache(model.config, 100, page_tokens=TOKENS)
    found = generate(model, ids, cache, max_new_tokens=4)
    assert torch.equal(found, generate(model, ids, plain_cache(model), max_new_tokens=4))
    pages = cache.layers[1].block.pages
    assert len(set(pages[:, 0].tolist())) == 1
    assert len(set(pages[:, 1].tolist())) == len(set(pages[:, 2].tolist())) == 2
    assert len(set(pages[:, 3].tolist())) == 4
    with checked(cache):
        pass


def test_a_page_that_was_changed_since_is_not_taken_for_what_it_was() -> None:
    fresh("late")
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, 100, page_tokens=TOKENS)
    values = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(1)).to("emu")
    cache.update(values, values, 0)
    (pool,) = cache.pools
    other = cache.fork()
    other.reset()
    cache.crop(-4)
    cache.update(-values[:, :, :4], -values[:, :, :4], 0)  # the second page is another now, under the same number
    keys, _ = other.update(values, values, 0)
    assert torch.equal(keys.cpu(), values.cpu())
    mine, theirs = cache.layers[0].block.pages[0], other.layers[0].block.pages[0]
    assert (mine == theirs).tolist() == [True, False]
    other.crop(-12)
    other.update(-values[:, :, :1], -values[:, :, :1], 0)  # a shared page is copied before it is written
    held = torch.cat([values[:, :, :12], -values[:, :, :4]], 2)
    assert torch.equal(cache.layers[0].keys.cpu(), held.cpu())
    pool.check()
    other.reset()
    with checked(cache):
        assert not emulator.machine().reports


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_that_were_taken_back_come_again_beside_another_cache(rows: int, device: str) -> None:
    fresh("late")
    cache = PagedCache(model_on(llama, device).config, 100, page_tokens=TOKENS)
    first, second = (torch.randn(rows, 2, 24, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    cache.update(first.to(device), first.to(device), 0)
    other = cache.fork()
    for _ in range(3):  # the pages are given the same numbers each time
        keys, values = other.update(second.to(device), -second.to(device), 0)
        assert torch.equal(keys.cpu(), torch.cat([first, second], 2))
        assert torch.equal(values.cpu(), torch.cat([first, -second], 2))
        other.check()
        other.crop(-24)
    other.close()
    with checked(cache):
        assert torch.equal(cache.layers[0].keys.cpu(), first)
        assert not emulator.machine().reports


def test_equal_hashes_of_unequal_pages_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh("late")
    model = model_on(llama, "emu")
    monkeypatch.setattr(sharing, "hash_pages", lambda keys, values, tokens: keys[:, 0, ::tokens, 0].long() * 0)
    cache = PagedCache(model.config, 100, page_tokens=TOKENS)
    found = []
    for batch, holder in ((prompt(20, 3), cache), (prompt(20, seed=5), cache.fork())):
        if holder is not cache:
            holder.reset()
        found.append(torch.equal(generate(model, batch, holder), generate(model, batch, plain_cache(model))))
    assert found == [True, True]
    cache.check()
    cache.close()


def test_a_single_sequence_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fresh("late")
    cache = PagedCache(model_on(llama, "emu").config, 100, page_tokens=TOKENS)
    values = torch.ones(1, 2, 16, 8, device="emu")
    cache.update(values, values, 0)
    machine.synchronize()

    def waited(*_: Any, **__: Any) -> None:
        raise AssertionError("a hash was read")

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "cpu", waited)
        for layer in range(1, LAYERS):
            cache.update(values, values, layer)
        for layer in range(LAYERS):
            cache.update(values[:, :, :1], values[:, :, :1], layer)
    cache.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("dim", [8, 6, 5, 3])
def test_a_hash_sees_every_element_and_the_sign_of_zero(dtype: torch.dtype, dim: int) -> None:
    keys = torch.zeros(1, 2, 4, dim).to(dtype)
    seen = {int(hash_pages(keys, keys, 4))}
    for at in range(keys.numel()):
        changed = keys.clone()
        changed.view(-1)[at] = -0.0
        seen.add(int(hash_pages(changed, keys, 4)))
        seen.add(int(hash_pages(keys, changed, 4)))
    assert len(seen) > keys.numel()
    assert int(hash_pages(keys, keys, 4)) == int(hash_pages(keys.clone(), keys.clone(), 4))


def test_the_seed_is_fixed() -> None:
    keys = torch.arange(16, dtype=torch.int16).view(1, 1, 4, 4)
    assert hash_pages(keys, keys + 1, 2).tolist() == [[2953432009578776088, 8961870964447458728]]


def test_pages_that_nobody_refers_to_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "LEAST_PURGED", 8)
    pages = KnownPages()
    refs = np.ones(100, np.int32)
    for start in range(0, 100, 10):
        numbers = np.arange(start, start + 10).reshape(1, 10)
        pages.note(Spot(0, 1, 0), numbers.astype(np.int32), numbers)
    refs[20:] = 0
    asked = np.arange(15, 25).reshape(1, 10)
    assert pages.find(Spot(0, 1, 5), asked, refs).tolist() == [[15, 16, 17, 18, 19, -1, -1, -1, -1, -1]]
    assert pages.find(Spot(1, 1, 5), asked, refs).max() == -1
    assert len(pages._pages) == 20


def test_the_first_row_that_is_alike() -> None:
    numbers = np.array([[1, 2], [5, 6], [1, 3], [1, 6], [1, 3], [5, 6]])
    assert first_alike(numbers, 1)[:, 0].tolist() == [-1, -1, 0, 0, 0, 1]
    assert first_alike(numbers, 2).tolist() == [[-1, -1], [-1, -1], [0, -1], [-1, 1], [0, 2], [1, 1]]


def test_stretches() -> None:
    assert list(stretches(np.array([1, 2, 3, 5]), np.array([4, 5, 7, 8]))) == [(0, 2), (2, 1), (3, 1)]
    assert list(stretches(np.array([], int))) == []
