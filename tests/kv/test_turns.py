"""Forks in several threads, who holds what, and caches that Ctrl-C left in the middle of a change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fmstream import PagedCache
from fmstream.core.freeruns import FreeRuns
from fmstream.errors import StreamError
from fmstream.payloads.kv.frames import Frames
from fmstream.payloads.kv.pool import Pool
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
