"""Random operations on caches that share pages: contents are those of plain tensors, and every law holds after each."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from fmstream import PagedCache, emulator
from fmstream.core.pages import RESIDENT
from fmstream.emulator.backlog import Execution
from fmstream.errors import MemoryBudgetError
from tests.kv.kit import fresh

LAYERS, HEADS, DIM, TOKENS = 3, 2, 4, 4
MAX_ROWS, MAX_LENGTH, MAX_CACHES = 4, 40, 3
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=16, num_attention_heads=2)

Operation = tuple[str, int, int]
OPERATIONS = (
    *["append"] * 3,
    "again",
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


class Twins:
    """Caches in one pool, each beside tensors that hold the same."""

    tokens, dim, element_bytes = TOKENS, DIM, 4

    def __init__(self, device: str, pages: int, folder: Any, host_pages: int) -> None:
        self.device = device
        self.pages = pages
        host_bytes = host_pages * 2 * HEADS * self.dim * self.tokens * self.element_bytes
        first = PagedCache(CONFIG, pages, page_tokens=self.tokens, kv_host_memory=host_bytes, spill_dir=folder)
        self.pairs: list[tuple[PagedCache, list[Tensor | None]]] = [(first, [None] * LAYERS)]
        self.number = 0.0

    def tensor(self, rows: int, length: int) -> Tensor:
        """Values that occur nowhere else; at times the same in all sequences."""
        count = rows * HEADS * length * DIM
        self.number += count
        new = torch.arange(self.number - count, self.number).view(rows, HEADS, length, DIM)
        return new[:1].repeat(rows, 1, 1, 1) if self.number % 3 == 0 else new

    def apply(self, operation: Operation) -> None:
        """Carry out one operation on a cache and on its tensors."""
        name, which, value = operation
        cache, held = self.pairs[which % len(self.pairs)]
        rows = held[0].shape[0] if held[0] is not None else 1 + value % MAX_ROWS
        length = held[0].shape[2] if held[0] is not None else 0
        choose = np.random.default_rng(value)
        if name == "append":
            count = min(1 + value % 9, MAX_LENGTH - length)
            self.append(cache, held, [self.tensor(rows, count) for _ in range(LAYERS if count else 0)])
        elif name == "again" and not length:
            self.again(cache, held, value)
        elif name == "fork" and len(self.pairs) < MAX_CACHES:
            self.pairs.append((cache.fork(), list(held)))
        elif name == "free":
            if len(self.pairs) > 1:
                self.pairs.remove((cache, held))
            else:
                cache.reset()
                held[:] = [None] * LAYERS
        elif name in ("spill", "recall"):
            self.move(cache, name, choose)
        elif name == "crop" and length:
            cut = 1 + value % length
            cache.crop(-cut)
            held[:] = [tensor[:, :, : length - cut] if length > cut else None for tensor in held]
        elif name == "read":
            self.compare(cache, held)
        elif length:
            self.choose(cache, held, name, rows, choose)

    def again(self, cache: PagedCache, held: list[Tensor | None], value: int) -> None:
        """Bring an empty cache what the beginning of another one holds, whose pages it can share."""
        others = [tensors for _, tensors in self.pairs if tensors[0] is not None]
        if others:
            count = 1 + value % others[value % len(others)][0].shape[2]
            self.append(cache, held, [tensor[:, :, :count] for tensor in others[value % len(others)]])

    def append(self, cache: PagedCache, held: list[Tensor | None], tensors: list[Tensor]) -> None:
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

    def choose(self, cache: PagedCache, held: list[Tensor | None], name: str, rows: int, choose: Any) -> None:
        if name == "repeat":
            if rows * 2 > MAX_ROWS or rows * 2 * -(-held[0].shape[2] // self.tokens) > self.pages:
                return
            cache.batch_repeat_interleave(2)
            held[:] = [tensor.repeat_interleave(2, 0) for tensor in held]
            return
        count = rows if name == "reorder" else 1 + int(choose.integers(rows))
        index = torch.tensor(choose.integers(rows, size=count))
        (cache.reorder_cache if name == "reorder" else cache.batch_select_indices)(index)
        held[:] = [tensor[index] for tensor in held]

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
                pages = np.unique(layer.block.pages)
                pages = pages[pool.frames.table.state[pages] == RESIDENT]
                pool.frames.evict(pages[choose.random(len(pages)) < 0.6])

    def compare(self, cache: PagedCache, held: list[Tensor | None]) -> None:
        for index, tensor in enumerate(held):
            layer = cache.layers[index]
            assert layer.get_seq_length() == (0 if tensor is None else tensor.shape[2])
            if tensor is not None:
                assert torch.equal(layer.keys.cpu(), tensor)
                assert torch.equal(layer.values.cpu(), -tensor)

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


def play(twins: Twins, given_operations: list[Operation]) -> None:
    for operation in given_operations:
        twins.apply(operation)
        twins.check()
    twins.close()


@settings(max_examples=60)
@given(operations, st.sampled_from([8, 15, 40, 200]), st.sampled_from([0, 5, 1000]))
def test_contents_are_those_of_plain_tensors(
    tmp_path_factory: pytest.TempPathFactory, given_operations: list[Operation], pages: int, host_pages: int
) -> None:
    play(Twins("cpu", pages, tmp_path_factory.getbasetemp(), host_pages), given_operations)


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
    play(Twins("emu", pages, tmp_path_factory.getbasetemp(), host_pages), given_operations)
    assert not emulator.machine().reports


@pytest.mark.parametrize("seed", range(4))
def test_many_operations_move_pages_through_all_tiers_and_leave_nothing(tmp_path: Any, seed: int) -> None:
    choose = np.random.default_rng(seed)
    twins = Twins("cpu", 30, tmp_path, 5)
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
