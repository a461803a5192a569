"""Random operations on caches that share pages: contents are those of plain tensors, and every law holds after each."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from fmstream import PagedCache, emulator
from fmstream.emulator.backlog import Execution
from fmstream.errors import MemoryBudgetError
from tests.kv.kit import fresh
from tests.kv.kit_twins import DIM, HEADS, MAX_CACHES, MAX_LENGTH, MAX_ROWS, Held, Operation, Twins, let_leave

LAYERS, TOKENS = 3, 4
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=16, num_attention_heads=2)

OPERATIONS = (
    *["append"] * 3,
    "again",
    "retry",
    "spill",
    "recall",
    "fork",
    "reorder",
    "crop",
    "free",
    "repeat",
    "select",
    "read",
)


class SharingTwins(Twins):
    """With pages of equal beginnings in common."""

    tokens, dim, element_bytes = TOKENS, DIM, 4

    def __init__(self, device: str, pages: int, folder: Any, host_pages: int) -> None:
        self.pages = pages
        host_bytes = host_pages * 2 * HEADS * self.dim * self.tokens * self.element_bytes
        first = PagedCache(CONFIG, pages, page_tokens=self.tokens, kv_host_memory=host_bytes, spill_dir=folder)
        super().__init__(device, first)

    def act(self, cache: PagedCache, held: Held, name: str, value: int) -> None:
        if name == "append":
            rows, length = (held[0].shape[0], held[0].shape[2]) if held[0] is not None else (1 + value % MAX_ROWS, 0)
            count = min(1 + value % 9, MAX_LENGTH - length)
            self.append(cache, held, [self.tensor(rows, count) for _ in range(LAYERS if count else 0)])
        elif name == "again" and held[0] is None:
            self.again(cache, held, value)
        elif name == "retry" and held[0] is not None:
            self.retry(cache, held, value)
        elif name in ("spill", "recall"):
            self.move(cache, name, np.random.default_rng(value))

    def again(self, cache: PagedCache, held: Held, value: int) -> None:
        """Bring an empty cache what the beginning of another one holds, whose pages it can share."""
        others = [tensors for _, tensors in self.pairs if tensors[0] is not None]
        if others:
            count = 1 + value % others[value % len(others)][0].shape[2]
            self.append(cache, held, [tensor[:, :, :count] for tensor in others[value % len(others)]])

    def retry(self, cache: PagedCache, held: Held, value: int) -> None:
        """Take tokens back and bring the same again."""
        cut = 1 + value % held[0].shape[2]
        again = [tensor[:, :, -cut:] for tensor in held]
        self.apply(("crop", [cache for cache, _ in self.pairs].index(cache), cut - 1))
        self.append(cache, held, again)

    def append(self, cache: PagedCache, held: Held, tensors: list[Tensor]) -> None:
        for index, new in enumerate(tensors):
            try:
                keys, values = cache.update(new.to(self.device), (-new).to(self.device), index)
            except MemoryBudgetError as error:
                assert index == 0
                assert "is less than one layer" in str(error)  # noqa: PT017
                return
            before = held[index]
            held[index] = new if before is None else torch.cat([before, new], 2)
            assert torch.equal(keys.cpu(), held[index])
            assert torch.equal(values.cpu(), -held[index])
            assert keys.is_contiguous()

    def has_room(self, rows: int, length: int) -> bool:
        return super().has_room(rows, length) and rows * -(-length // self.tokens) <= self.pages

    def move(self, cache: PagedCache, name: str, choose: Any) -> None:
        """Let some pages leave or come, as pressure and prefetch would."""
        for pool in cache.pools:
            layer = cache.layers[int(choose.integers(LAYERS))]
            if layer.pool is not pool or not layer.block.length:
                continue
            pool.enter(layer.block)
            if name == "recall":
                pool.prefetch(layer.block)
            else:
                let_leave(layer, choose)

    def check(self) -> None:
        """Every law, after whoever left was seen off."""
        gc.collect(0)
        for cache, _ in self.pairs:
            for pool in cache.pools:
                here = [layer.block for layer in cache.layers if layer.pool is pool]
                if here:
                    pool.enter(here[0])
                    pool.check()

    def close(self) -> None:
        for cache, held in self.pairs:
            self.compare(cache, held)
        self.check()
        self.moved = self.pairs[0][0].statistics()
        for cache, _ in self.pairs:
            cache.close()


operations = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, MAX_CACHES), st.integers(0, 1000)), min_size=3, max_size=25
)


def play(twins: SharingTwins, given_operations: list[Operation]) -> None:
    for operation in given_operations:
        twins.apply(operation)
        twins.check()
    twins.close()


# The page of which the last tokens become another cache's own has a number that was known.
OWN_AGAIN = [("append", 0, 0), ("append", 0, 299), ("fork", 0, 0), ("append", 0, 966), ("fork", 0, 0), ("free", 0, 0)]


@settings(max_examples=60)
@example([*OWN_AGAIN, ("retry", 1, 4)], 8, 0)
@given(operations, st.sampled_from([8, 15, 40, 200]), st.sampled_from([0, 5, 1000]))
def test_contents_are_those_of_plain_tensors(
    tmp_path_factory: pytest.TempPathFactory, given_operations: list[Operation], pages: int, host_pages: int
) -> None:
    play(SharingTwins("cpu", pages, tmp_path_factory.getbasetemp(), host_pages), given_operations)


@settings(max_examples=25)
@given(operations, st.sampled_from([8, 15, 40]), st.sampled_from([3, 1000]), st.sampled_from(["eager", "late", 3]))
def test_the_same_on_a_device_with_streams(
    tmp_path_factory: pytest.TempPathFactory,
    given_operations: list[Operation],
    pages: int,
    host_pages: int,
    execution: Execution,
) -> None:
    fresh(execution)
    play(SharingTwins("emu", pages, tmp_path_factory.getbasetemp(), host_pages), given_operations)
    assert not emulator.machine().reports


@pytest.mark.parametrize("seed", range(4))
def test_many_operations_move_pages_through_all_tiers_and_leave_nothing(tmp_path: Any, seed: int) -> None:
    choose = np.random.default_rng(seed)
    twins = SharingTwins("cpu", 30, tmp_path, 5)
    for _ in range(250):
        twins.apply((str(choose.choice(OPERATIONS)), int(choose.integers(4)), int(choose.integers(1000))))
        twins.check()
    pool = next(iter(twins.pairs[0][0].pools))
    twins.close()
    moved = twins.moved
    assert min(moved.recalled_bytes, moved.spilled_bytes, moved.file_read_bytes, moved.file_written_bytes) > 0
    assert pool.tiers.counts()[:3] == (0, 0, 0)
    assert pool.frames.table.counts().free == pool.frames.table.num_frames
    assert not pool.frames.refs.any()
