"""Packed pages in the cache: results are a plain cache's, fewer bytes cross the link, and each wait is needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from bench.scenarios import replaced
from fmstream import PagedCache, emulator
from fmstream.core.order import Lane, Places
from fmstream.emulator.backlog import Execution
from fmstream.errors import MemoryBudgetError
from fmstream.payloads.kv import packing, tiers
from fmstream.payloads.kv.hostpages import HostPages
from fmstream.payloads.kv.packing import Packer
from fmstream.payloads.kv.tiers import FILE, PACKED
from tests.kv.kit import ORDERS, compare, fresh, llama, model_on, prompt, reports
from tests.kv.kit_twins import Operation
from tests.kv.test_operations import SharingTwins, operations, play

TOKENS, HEADS, DIM = 16, 2, 8
"""A page of 512 elements."""
CONFIG = LlamaConfig(num_hidden_layers=3, hidden_size=16, num_attention_heads=2)
COMPUTE, IN, OUT, UNPACK = Lane


def values(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Keys as a model might compute them, [rows, heads, length, dim] on the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, HEADS, length, DIM), generator=generator).bfloat16().to("emu")


def cache(pages: int = 8, **options: Any) -> PagedCache:
    return PagedCache(CONFIG, pages, page_tokens=TOKENS, **options)


def fill(paged: PagedCache, length: int = 7 * TOKENS) -> Tensor:
    """Put as much into each layer as the pool can hold of one, wait for it to come home, and pack it."""
    tensor = values(length)
    for layer in range(3):
        paged.update(tensor, -tensor, layer)
    settle(paged)
    return tensor


def settle(paged: PagedCache) -> None:
    emulator.machine().synchronize()
    pool = next(iter(paged.pools))
    pool.frames.retire()


def holds(paged: PagedCache, tensor: Tensor) -> bool:
    """Whether each layer holds a tensor and its negative."""
    layers: list[Any] = paged.layers
    return all(torch.equal(layer.keys, tensor) and torch.equal(layer.values, -tensor) for layer in layers)


@pytest.mark.parametrize("execution", ORDERS)
def test_tokens_are_those_of_a_plain_cache_and_fewer_bytes_cross_the_link(execution: Execution) -> None:
    did = []
    for pack in (True, False):
        fresh(execution)
        model = model_on(llama, "emu").to(torch.bfloat16)
        with emulator.host_guard():
            options = {"page_tokens": TOKENS, "pack_pages": pack}
            outcome = compare(model, prompt(100), 9, cache_options=options)
        assert torch.equal(outcome.plain, outcome.paged)
        did.append(outcome.did)
    packed, plain = did
    assert packed.recalled_bytes < 0.9 * plain.recalled_bytes
    assert packed.packed_pages > 0 == plain.packed_pages
    assert packed.host_pages == plain.host_pages


def noise(length: int) -> Tensor:
    """What cannot be packed."""
    bits = torch.randint(-(1 << 15), 1 << 15, (1, HEADS, length, DIM), dtype=torch.int16).view(torch.bfloat16)
    return torch.where(bits.isfinite(), bits, 1).to("emu")


def test_what_cannot_be_packed_stays_as_it_is() -> None:
    fresh()
    paged = cache()
    tensor = noise(7 * TOKENS)
    for layer in range(3):
        paged.update(tensor, -tensor, layer)
    settle(paged)
    assert paged.statistics().packed_pages == 0
    assert holds(paged, tensor)
    paged.check()
    paged.close()


def test_a_packed_page_that_is_written_again_goes_home_as_it_is() -> None:
    fresh()
    paged = cache()
    tensor = fill(paged)
    before = paged.statistics()
    assert before.packed_pages == before.host_pages > 0
    paged.crop(-(3 * TOKENS + 5))
    more = values(9, seed=1)
    for layer in range(3):
        paged.update(more, -more, layer)
    tensor = torch.cat([tensor[:, :, : 4 * TOKENS - 5], more], 2)
    paged.check()
    assert holds(paged, tensor)
    pool = next(iter(paged.pools))
    pool.enter(paged.layers[0].block)
    page = paged.layers[0].block.pages[:, 3]
    with pool.frames.holding(page):
        pass
    table = pool.frames.table
    for home in table.home[page]:  # as if it had been packed before it was written to
        pool.tiers.give(int(home), 1)
        table.home[page] = pool.tiers.packed.take(1)[0] + PACKED
    table.dirty[page] = True
    pool.frames.evict(page)
    assert table.home[page] < PACKED
    paged.check()
    assert holds(paged, tensor)
    paged.close()


def test_pages_that_wait_make_room_before_the_file_is_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh("late")
    monkeypatch.setattr(tiers, "SMALLEST_BLOCK_BYTES", 4096)
    elements = 2 * HEADS * TOKENS * DIM
    tensor = values(20 * TOKENS)
    room = 2 * 20 * 2 * elements
    paged = cache(21, kv_host_memory=room, spill_dir=tmp_path)
    with replaced(Packer, "work", lambda _: lambda packer: None):
        for layer in range(3):
            paged.update(tensor, -tensor, layer)
    did = paged.statistics()
    assert did.packed_pages > 0
    assert did.host_bytes <= room
    assert holds(paged, tensor)
    paged.check()
    paged.close()


def test_not_many_pages_wait_to_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    monkeypatch.setattr(packing, "WAITING_BYTES", 5 * 1024)
    monkeypatch.setattr(tiers, "SMALLEST_BLOCK_BYTES", 4096)
    paged = cache(41)
    most = 0

    def make(take: Any) -> Any:
        def watched(pages: HostPages, wanted: int) -> Any:
            nonlocal most
            found = take(pages, wanted)
            most = max(most, next(iter(paged.pools)).tiers.host.num_used)
            return found

        return watched

    with replaced(HostPages, "take", make), replaced(Packer, "work", lambda _: lambda packer: None):
        for number in range(20):
            tensor = values(2 * TOKENS, seed=number)
            for layer in range(3):
                paged.update(tensor, -tensor, layer)
    assert paged.statistics().packed_pages > 20
    assert most < 20
    paged.close()


def some_noise(pages: int, seed: int) -> Tensor:
    """Pages of which some can be packed."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn((1, HEADS, pages * TOKENS, DIM), generator=generator).bfloat16()
    wide = found * torch.exp2(torch.randint(-60, 60, found.shape, generator=generator))
    is_wide = torch.rand(pages, generator=generator).repeat_interleave(TOKENS) < 0.4
    return torch.where(is_wide[:, None], wide, found).bfloat16().to("emu")


