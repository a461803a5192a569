"""Random operations on caches that choose their pages: contents are those of plain tensors, and every law holds."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from fmstream import PagedCache
from fmstream.emulator.backlog import Execution
from fmstream.payloads.kv.choosing import Seen
from fmstream.payloads.kv.chosen_layer import ATTENTION, ChosenLayer
from tests.kv.kit import fresh
from tests.kv.kit_twins import DIM, HEADS, MAX_LENGTH, Held, Operation, Twins, let_leave

LAYERS, TOKENS = 4, 3
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=4 * DIM, num_attention_heads=4, num_key_value_heads=HEADS)

OPERATIONS = (*["step"] * 4, *["prompt"] * 2, "fork", "reorder", "crop", "free", "repeat", "select", "spill", "read")


class ChosenTwins(Twins):
    """With steps that attend to the pages that matter most."""

    def __init__(self, device: str, folder: Any, host_pages: int) -> None:
        CONFIG._attn_implementation_internal = ATTENTION
        first = PagedCache(
            CONFIG, page_tokens=TOKENS, kv_budget=3, kv_host_memory=host_pages * 2 * DIM * TOKENS * 4, spill_dir=folder
        )
        assert first.selection is not None
        first.selection.watch = self.watch
        self.seen: Seen | None = None
        self.num_chosen = 0
        super().__init__(device, first)

    def watch(self, seen: Seen) -> None:
        self.seen = seen

    def act(self, cache: PagedCache, held: Held, name: str, value: int) -> None:
        rows, length = (held[0].shape[0], held[0].shape[2]) if held[0] is not None else (1 + value % 3, 0)
        if name in ("step", "prompt"):
            cache.selection.gate = 0.0 if value % 7 == 0 else 2.0
            self.append(cache, held, rows, min(1 if name == "step" else 2 + value % 15, MAX_LENGTH - length))
        elif name == "spill" and length:
            self.spill(cache, np.random.default_rng(value))

    def append(self, cache: PagedCache, held: Held, rows: int, count: int) -> None:
        for index in range(LAYERS if count else 0):
            new = self.tensor(rows, count)
            keys, values = cache.update(new.to(self.device), (-new).to(self.device), index)
            before = held[index]
            held[index] = whole = new if before is None else torch.cat([before, new], 2)
            layer = cache.layers[index]
            assert isinstance(layer, ChosenLayer)
            if layer.is_pending:
                self.attend(layer, rows, whole)
            else:
                assert torch.equal(keys.cpu(), whole)
                assert torch.equal(values.cpu(), -whole)

    def attend(self, layer: ChosenLayer, rows: int, whole: Tensor) -> None:
        """A step finds the tokens of the pages that it chose, and those of the page that is being filled."""
        self.seen = None
        keys, values, mask = layer.attend(torch.randn(rows, 4, 1, DIM).to(self.device), None, None)
        assert mask is None
        seen: Any = self.seen
        wanted = whole
        if seen is not None and not seen.falls_back:
            complete = (whole.shape[2] - 1) // TOKENS * TOKENS
            chosen = torch.from_numpy(seen.decision.chosen.astype(np.int64))
            places = (chosen[:, :, None] * TOKENS + torch.arange(TOKENS)).view(rows, HEADS, -1, 1)
            parts = whole[:, :, :complete].gather(2, places.expand(-1, -1, -1, DIM)), whole[:, :, complete:]
            wanted = torch.cat(parts, 2)
            self.num_chosen += chosen.numel()
        assert torch.equal(keys.cpu(), wanted)
        assert torch.equal(values.cpu(), -wanted)

    def spill(self, cache: PagedCache, choose: Any) -> None:
        """Let some pages leave, as pressure would; also those that are being filled."""
        layer: Any = cache.layers[int(choose.integers(LAYERS))]
        layer.pool.enter(layer.block)
        let_leave(layer, choose)

    def check(self) -> None:
        layer: Any = self.pairs[0][0].layers[0]
        layer.pool.enter(layer.block)
        self.pairs[0][0].check()


@pytest.mark.parametrize(("device", "execution"), [("cpu", "eager"), ("emu", "late"), ("emu", 3)])
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 7), st.integers(0, 2**20)), min_size=10, max_size=40
    ),
    host_pages=st.sampled_from([1000, 5]),
)
def test_contents_are_those_of_tensors(
    device: str, execution: Execution, operations: list[Operation], host_pages: int, tmp_path_factory: Any
) -> None:
    machine = fresh(execution)
    twins = ChosenTwins(device, tmp_path_factory.mktemp("spill"), host_pages)
    with torch.no_grad():
        for operation in [("prompt", 0, 13), ("prompt", 0, 14), ("step", 0, 1), *operations]:
            twins.apply(operation)
            gc.collect(0)
            twins.check()
        for cache, held in twins.pairs:
            twins.compare(cache, held)
    assert twins.num_chosen > 0
    assert not machine.reports
    first = twins.pairs[0][0]
    del twins, cache
    first.close()


def test_many_steps_leave_nothing_behind() -> None:
    """Every page that comes goes again: tables and homes do not grow with the number of steps."""
    fresh(check=None)
    twins = ChosenTwins("cpu", None, 100_000)
    cache, held = twins.pairs[0]
    sizes = []
    with torch.no_grad():
        twins.apply(("prompt", 0, 14))
        twins.apply(("prompt", 0, 14))
        cache.selection.gate = 2.0
        for number in range(400):
            twins.append(cache, held, held[0].shape[0], 1)
            if held[0].shape[2] >= MAX_LENGTH:
                cache.crop(-9)
                held[:] = [tensor[:, :, :-9] for tensor in held]
            if number in (100, 399):
                pool = next(iter(cache.pools))
                sizes.append((pool.frames.table.num_pages, pool.tiers.counts().host_bytes, pool.max_pages))
    assert sizes[0] == sizes[1]
    twins.check()
    assert twins.num_chosen > 400 * 2 * HEADS * held[0].shape[0]
    cache.close()
