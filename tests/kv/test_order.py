"""Copies and computing wait for one another: without any one wait the checker of order says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from bench.scenarios import SLOW, replaced
from fmstream import PagedCache, emulator
from fmstream.core.order import Lane, Places
from fmstream.device.lanes import StreamLanes, lanes_of
from fmstream.device.opening import open_device
from fmstream.payloads.kv.choosing import Desk
from fmstream.payloads.kv.frames import Frames
from fmstream.payloads.kv.hits import measuring
from fmstream.payloads.kv.hostpages import HostPages
from fmstream.payloads.kv.pool import Pool
from tests.kv.kit import llama, model_on, prompt, reports

COMPUTE, IN, OUT, UNPACK = Lane
FRAMES, HOMES = "frames", "homes"


@contextmanager
def without_wait(what: str, lane: Lane, other: Lane) -> Iterator[None]:
    """Let a lane not wait for another where it uses frames, or homes in host memory."""

    def make(claim: Any) -> Any:
        def broken(places: Places, by: Lane, where: Any) -> None:
            if by is lane and getattr(places, "what", None) == what:
                kept = places._last[other, where].copy()
                places._last[other, where] = 0
                claim(places, by, where)
                places._last[other, where] = kept
            else:
                claim(places, by, where)

        return broken

    def named(kind: str, attribute: str) -> Any:
        def make_init(init: Any) -> Any:
            def labelled(self: Any, *args: Any, **kwargs: Any) -> None:
                init(self, *args, **kwargs)
                getattr(self, attribute).what = kind

            return labelled

        return make_init

    with (
        replaced(Frames, "__init__", named(FRAMES, "_places")),
        replaced(HostPages, "__init__", named(HOMES, "places")),
        replaced(Places, "_claim", make),
    ):
        yield


def decode(pages: int = 12) -> None:
    """A prompt that does not fit, tokens with pages that come and go, and some taken back."""
    model = model_on(llama, "emu")
    ids = prompt(60).to("emu")
    cache = PagedCache(model.config, pages, page_tokens=8)
    model(ids[:, :40], cache=cache, logits_to_keep=1)
    for at in range(40, 56):
        model(ids[:, at : at + 1], cache=cache, logits_to_keep=1)
        if at == 48:
            cache.crop(-6)
    assert cache.statistics().recalled_bytes > 0
    emulator.machine().synchronize()
    cache.close()


def choose() -> None:
    """Steps of chosen pages, in turn with some that attend to everything."""
    model = model_on(llama, "emu")
    ids = prompt(60).to("emu")
    cache = PagedCache(model.config, page_tokens=4, kv_budget=3)
    assert cache.selection is not None
    with cache.selecting(model):
        model(ids[:, :40], cache=cache, logits_to_keep=1)
        for at in range(40, 60):
            cache.selection.gate = 0.0 if at % 5 == 4 else 2.0
            model(ids[:, at : at + 1], cache=cache, logits_to_keep=1)
    did = cache.statistics().selection
    assert did.fallbacks > 0
    assert did.recalled > 0
    emulator.machine().synchronize()
    cache.close()


def look() -> None:
    """All keys of a layer are read beside its pages, while it makes steps."""
    model = model_on(llama, "emu")
    ids = prompt(50).to("emu")
    cache = PagedCache(model.config, page_tokens=4, kv_budget=3)
    with cache.selecting(model), measuring(cache):
        model(ids[:, :40], cache=cache, logits_to_keep=1)
        for at in range(40, 50):
            model(ids[:, at : at + 1], cache=cache, logits_to_keep=1)
    cache.close()


def back_at_once() -> None:
    """A page is written home and comes back to another frame."""
    cache, layer, pool = two_pages()
    first = layer.block.pages[0, :1].copy()
    pool.frames.take = taking_the_last(pool)  # type: ignore[method-assign]
    pool.frames.evict(first)
    pool.frames.recall(first)
    cache.close()


def home_for_another() -> None:
    """A page comes from home and is forgotten; another one is written to the same home."""
    cache, layer, pool = two_pages()
    first, second = layer.block.pages[0, :1].copy(), layer.block.pages[0, 1:2].copy()
    pool.frames.evict(first)
    pool.frames.recall(first)
    home = int(pool.frames.table.home[first[0]])
    cache.batch_select_indices(torch.tensor([1]))
    other = layer.block.pages[0, 1:2].copy()
    assert second[0] != other[0]
    pool.frames.evict(other)
    assert int(pool.frames.table.home[other[0]]) == home
    cache.close()


def two_pages() -> tuple[Any, Any, Pool]:
    """A cache of two sequences with two pages each, in a pool that is much larger."""
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, 40, page_tokens=8)
    values = torch.ones(2, 2, 16, 8, device="emu")
    values[1] = 2  # else they would share pages
    cache.update(values, values, 0)
    layer: Any = cache.layers[0]
    return cache, layer, layer.pool


def taking_the_last(pool: Pool) -> Any:
    """Frames from the other end, so that a page does not come back to where it was."""
    return lambda count, staying: (pool.frames.num_frames - count, count)


@pytest.mark.parametrize("execution", ["eager", "late", 1, 2, 3])
@pytest.mark.parametrize("scenario", [decode, choose, look, back_at_once, home_for_another])
def test_nothing_is_out_of_order(scenario: Callable[[], None], execution: Any) -> None:
    assert not reports(scenario, execution)


WAITS = {
    "a page is read after it came": (decode, FRAMES, COMPUTE, IN),
    "a page comes after its frame was read": (decode, FRAMES, IN, COMPUTE),
    "a page comes after its frame was written home": (decode, FRAMES, IN, OUT),
    "a page is written home after it was computed": (decode, FRAMES, OUT, COMPUTE),
    "a frame is computed into after it was written home": (decode, FRAMES, COMPUTE, OUT),
    "a chosen page is read after it came": (choose, FRAMES, COMPUTE, IN),
    "a page comes after its frame was chosen": (choose, FRAMES, IN, COMPUTE),
    "a page comes after the last in its frame was written home": (choose, FRAMES, IN, OUT),
    "a page is written home after its last token": (choose, FRAMES, OUT, COMPUTE),
    "a page comes from home after it was written there": (back_at_once, HOMES, IN, OUT),
    "a home is written after it was read": (home_for_another, HOMES, OUT, IN),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_each_wait_that_is_taken_away_is_missed(wait: tuple[Callable[[], None], str, Lane, Lane]) -> None:
    scenario, *which = wait
    with without_wait(*which):
        found = reports(scenario)
    assert found
    assert all(report.kind == "race" for report in found)


def test_keys_looked_at_wait_for_their_copies() -> None:
    def make(wait: Any) -> Any:
        def without_in(lanes: Any, lane: Lane, other: Lane, point: int) -> None:
            if (lane, other) != (COMPUTE, IN):
                wait(lanes, lane, other, point)

        return without_in

    with replaced(StreamLanes, "wait", make):
        assert reports(look)


@pytest.mark.parametrize("name", ["meant", "frames"])
def test_small_arrays_are_not_written_while_they_are_copied(name: str) -> None:
    def make(upload: Any) -> Any:
        def at_once(desk: Desk, called: str, array: Any) -> Any:
            join = (lambda *_: None) if called == name else Places.join
            with replaced(Places, "join", lambda _: join):
                return upload(desk, called, array)

        return at_once

    def twice() -> None:
        desk = Desk(lanes_of(open_device(torch.device("emu"))))
        with emulator.host_guard():
            desk.upload(name, np.arange(9))
            desk.upload(name, np.arange(9))
        desk.close()

    assert not reports(twice)
    with replaced(Desk, "upload", make):
        assert reports(twice)


def test_the_end_of_the_pool_waits_for_what_was_in_its_frames() -> None:
    def make(give_up: Any) -> Any:
        def without_claims(frames: Frames, first: int) -> None:
            def only_out(claim: Any) -> Any:
                return lambda places, lane, start, count: lane is OUT and claim(places, lane, start, count)

            with replaced(Places, "claim", only_out):
                give_up(frames, first)

        return without_claims

    with replaced(Frames, "give_up", make):
        assert any(reports(lambda pages=pages: decode(pages)) for pages in range(9, 16))  # type: ignore[misc]


def test_a_page_that_is_forgotten_while_it_is_written_home_is_not_written_home_later() -> None:
    emulator.reset(SLOW, execution="late", check="raise", capacity=64 << 20, poison=True)
    with torch.no_grad():
        cache, layer, pool = two_pages()
        pool.frames.evict(np.sort(layer.block.pages.ravel()))
        cache.reset()
        values = torch.randn(2, 2, 16, 8, generator=torch.Generator().manual_seed(0))
        cache.update(values.to("emu"), values.to("emu"), 0)
        emulator.machine().synchronize()
        pool.frames.retire()
        cache.check()
        assert torch.equal(layer.keys.cpu(), values)
        cache.close()


def other_stream() -> None:
    """A layer goes on in a stream that nobody told to wait for the one before."""
    cache, _, _ = two_pages()
    stream = torch.emu.Stream()  # type: ignore[attr-defined]
    with torch.emu.stream(stream):  # type: ignore[attr-defined]
        new = torch.ones(2, 2, 3, 8, device="emu")
        cache.update(new, new, 0)
    emulator.machine().synchronize()
    cache.close()


def test_another_stream_waits_for_the_one_before() -> None:
    def make(enter: Any) -> Any:
        def without_wait(lanes: Any, slab: Any) -> None:
            with replaced(type(lanes._device), "wait", lambda _: lambda *_: None):
                enter(lanes, slab)

        return without_wait

    assert not reports(other_stream)
    with replaced(StreamLanes, "enter", make), replaced(StreamLanes, "follow", lambda _: lambda lanes: None):
        assert reports(other_stream)


def taking_turns() -> None:
    """What one stream was given is read there later than another one uses the cache, and forgotten before it does."""
    cache = PagedCache(model_on(llama, "emu").config, 60, page_tokens=8)
    new = torch.ones(1, 2, 24, 8, device="emu")
    first, second = torch.emu.Stream(), torch.emu.Stream()  # type: ignore[attr-defined]
    emulator.machine().synchronize()
    for layer in (0, 1):
        with torch.emu.stream(first):  # type: ignore[attr-defined]
            keys, _ = cache.update(new, new, layer)
        with torch.emu.stream(second):  # type: ignore[attr-defined]
            cache.update(new, new, 2)
        with torch.emu.stream(first):  # type: ignore[attr-defined]
            keys * 2
        del keys, _
        with torch.emu.stream(second):  # type: ignore[attr-defined]
            cache.update(new, new, 3)
            if layer:
                cache.reset()
                cache.update(new, new, 0)
    emulator.machine().synchronize()
    cache.close()


def test_a_stream_that_uses_the_place_of_a_layer_waits_for_all_others() -> None:
    assert not reports(taking_turns)
    with replaced(StreamLanes, "follow", lambda _: lambda lanes: None):
        assert reports(taking_turns)


def test_an_answer_is_read_after_it_came() -> None:
    def make(decide: Any) -> Any:
        def at_once(*args: Any) -> Any:
            with replaced(Places, "join", lambda _: lambda *_: None):
                return decide(*args)

        return at_once

    def guarded() -> None:
        with emulator.host_guard():
            choose()

    assert not reports(guarded)
    with replaced(Desk, "decide", make):
        assert reports(guarded)
