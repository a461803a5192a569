"""Embedding tables that stay on the host: equal to one on the device, and only rows that are used cross the link."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream import emulator
from fmstream.actors import gathers
from fmstream.errors import IdsError
from fmstream.payloads import embeddings
from fmstream.payloads.embeddings import Tables
from tests.accelerator import kit
from tests.accelerator.kit import (
    FRACTIONS,
    ORDERS,
    equal,
    fresh,
    here,
    on_host,
    twin_on,
)
from tests.kit import budget, mlp, weights_bytes
from tests.kit_runtime import map_weights

WIDTH = 48
VOCABULARY = 400
# Where nothing but tables exceeds the memory, nothing else comes and goes.
streaming = functools.partial(kit.streaming, idle=True)
stream_and_compare = functools.partial(kit.stream_and_compare, idle=True)


@pytest.fixture(autouse=True)
def tiny_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables count as large, and more than a few rows are gathered by workers."""
    monkeypatch.setattr(embeddings, "MIN_TABLE_BYTES", 1)
    monkeypatch.setattr(gathers.Gathers.__init__, "__defaults__", (1, 1024))


class Scaled(nn.Embedding):
    """Scales its rows by a buffer, and hides padding."""

    scale: Tensor

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, padding_idx=3)
        self.register_buffer("scale", torch.tensor(1.7), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale.to(self.weight.dtype) * (ids != self.padding_idx).unsqueeze(-1)


class Reader(nn.Module):
    """A tied vocabulary, positions, and a table for each layer that is read where it is used."""

    def __init__(self, depth: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), Scaled(300, WIDTH)
        self.own = nn.ModuleList(Scaled(VOCABULARY, 16) for _ in range(depth))
        self.into = nn.ModuleList(nn.Linear(16, WIDTH) for _ in range(depth))
        self.layers = nn.ModuleList(mlp(3, WIDTH, seed) for seed in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(ids % 300)
        for table, into, layer in zip(self.own, self.into, self.layers, strict=True):
            x = layer(x + into(table(ids)))
        return self.head(x)  # type: ignore[no-any-return]


def ids_of(number: int, *shape: int) -> Tensor:
    """Other ids for each number, on the device."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCABULARY, shape or (2, 37), generator=generator).to(here.name)


def read(module: nn.Module, number: int) -> Tensor:
    """One call."""
    return module(ids_of(number))  # type: ignore[no-any-return]


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("execution", ORDERS)
def test_outputs_equal_the_twins(execution: Any, fraction: float) -> None:
    fresh(execution)
    with emulator.host_guard():
        handle, _ = stream_and_compare(Reader(), read, 6, fraction)
    telemetry = handle.telemetry
    assert telemetry.table_bytes
    assert telemetry.num_lookups >= 6 * 5
    assert telemetry.row_bytes


@pytest.mark.parametrize("window", [1, 7, 64, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_windows_and_dtypes(window: Any, dtype: torch.dtype) -> None:
    fresh("late")
    stream_and_compare(Reader(dtype=dtype), read, 4, 0.5, prefetch_window=window)


@pytest.mark.parametrize("length", [0, 1, 2, 300])
def test_any_number_of_positions(length: int) -> None:
    fresh(1)

    def step(module: nn.Module, number: int) -> Any:
        return [module(ids_of(number, 1, length)), torch.ones(1, device=here.name)]

    stream_and_compare(Reader(), step, 4, 0.5, prefetch_window=16)


def test_rows_of_later_layers_are_brought_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    used: list[bool] = []
    bring = Tables._bring

    def bringing(self: Tables, rows: Any, master: Any, ids: Tensor) -> Tensor:
        used.append(any(key[1] == master.index for key in self._ahead))
        return bring(self, rows, master, ids)

    monkeypatch.setattr(Tables, "_bring", bringing)
    stream_and_compare(Reader(), read, 3, 0.5)
    per_pass = len(used) // 3
    assert not any(used[:per_pass])
    assert sum(used[-per_pass:]) >= 3


class Alone(nn.Module):
    """A table beside layers."""

    def __init__(self, table: nn.Embedding | None = None) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = table or nn.Embedding(5000, WIDTH)
        self.layers = mlp(4, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.table(ids))  # type: ignore[no-any-return]


def test_only_rows_that_are_used_cross_the_link() -> None:
    machine = fresh()
    module = Alone()
    table_bytes = 5000 * WIDTH * 4
    memory = fmstream.smallest_memory(module) + 40_000
    assert memory < table_bytes / 10
    with torch.no_grad(), streaming(module, memory=memory) as handle:
        read(module, 0)
        machine.reset_statistics()
        for number in range(1, 5):
            read(module, number)
        assert here.allocated() < table_bytes / 4
        assert handle.telemetry.table_bytes == table_bytes
        assert handle.telemetry.row_bytes < 5 * 2 * 37 * (WIDTH * 4 + 64)
        assert machine.statistics().bytes_in < table_bytes
        assert machine.pinned.charged_bytes < table_bytes / 4


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6])
def test_rows_are_within_the_memory_given(fraction: float) -> None:
    fresh()
    module = Reader()
    memory = budget(module, fraction)
    with torch.no_grad(), streaming(module, memory=memory, prefetch_window=1000) as handle:
        for number in range(4):
            read(module, number)
            executor = handle._session._executor
            assert executor is not None
            assert executor.arena.num_bytes + handle._session.tables.held_bytes <= memory


def test_a_table_is_resident_where_all_fits() -> None:
    fresh()
    module = Alone()
    handle, _ = stream_and_compare(module, read, 3, memory=2 * weights_bytes(module))
    assert not handle.telemetry.table_bytes
    assert not handle.telemetry.num_lookups


def test_all_but_the_table_is_resident_where_that_fits() -> None:
    fresh()
    module = Alone()
    with torch.no_grad(), streaming(module, memory=weights_bytes(module) // 2) as handle:
        for number in range(4):
            read(module, number)
        passes = handle.telemetry.passes
        assert not any(record.streamed_bytes for record in passes[1:])
        assert handle.telemetry.num_lookups == 4


def test_bad_ids_are_refused_before_anything_moves() -> None:
    machine = fresh()
    module = Alone()
    twin = copy.deepcopy(module)
    good = ids_of(1)
    with torch.no_grad(), streaming(module, 0.3, keeps=True):
        module(good)
        for bad in (torch.tensor([[4, 5000]]), torch.tensor([[-1]])):
            there = bad.to(here.name)
            machine.synchronize()
            before = machine.statistics().bytes_in
            with pytest.raises(IdsError, match=r"is no row of 'table\.weight', which has 5000"):
                nn.functional.embedding(there, module.table.weight)
            assert machine.statistics().bytes_in == before
            with pytest.raises(IndexError):
                module(there)
            with pytest.raises(IndexError):
                twin(bad)
        with pytest.raises(RuntimeError, match="scalar types: Long, Int") as ours:
            module.table(torch.ones(3, device=here.name))
        with pytest.raises(RuntimeError, match="scalar types: Long, Int") as theirs:
            twin(torch.ones(3))
        assert str(ours.value)[:60] == str(theirs.value)[:60]
        with pytest.raises(RuntimeError, match="same device"):
            module.table(torch.tensor([1]))
        equal(on_host(module(good)), on_host(twin_on(twin)(good)))


def test_a_table_that_needs_a_gradient_streams_as_a_weight() -> None:
    fresh()
    module = Reader()
    twin = twin_on(module)
    with streaming(module, 0.8, keeps=True) as handle:
        for number in range(3):
            for part in (module, twin):
                read(part, number).square().mean().backward()
        assert any("needs a gradient" in note for note in handle.telemetry.notes)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad.to("cpu"))


def test_a_frozen_table_gives_rows_in_a_graph() -> None:
    fresh("late")
    module = Alone()
    module.table.requires_grad_(False)
    twin = twin_on(module)
    with streaming(module, 0.3, keeps=True) as handle:
        for number in range(3):
            for part in (module, twin):
                read(part, number).square().mean().backward()
        assert handle.telemetry.num_lookups == 3
    for ours, theirs in zip(module.layers.parameters(), twin.layers.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad.to("cpu"))


def test_edits_of_a_table_are_seen_even_where_its_rows_were_brought_ahead() -> None:
    fresh("late")
    module = Reader()
    twin = twin_on(module)
    with torch.no_grad(), streaming(module, 0.5):
        for number in range(5):
            for part in (module, twin):
                part.own[3].weight[number::2] = 0.25 + number

                def edit(*_: Any, part: Any = part, number: int = number) -> None:
                    part.own[2].weight[: 100 * number] += 1

                hook = part.layers[0].register_forward_hook(edit)
                part.result = on_host(read(part, number))
                hook.remove()
            equal(module.result, twin.result)
        del module.result, twin.result
    equal([module.own[3].weight.detach()], on_host(twin.own[3].weight))


def test_ids_that_are_written_in_place_are_read_anew() -> None:
    fresh("late")

    class Shifting(Reader):
        def forward(self, ids: Tensor) -> Tensor:
            first = self.own[0](ids)
            ids += 1
            second = self.own[0](ids)
            ids.sub_(1)
            return first + second + self.own[0](ids)

    module, kept = Shifting(), ids_of(8, 30).clamp(max=VOCABULARY - 2)
    twin = twin_on(module)
    with torch.no_grad(), streaming(module, 0.5):
        for number in range(4):
            kept.copy_(ids_of(number, 30).clamp(max=VOCABULARY - 2))
            equal(on_host(module(kept)), on_host(twin(kept)))


def test_inference_mode() -> None:
    fresh("late")
    module = Reader()
    twin = twin_on(module)
    with streaming(module, 0.5), torch.inference_mode():
        for number in range(4):
            equal(on_host(read(module, number)), on_host(read(twin, number)))


def test_a_table_with_max_norm_streams_as_a_weight() -> None:
    fresh()
    module = Alone(nn.Embedding(64, WIDTH, max_norm=2.0))
    handle, _ = stream_and_compare(module, lambda m, n: m(ids_of(n) % 64), 3, 0.5)
    assert not handle.telemetry.table_bytes


def test_a_lookup_outside_any_pass() -> None:
    fresh()
    module = Alone()
    twin = twin_on(module)
    with torch.no_grad(), streaming(module, 0.3, keeps=True) as handle:
        for number in range(3):
            ids = ids_of(number)
            equal(
                on_host(nn.functional.embedding(ids, module.table.weight)),
                on_host(nn.functional.embedding(ids, twin.table.weight)),
            )
            equal(on_host(module.table(ids)), on_host(twin.table(ids)))
        assert handle.telemetry.num_lookups == 6
        assert not handle.telemetry.faults


def test_a_table_in_a_file_stays_there(tmp_path: Path) -> None:
    machine = fresh("late")
    module = map_weights(Alone(), tmp_path / "w.safetensors")
    with torch.no_grad(), streaming(module, 0.1):
        read(module, 0)
        assert not module.table.weight.master.original.is_pinned()  # type: ignore[attr-defined]
        assert machine.pinned.charged_bytes < 5000 * WIDTH * 4 / 2
    stream_and_compare(module, read, 4, 0.1)


def test_staged_rows_and_residents_are_given_back_where_memory_must_stay_free() -> None:
    machine = fresh()
    module = nn.ModuleDict({"table": nn.Embedding(20000, 64), "layers": mlp(8, 256)})
    memory = fmstream.smallest_memory(module) + weights_bytes(module["layers"]) - 100_000

    def step() -> Tensor:
        rows = module["table"](ids_of(0, 64))
        return module["layers"](rows.view(-1, 256))  # type: ignore[no-any-return]

    with (
        torch.no_grad(),
        fmstream.stream(module, memory=memory, device=here.name, cpu_offload_threshold_mb=32) as handle,
    ):
        session = handle._session
        for _ in range(3):
            step()
            session.settle_plans()
        executor, tables = session._executor, session.tables
        assert executor is not None
        before, rows = executor.held_bytes, tables.held_bytes
        mine = torch.zeros(40 << 20, dtype=torch.uint8, device=here.name)
        for _ in range(3):
            step()
            session.settle_plans()
        assert tables.held_bytes < rows
        assert executor.held_bytes < before
        del mine
    assert not machine.reports
