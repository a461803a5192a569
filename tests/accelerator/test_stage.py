"""Windows of rows that come ahead of whoever uses them."""

from __future__ import annotations

import asyncio
import gc
import resource
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fmstream
from fmstream import emulator
from fmstream.actors.gathers import Gathers
from fmstream.actors.rows import DeviceRing, Rows
from fmstream.actors.staging import StagingRing
from fmstream.device.accelerator import Accelerator
from fmstream.doors.stage import Staged
from fmstream.errors import ConfigError, IdsError
from fmstream.payloads import embeddings
from tests.accelerator.kit import ORDERS, equal, fresh, here, on_host, streaming
from tests.accelerator.test_tables import Alone, Scaled
from tests.kit import budget
from tests.kit_runtime import FailAt

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn)


def table_of(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Random bits, as finite numbers where the type has such."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (rows, width), generator=generator).to(dtype)


def ids_of(rows: int, *shape: int, seed: int = 0) -> Tensor:
    """Rows of a table, some of them often."""
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed))


def expected(table: Tensor, ids: Tensor, window: int) -> list[Tensor]:
    """What the windows must be."""
    picked = table.view(torch.uint8)[ids.long()] if table.dtype == torch.float8_e4m3fn else table[ids.long()]
    return [part.contiguous().view(table.dtype) for part in picked.split(window, ids.dim() - 1)]


def bits(tensors: list[Tensor]) -> list[Tensor]:
    """As bytes, for types that cannot be compared."""
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


@given(
    rows=st.integers(1, 600),
    width=st.integers(1, 200),
    shape=st.lists(st.integers(1, 80), min_size=1, max_size=2),
    window=st.integers(1, 90),
    dtype=st.sampled_from(DTYPES),
    narrow=st.booleans(),
    order=st.sampled_from([*ORDERS, 3]),
    where=st.sampled_from(["emu", "cpu"]),
)
def test_any_ids_windows_dtypes_and_row_sizes(
    rows: int, width: int, shape: list[int], window: int, dtype: torch.dtype, narrow: bool, order: Any, where: str
) -> None:
    machine = fresh(order)
    table, ids = table_of(rows, width, dtype), ids_of(rows, *shape, seed=width)
    with emulator.host_guard():
        given_ids = ids.int() if narrow else ids
        windows = list(fmstream.stage(table, given_ids, window=window, device=where))
        found = [tensor.cpu() for tensor in windows]
    assert all(tensor.device.type == where for tensor in windows)
    equal(bits(found), bits(expected(table, ids, window)))
    assert not machine.reports
    here.check()


@pytest.mark.parametrize("execution", ORDERS)
def test_an_event_loop_goes_on_meanwhile(execution: Any) -> None:
    fresh(execution)
    table, ids = table_of(5000, 96), ids_of(5000, 2, 1000)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def collect() -> list[Tensor]:
        counting = asyncio.ensure_future(count())
        found = [window async for window in fmstream.stage(table, ids, window=300, device=here.name)]
        counting.cancel()
        return found

    equal(on_host(asyncio.run(collect())), expected(table, ids, 300))
    assert turns


@pytest.mark.parametrize("where", ["emu", "cpu"])
def test_windows_are_what_a_subclass_returns(where: str) -> None:
    fresh("late")
    module = Scaled(500, 16)
    ids = ids_of(500, 3, 70)
    wanted = [part.detach() for part in module(ids).split(32, 1)]
    before = dict(module.__dict__["_buffers"]), module.weight
    with fmstream.stage(module, ids, window=32, device=where) as staged:
        assert len(staged) == 3
        first = next(staged)
        assert (dict(module.__dict__["_buffers"]), module.weight) == before
        equal(on_host([first, *staged]), wanted)
        assert len(staged) == 0


def test_a_subclass_that_looks_up_other_ids_is_refused() -> None:
    fresh()

    class Shifted(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids + 1)

    module = Shifted(10, 4)
    weight = module.weight
    with pytest.raises(ConfigError, match="looks up other ids"):
        next(fmstream.stage(module, [1, 2], device=here.name))
    assert module.weight is weight
    here.check()


def test_a_table_that_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MIN_TABLE_BYTES", 1)
    fresh("late")
    module = Alone()
    ids = ids_of(5000, 200)
    wanted = expected(module.table.weight.detach().clone(), ids, 64)
    with torch.no_grad(), streaming(module, idle=True, keeps=True):
        for rows, part in zip(fmstream.stage(module.table, ids, window=64), ids.split(64), strict=True):
            assert rows.device.type == here.name
            equal(on_host(module.layers(rows)), on_host(module(part.to(here.name))))
        equal(on_host(list(fmstream.stage(module.table.weight, ids, window=64))), wanted)


