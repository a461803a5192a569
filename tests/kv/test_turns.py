"""Forks in several threads, who holds what, and caches that Ctrl-C left in the middle of a change."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fmstream import PagedCache
from fmstream.core.freeruns import FreeRuns
from fmstream.device.accelerator import Accelerator
from fmstream.errors import MemoryBudgetError, StreamError
from fmstream.payloads.kv.blocks import BlockTable
from fmstream.payloads.kv.frames import Frames
from fmstream.payloads.kv.pool import Pool
from fmstream.payloads.kv.sharing import Sharing
from fmstream.payloads.kv.sizing import Sizing
from tests.kv.kit import checked, fresh, generate, llama, model_on, plain_cache, prompt


def values(seed: int, length: int = 20, device: str = "cpu") -> Tensor:
    return torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(seed)).to(device)


def filled(pages: int = 12, **options: Any) -> PagedCache:
    """A cache of four layers that do not all fit."""
    cache = PagedCache(model_on(llama, "cpu").config, pages, page_tokens=8, **options)
    for index in range(4):
        cache.update(values(index), -values(index), index)
    return cache


def is_whole(cache: Any) -> bool:
    return all(torch.equal(layer.keys, values(index)) for index, layer in enumerate(cache.layers))


def test_a_thread_waits_while_another_changes_the_pool_of_its_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    other, (pool,) = cache.fork(), cache.pools
    inside, on = threading.Event(), threading.Event()
    store = Pool.store

    def slowly(*args: Any) -> None:
        inside.set()
        assert on.wait(60)
        store(*args)

    monkeypatch.setattr(Pool, "store", slowly)
    new = values(9, 5)
    thread = threading.Thread(target=cache.update, args=(new, new, 0))
    thread.start()
    assert inside.wait(60)
    assert not pool.turn.lock.acquire(blocking=False)
    on.set()
    thread.join(60)
    monkeypatch.undo()
    assert is_whole(other)
    assert torch.equal(cache.layers[0].keys[:, :, 20:], new)
    cache.check()


def test_pools_whose_work_goes_the_same_lanes_are_changed_in_turn() -> None:
    cache = PagedCache(model_on(llama, "cpu").config, 12, page_tokens=8)
    cache.update(values(0), values(0), 0)
    cache.update(values(1)[..., :4], values(1)[..., :4], 1)
    first, second = cache.pools
    with first.turn.lock:
        thread = threading.Thread(target=cache.layers[1].crop, args=(-5,))
        thread.start()
        taken = []
        other = threading.Thread(target=lambda: taken.append(second.turn.lock.acquire(blocking=False)))
        other.start()
        other.join(60)
        assert taken == [False]
        assert cache.layers[1].get_seq_length() == 20
    thread.join(60)
    assert cache.layers[1].get_seq_length() == 15


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_who_keeps_keys_sees_them_when_the_layers_outgrow_their_place(device: str) -> None:
    fresh("late")
    cache = PagedCache(model_on(llama, device).config, 60, page_tokens=8)
    kept, whole = [], torch.empty(1, 2, 0, 8)
    for number in range(6):
        new = values(number, 9, device)
        whole = torch.cat([whole, new.cpu()], 2)
        kept.append((*cache.update(new, -new, 0), whole))
    for keys, held, expected in kept:
        assert torch.equal(keys.cpu(), expected)
        assert torch.equal(held.cpu(), -expected)
    cache.check()
    del kept, keys, held
    cache.update(new, new, 0)
    assert cache.statistics().num_lent == 5


@pytest.mark.parametrize("first", ["fork", "original"])
def test_closing_a_cache_leaves_its_forks_what_they_have(first: str) -> None:
    cache = filled(pages=4)
    other = cache.fork()
    (pool,) = cache.pools
    closed, left = (other, cache) if first == "fork" else (cache, other)
    closed.close()
    closed.close()
    assert is_whole(left)
    left.check()
    for index in range(4):
        closed.update(values(index), -values(index), index)
    assert is_whole(closed)
    assert is_whole(left)
    left.close()
    assert is_whole(closed)
    closed.close()
    assert not list(closed.pools)
    assert not pool.is_used
    assert pool.tiers.counts().host_bytes == 0


def test_an_empty_fork_of_a_closed_cache_begins_anew() -> None:
    cache = filled(pages=4)
    forks = cache.fork(), cache.fork()
    forks[0].reset()
    forks[1].crop(-20)
    cache.close()
    for fork in forks:
        for index in range(4):
            fork.update(values(index), -values(index), index)
        assert is_whole(fork)
        fork.check()


def stopped(*args: Any) -> Any:
    """Ctrl-C comes before a method has begun."""
    raise KeyboardInterrupt


def test_a_cache_that_ctrl_c_left_while_tokens_were_taken_back_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    with monkeypatch.context() as patch:
        patch.setattr(BlockTable, "cut", stopped)
        with pytest.raises(KeyboardInterrupt):
            cache.crop(-9)
    with pytest.raises(StreamError, match="left in the middle"):
        cache.update(values(0), values(0), 0)
    refill(cache)


def test_an_error_on_the_way_out_does_not_hide_what_ctrl_c_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(pages=7)

    def fails(*args: Any) -> None:
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr(Sharing, "share", stopped)
        patch.setattr(FreeRuns, "give", fails)
        with pytest.raises(KeyError):
            cache.update(values(9), values(9), 0)
    with pytest.raises(StreamError, match="left in the middle"):
        cache.update(values(0), values(0), 0)
    refill(cache)


def refused_until_reset(cache: PagedCache, new: torch.Tensor) -> None:
    """Whoever left in the middle has to begin anew, and can."""
    with pytest.raises(StreamError, match="left in the middle"):
        cache.update(new, new, 0)
    cache.reset()
    assert torch.equal(cache.update(new, new, 0)[0].cpu(), new.cpu())
    cache.check()
    cache.close()


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_a_pool_that_ctrl_c_left_with_other_memory_is_not_used(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    cache, new = PagedCache(model_on(llama, device).config, page_tokens=8), values(0, 300, device)
    cache.update(new[:, :, :8], new[:, :, :8], 0)
    with monkeypatch.context() as patch:
        patch.setattr(Frames, "become", stopped)
        with pytest.raises(KeyboardInterrupt):
            cache.update(new, new, 0)
    refused_until_reset(cache, new)


def test_a_pool_that_finds_no_memory_any_more_begins_anew_after_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    cache, new = PagedCache(model_on(llama, "emu").config, 9, page_tokens=8), values(0, 8, "emu")
    cache.update(new, new, 0)
    (pool,) = cache.pools

    def refuses(num_bytes: int) -> Any:
        raise MemoryBudgetError("another process has taken it")

    with monkeypatch.context() as patch:
        patch.setattr(pool.lanes, "slab", refuses)
        patch.setattr(cache.layers[0], "_sizing", Sizing(9, 1 << 60, 4))
        with pytest.raises(MemoryBudgetError):
            cache.update(new, new, 0)
    refused_until_reset(cache, new)


def test_a_point_that_ctrl_c_kept_from_being_made_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fresh("late")
    cache = PagedCache(model_on(llama, "emu").config, 7, page_tokens=8)
    for index in range(4):
        cache.update(values(index, device="emu"), values(index, device="emu"), index)
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "mark", stopped)
        with pytest.raises(KeyboardInterrupt):
            cache.update(values(9, device="emu"), values(9, device="emu"), 0)
    for index in range(4):
        assert torch.equal(cache.layers[index].keys.cpu(), values(index))
    cache.check()
    cache.close()
    assert not machine.reports


def refill(cache: PagedCache) -> None:
    """Forget everything and begin again."""
    cache.reset()
    (pool,) = cache.pools
    before = weakref.ref(pool)
    del pool
    for index in range(4):
        cache.update(values(index), -values(index), index)
    assert is_whole(cache)
    cache.check()
    gc.collect()
    assert before() is None, "the memory of the pool that is not used any more is still taken"
    cache.close()


def interrupted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Ctrl-C comes when a method has done its work and before its caller knows."""

    def call(*args: Any) -> Any:
        method(*args)
        raise KeyboardInterrupt

    return call


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("options", [{}, {"kv_budget": 3}], ids=["exact", "chosen"])
@pytest.mark.parametrize(("owner", "name"), [(FreeRuns, "take"), (Frames, "_hand_over")])
def test_a_cache_that_ctrl_c_left_in_the_middle_starts_again_after_reset(
    owner: Any, name: str, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = fresh()
    model = model_on(llama, device)
    pages = None if options else 7
    with checked(PagedCache(model.config, pages, page_tokens=8, **options)) as cache, cache.selecting(model):
        expected = generate(model, prompt(30), cache)
        cache.reset()
        other = cache.fork()
        generate(model, prompt(20), other, max_new_tokens=3)
        generate(model, prompt(20, seed=3), cache, max_new_tokens=3)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                generate(model, prompt(40, seed=3), cache, max_new_tokens=9)
        with pytest.raises(StreamError, match=r"left in the middle, by Ctrl-C say.*call reset\(\) of the cache"):
            generate(model, prompt(30), other)
        for again in (cache, other):
            again.reset()
            assert torch.equal(generate(model, prompt(30), again), expected)
            again.check()
        other.close()
    assert options or torch.equal(expected, generate(model, prompt(30), plain_cache(model)))
    assert not machine.reports