@pytest.mark.parametrize("seed", range(4))
def test_pages_that_are_packed_while_room_is_made_for_them_come_as_they_are(
    seed: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh()
    monkeypatch.setattr(tiers, "SMALLEST_BLOCK_BYTES", 4096)
    paged, held = cache(46, kv_host_memory=17 * 1024, spill_dir=tmp_path), [values(0)] * 3
    with replaced(Packer, "work", lambda _: lambda packer: None):  # pages come home late, and wait
        for number, pages in enumerate((1, 4, 2, 6, 1, 2)):
            for layer in range(3):
                new = some_noise(pages, 100 * seed + 10 * number + layer)
                held[layer] = torch.cat([held[layer], new], 2)
                keys, negative = paged.update(new, -new, layer)
                assert torch.equal(keys, held[layer])
                assert torch.equal(negative, -held[layer])
    assert paged.statistics().packed_pages > 0
    paged.check()
    paged.close()


def test_what_a_page_held_before_it_was_written_to_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    monkeypatch.setattr(packing, "WAITING_BYTES", 0)
    monkeypatch.setattr(tiers, "SMALLEST_BLOCK_BYTES", 1024)
    paged, tensor = cache(), values(2 * TOKENS)
    with replaced(Packer, "work", lambda _: lambda packer: None):
        paged.update(tensor, tensor, 0)
        pool, pages = next(iter(paged.pools)), paged.layers[0].block.pages[0].copy()
        pool.frames.evict(pages[1:])
        with pool.frames.holding(pages[1:]):
            pool.frames.table.dirty[pages[1]] = True
        pool.frames.evict(pages)  # the first finds no place, and those that wait are packed
    assert torch.equal(paged.layers[0].keys, tensor)
    paged.check()
    paged.close()


def test_without_memory_to_unpack_in_pages_stay_as_they_are() -> None:
    fresh()
    paged = cache()
    tensor = values(7 * TOKENS)
    paged.update(tensor, -tensor, 0)
    lanes = next(iter(paged.pools)).lanes
    asked = []

    def refuse(num_bytes: int) -> Any:
        asked.append(num_bytes)
        raise MemoryBudgetError("no")

    lanes.slab = refuse  # type: ignore[method-assign]
    for layer in (1, 2):
        paged.update(tensor, -tensor, layer)
    settle(paged)
    assert len(asked) == 1
    assert paged.statistics().packed_pages == 0
    assert holds(paged, tensor)
    paged.close()


def test_a_function_may_pack_in_place_of_native_code() -> None:
    fresh()
    seen = []

    def none_fits(pages: Tensor, packed: Tensor) -> Tensor:
        seen.append((tuple(pages.shape[1:]), packed.is_contiguous()))
        return torch.zeros(len(pages), dtype=torch.bool)

    paged = cache(pack_pages=none_fits)
    tensor = fill(paged)
    assert set(seen) == {((1024,), True)}
    assert paged.statistics().packed_pages == 0
    assert holds(paged, tensor)
    paged.close()


def test_a_page_that_was_forgotten_while_it_waited_is_not_packed() -> None:
    fresh("late")
    paged = cache()
    tensor = values(7 * TOKENS)
    with replaced(Packer, "work", lambda _: lambda packer: None):
        for layer in range(3):
            paged.update(tensor, -tensor, layer)
        paged.reset()
        other = values(7 * TOKENS, seed=3)
        for layer in range(3):
            paged.update(other, -other, layer)
    settle(paged)
    paged.check()
    assert holds(paged, other)
    paged.close()


def test_nothing_is_left_of_a_cache_that_packed() -> None:
    machine = fresh()
    before = machine.allocator.statistics().allocated
    paged = cache()
    fill(paged)
    assert paged.statistics().packed_pages > 0
    del paged
    gc.collect()
    assert machine.pinned.charged_bytes == 0
    assert machine.allocator.statistics().allocated == before


class PackedTwins(SharingTwins):
    """The same with pages that are packed, and some that cannot be."""

    tokens, dim, element_bytes = TOKENS, DIM, 2

    def tensor(self, rows: int, length: int) -> Tensor:
        self.number += 1
        choose = np.random.default_rng(int(self.number))
        new = choose.standard_normal((rows, HEADS, length, DIM))
        if self.number % 4 == 0:
            new *= np.exp2(choose.integers(-60, 60, new.shape))
        found = torch.from_numpy(new).bfloat16()
        return found[:1].repeat(rows, 1, 1, 1) if self.number % 3 == 0 else found


@settings(max_examples=25)
@given(operations, st.sampled_from([8, 15]), st.sampled_from([3, 1000]), st.sampled_from(["eager", "late", 3]))
def test_contents_are_those_of_plain_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    given_operations: list[Operation],
    pages: int,
    host_pages: int,
    execution: Execution,
) -> None:
    fresh(execution)
    with emulator.host_guard():
        play(PackedTwins("emu", pages, tmp_path_factory.getbasetemp(), host_pages), given_operations)
    assert not emulator.machine().reports