def test_windows_overlap_with_what_uses_them() -> None:
    machine = fresh(capacity=1 << 28)
    table, x = table_of(3000, 1024), torch.ones(1024, 8192, device=here.name)
    ids = ids_of(3000, 24 * 256)
    staged = fmstream.stage(table, ids, window=256, device=here.name)
    next(staged)
    machine.synchronize()
    machine.reset_statistics()
    for rows in staged:
        torch.mm(rows, x)
    machine.synchronize()
    found = machine.statistics()
    assert found.busy["copy in"] > 0.1 * found.busy["compute"]
    assert found.seconds < 1.02 * found.busy["compute"] + 0.001


def test_a_row_is_fetched_once_for_a_window() -> None:
    fresh()
    table = table_of(100, 256)
    ids = torch.tensor([7, 7, 7, 7, 8, 8, 8, 8] * 8)
    staged = fmstream.stage(table, ids, window=64, device=here.name)
    equal(on_host(next(staged)), [table[ids]])
    assert staged.row_bytes < 3 * 1024
    staged.close()


def test_no_ids_and_no_windows() -> None:
    fresh()
    assert list(fmstream.stage(table_of(5, 4), [], device=here.name)) == []
    empty = list(fmstream.stage(table_of(5, 4), torch.zeros(0, 3, dtype=torch.int64), window=2, device=here.name))
    assert [tuple(window.shape) for window in empty] == [(0, 2, 4), (0, 1, 4)]


@pytest.mark.parametrize(("where", "number"), [("emu", 30_000), ("cpu", 70_000)])
def test_memory_does_not_grow_over_many_windows(where: str, number: int) -> None:
    machine = fresh(check=None, keep_timeline=False, poison=False)
    table = table_of(64, 8)
    staged = fmstream.stage(table, ids_of(64, number), window=1, device=where)
    for _ in range(2_000):
        next(staged)
    gc.collect()
    allocated, pinned = machine.statistics().allocated, machine.statistics().pinned_bytes
    objects, resident = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in staged) == number - 2_000
    gc.collect()
    assert len(gc.get_objects()) < objects + 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < resident + 20_000  # KiB
    assert machine.statistics().peak_allocated <= allocated + 4096
    assert machine.statistics().peak_pinned_bytes <= pinned
    here.check()


# Ends

POINTS: dict[str, tuple[Any, str]] = {
    "begin ahead": (Staged, "_begin_ahead"),
    "take": (Staged, "_take"),
    "begin": (Rows, "begin"),
    "copy": (Rows, "_copy"),
    "bring on": (Rows, "_bring_on"),
    "select": (Rows, "select"),
    "reset": (Rows, "reset"),
    "take a place": (DeviceRing, "take"),
    "leave a place": (DeviceRing, "leave"),
    "take staging": (StagingRing, "take"),
    "leave staging": (StagingRing, "leave"),
    "gather": (Gathers, "begin"),
    "wait for a gather": (Gathers, "wait"),
    "mark": (Accelerator, "mark"),
}


@pytest.mark.parametrize("point", POINTS)
def test_an_interrupt_gives_all_memory_back(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = POINTS[point]
    fired = 0
    for n in (1, 2, 5):
        fresh()
        table, ids = table_of(900, 256), ids_of(900, 900)
        allocated = here.allocated()
        fail = FailAt(getattr(owner, name), n, KeyboardInterrupt)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail.as_method())
            patch.setattr(Gathers, "is_done", lambda self, ticket: False)  # so that each is waited for
            staged = fmstream.stage(table, ids, window=100, device=here.name)
            try:
                for window in staged:
                    del window
            except KeyboardInterrupt:
                pass
            staged.close()
            staged.close()
        fired += fail.fired
        del staged
        here.check()
        assert here.allocated() == allocated
        equal(on_host(list(fmstream.stage(table, ids, window=100, device=here.name))), expected(table, ids, 100))
    assert fired


def test_a_task_that_is_cancelled_can_go_on_with_the_same_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    table, ids = table_of(900, 256), ids_of(900, 500)

    async def main() -> list[Tensor]:
        staged = fmstream.stage(table, ids, window=100, device=here.name)
        found = [await anext(staged)]
        task = asyncio.ensure_future(anext(staged))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [*found, *[window async for window in staged]]

    found = on_host(asyncio.run(main()))
    equal(found, expected(table, ids, 100)[: len(found)])
    here.check()


