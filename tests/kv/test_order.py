"""Copies and computing wait for one another: without any one wait the checker of order says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bench.scenarios import SLOW, replaced
from fmstream import PagedCache, emulator
from fmstream.core.order import Lane, Places
from fmstream.payloads.kv.frames import Frames
from fmstream.payloads.kv.pool import Pool
from fmstream.payloads.kv.tiers import Tiers
from tests.kv.kit import llama, model_on, prompt

COMPUTE, IN, OUT = Lane
FRAMES, HOMES = "frames", "homes"


@contextmanager
def without_wait(what: str, lane: Lane, other: Lane) -> Iterator[None]:
    """Let a lane not wait for another where it uses frames, or homes in host memory."""

    def make(claim: Any) -> Any:
        def broken(places: Places, by: Lane, start: int, count: int) -> None:
            if by is lane and places.what == what:  # type: ignore[attr-defined]
                kept = places._last[other, start : start + count].copy()
                places._last[other, start : start + count] = 0
                claim(places, by, start, count)
                places._last[other, start : start + count] = kept
            else:
                claim(places, by, start, count)

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
        replaced(Tiers, "__init__", named(HOMES, "_places")),
        replaced(Places, "claim", make),
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


def reports(scenario: Callable[[], None] = decode, execution: Any = "eager") -> list[emulator.Report]:
    """What the checker says of a scenario on a card that the host runs far ahead of."""
    machine = emulator.reset(SLOW, execution=execution, check="record", capacity=64 << 20, poison=True)
    with torch.no_grad():
        scenario()
    machine.synchronize()
    return list(machine.reports)


@pytest.mark.parametrize("execution", ["eager", "late", 1, 2, 3])
@pytest.mark.parametrize("scenario", [decode, back_at_once, home_for_another])
def test_nothing_is_out_of_order(scenario: Callable[[], None], execution: Any) -> None:
    assert not reports(scenario, execution)


WAITS = {
    "a page is read after it came": (decode, FRAMES, COMPUTE, IN),
    "a page comes after its frame was read": (decode, FRAMES, IN, COMPUTE),
    "a page comes after its frame was written home": (decode, FRAMES, IN, OUT),
    "a page is written home after it was computed": (decode, FRAMES, OUT, COMPUTE),
    "a frame is computed into after it was written home": (decode, FRAMES, COMPUTE, OUT),
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


def test_the_end_of_the_pool_waits_for_what_was_in_its_frames() -> None:
    def make(give_up: Any) -> Any:
        def without_claims(frames: Frames, first: int) -> None:
            def only_out(claim: Any) -> Any:
                return lambda places, lane, start, count: lane is OUT and claim(places, lane, start, count)

            with replaced(Places, "claim", only_out):
                give_up(frames, first)

        return without_claims

    with replaced(Frames, "give_up", make):
        assert reports(lambda: decode(11))