# Order


def decode() -> None:
    """A prompt that does not fit, and tokens for which its packed pages come in turn."""
    paged = cache(5)
    lengths = (4 * TOKENS - 8, 1, 1, 1, 1)
    for number, length in enumerate(lengths):
        tensor = values(length, seed=number)
        for layer in range(3):
            paged.update(tensor, -tensor, layer)
        if number == 0:
            settle(paged)
    assert paged.statistics().packed_pages > 0
    emulator.machine().synchronize()
    paged.close()


def home_for_another() -> None:
    """A packed page comes to a frame and is forgotten; another is packed to its home while it still comes."""
    paged = cache(8)
    fill(paged)
    pool = next(iter(paged.pools))
    table, block = pool.frames.table, paged.layers[0].block
    pool.enter(block)
    page = block.pages[0, :1].copy()
    pool.frames.vacate(page)
    pool.frames.recall(page)
    home = int(table.home[page[0]])
    assert PACKED <= home < FILE
    pool.tiers.give(home, 1)
    pool.tiers.packed.take(1)
    with emulator.host_guard():
        pool.tiers.packed.places.join(home - PACKED, 1)
        pool.tiers.packed.rows(home - PACKED, 1).zero_()
    emulator.machine().synchronize()


@pytest.mark.parametrize("execution", ["eager", "late", 1, 2, 3])
@pytest.mark.parametrize("scenario", [decode, home_for_another])
def test_nothing_is_out_of_order(scenario: Callable[[], None], execution: Any) -> None:
    assert not reports(scenario, execution)


WAITS = {
    "a packed page is unpacked after it came": (UNPACK, IN),
    "a packed page comes after the last in its place was unpacked": (IN, UNPACK),
    "a page is read after it was unpacked": (COMPUTE, UNPACK),
    "a page is unpacked after its frame was read": (UNPACK, COMPUTE),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_each_wait_that_is_taken_away_is_missed(wait: tuple[Lane, Lane]) -> None:
    lane, other = wait

    def make(claim: Any) -> Any:
        def broken(places: Places, by: Lane, where: Any) -> None:
            kept = places._last[other, where].copy()
            if by is lane:
                places._last[other, where] = 0
            claim(places, by, where)
            places._last[other, where] = kept if by is lane else places._last[other, where]

        return broken

    with replaced(Places, "_claim", make):
        found = reports(decode)
    assert found
    assert all(report.kind == "race" for report in found)


def test_a_home_that_is_still_read_is_not_packed_to() -> None:
    with replaced(Places, "join", lambda _: lambda places, start, count: None):
        assert reports(home_for_another)