@pytest.mark.parametrize("taken", range(4))
def test_windows_may_be_left_at_any_point(taken: int) -> None:
    fresh("late")
    allocated = here.allocated()
    table, ids = table_of(900, 256), ids_of(900, 900)
    with fmstream.stage(table, ids, window=100, device=here.name) as staged:
        found = [next(staged) for _ in range(taken)]
    assert list(staged) == []
    if found:
        equal(on_host(found), expected(table, ids, 100)[:taken])
    del found, staged
    here.check()
    assert here.allocated() == allocated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(2, 2), [1]), "give an nn.Embedding"),
        ((torch.ones(3), [1]), "2-D table"),
        ((torch.ones(4, 4).T[::2], [1]), "without gaps"),
        ((torch.ones(4, 4), [1], 0), "window=0"),
        ((torch.ones(4, 4), [1], True), "window=True"),
        ((torch.ones(4, 4), torch.tensor(1)), "single number"),
        ((nn.Embedding(3, 3, max_norm=1.0), [1]), "max_norm"),
        ((torch.ones(4, 4, device="meta"), [1]), "on meta"),
        ((torch.ones(4, 4, dtype=torch.complex64).conj(), [1]), r"give table.resolve_conj\(\)"),
        ((torch._neg_view(torch.ones(4, 4)), [1]), r"resolve_neg\(\)"),
        ((torch.ones(4, 4).to_sparse(), [1]), "without gaps"),
        ((torch.ones(4, 4), 3), "ids is a single number"),
        ((torch.ones(4, 4), None), "ids is no tensor and no sequence of integers"),
        ((torch.ones(4, 4), ["a"]), "no sequence of integers"),
        ((torch.ones(4, 4), [[1, 2], [3]]), "no sequence of integers"),
        ((torch.ones(4, 4), torch.arange(3, device="meta")), "ids is a torch.strided tensor on meta"),
        ((torch.ones(4, 4), torch.arange(3).to_sparse()), "ids is a torch.sparse_coo tensor"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: Any, message: str) -> None:
    fresh()
    with pytest.raises(ConfigError, match=message):
        fmstream.stage(*arguments, device=here.name)


def test_bad_ids_are_refused_before_anything_moves() -> None:
    machine = fresh()
    table = table_of(10, 4)
    for bad in ([3, 10], [-1], [2**40]):
        with pytest.raises(IdsError, match="nothing was moved"):
            fmstream.stage(table, bad, device=here.name)
    with pytest.raises(RuntimeError, match="scalar types: Long, Int"):
        fmstream.stage(table, [0.5], device=here.name)
    assert machine.statistics().num_copies == 0
    assert machine.pinned.charged_bytes == 0


def test_budget_of_a_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least memory of a module is that of its layers and two rows, not that of its table."""
    monkeypatch.setattr(embeddings, "MIN_TABLE_BYTES", 1)
    assert budget(Alone(), 0.0) < 5000 * 48 * 4 / 10


@pytest.mark.parametrize("execution", ORDERS)
def test_windows_that_are_dropped_on_the_way_leave_no_copy_from_memory_that_is_gone(execution: Any) -> None:
    machine = fresh(execution)
    table = table_of(1000, 24).to(torch.float32)
    for rows in fmstream.stage(table, range(1000), 4, device=here.name):
        first = on_host(rows)[0]
        break
    del rows
    gc.collect()
    here.check()
    assert torch.equal(first, table[:4])
    assert machine.pinned.charged_bytes == 0


@pytest.mark.parametrize("where", ["emu", "cpu"])
def test_ids_that_the_caller_writes_meanwhile_are_not_those_of_later_windows(where: str) -> None:
    fresh("late")
    table, ids = table_of(5000, 96), ids_of(5000, 2, 1000)
    wanted = expected(table, ids, 200)
    found = []
    for rows in fmstream.stage(table, ids, window=200, device=where):
        found.extend(on_host(rows))
        ids.fill_(1 << 40)
    equal(found, wanted)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # from 2.13 on
def test_a_quantized_table_is_refused() -> None:
    table = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.quint8)
    with pytest.raises(ConfigError, match="quantized table of shape"):
        fmstream.stage(table, [1], device="cpu")


@pytest.mark.parametrize("where", ["emu", "cpu"])
def test_rows_of_no_width(where: str) -> None:
    fresh()
    found = list(fmstream.stage(torch.ones(9, 0), [[1, 2, 3]], window=2, device=where))
    assert [tuple(rows.shape) for rows in found] == [(1, 2, 0), (1, 1, 0)]
