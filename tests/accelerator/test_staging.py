"""Weights that are not pinned come through staging: in any order of reads, and when a read fails or blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fmstream
from bench.scenarios import watched_reads
from fmstream.actors import uploads
from fmstream.device.files import SourceFile
from fmstream.emulator.backlog import Execution
from fmstream.errors import CancelledRun, StreamError
from fmstream.payloads import session
from tests.accelerator.cases import WIDTH, call, x
from tests.accelerator.kit import Left, equal, fresh, here, on_host, stream_and_compare, streaming, twin_on
from tests.kit import budget, mlp
from tests.kit_order import MODES, OrderedActor
from tests.kit_runtime import Caller, FailAt, Injected, Latch, assert_all_in_files, causes, map_weights

Source = Callable[[Path], tuple[nn.Module, dict[str, Any]]]


def in_ram(_folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Masters in pageable RAM."""
    return mlp(8, WIDTH), {"pinned": 0}


def in_files(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Masters in a safetensors file."""
    return map_weights(mlp(8, WIDTH), folder / "w.safetensors"), {"pinned": 0}


def spilled(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Masters in a file that the runtime writes."""
    return mlp(8, WIDTH), {"spill_dir": folder}


def partly_pinned(_folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Some masters in pinned memory."""
    return mlp(8, WIDTH), {"pinned": "64KiB"}


SOURCES: tuple[Source, ...] = (in_ram, in_files, spilled, partly_pinned)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for each run, and little staging."""
    monkeypatch.setattr(uploads, "CHUNK_BYTES", 8192)
    monkeypatch.setattr(uploads, "STAGING_BYTES", 24576)


@pytest.mark.parametrize("execution", ["eager", "late", 1, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_outputs_equal_the_twins(source: Source, execution: Execution, tmp_path: Path) -> None:
    module, options = source(tmp_path)
    fresh(execution)
    with watched_reads():
        stream_and_compare(module, call, 6, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_reads_may_end_in_any_order(
    source: Source, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: None
) -> None:
    class Actor(OrderedActor):
        pass

    Actor.mode = mode
    monkeypatch.setattr(session, "PrefetchActor", Actor)
    for number, fraction in enumerate((0.0, 0.4, 0.8)):
        folder = tmp_path / str(number)
        folder.mkdir()
        module, options = source(folder)
        fresh(("eager", "late", 3)[number])
        stream_and_compare(module, call, 5, fraction, **options)


def test_files_are_pinned_where_there_is_leave_and_mapped_again(tmp_path: Path) -> None:
    machine = fresh()
    module, _ = in_files(tmp_path)
    with torch.no_grad(), streaming(module):
        call(module, 0)
        assert all(param.is_pinned() for param in plain_parameters(module))
        assert machine.pinned.charged_bytes > 0
    with streaming(module, pinned=0, idle=True) as handle:
        assert_all_in_files(handle)


def plain_parameters(module: nn.Module) -> list[torch.Tensor]:
    """The user's own parameters while they stream."""
    return [param.master.original for param in module.parameters()]  # type: ignore[attr-defined]


def test_an_edited_parameter_is_not_mapped_again(tmp_path: Path) -> None:
    fresh()
    module, _ = in_files(tmp_path)
    with torch.no_grad(), streaming(module):
        call(module, 0)
        module[4].weight[0] = 0.25
        call(module, 1)
    assert (module[4].weight[0] == 0.25).all()


@pytest.mark.parametrize("n", [1, 3, 8, 20])
def test_a_read_that_fails_leaves_everything_as_it_was(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: None
) -> None:
    fresh()
    module, options = in_files(tmp_path)
    before, reference = Left(module), copy.deepcopy(module).state_dict()
    read = FailAt(SourceFile.read_into, n, lambda: OSError("the disk is gone"))
    monkeypatch.setattr(SourceFile, "read_into", read.as_method())
    handle = fmstream.stream(module, memory=budget(module), device=here.name, **options)
    with pytest.raises(StreamError, match="the disk is gone") as caught:
        call_often(module)
    assert any(isinstance(error, OSError) for error in causes(caught.value))
    before.check(module)
    handle.close()
    here.check()
    equal(list(module.state_dict().values()), list(reference.values()))
    stream_and_compare(module, call, **options)


@torch.no_grad()
def call_often(module: nn.Module) -> None:
    """Twenty calls."""
    for number in range(20):
        call(module, number)


class Holding:
    """Lets the n-th read wait for a latch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
        self.latch, self.count, self.read = Latch(), 0, SourceFile.read_into
        monkeypatch.setattr(SourceFile, "read_into", lambda *args: self(n, *args))

    def __call__(self, n: int, *args: Any) -> Any:
        self.count += 1
        if self.count == n:
            self.latch.wait_here()
        return self.read(*args)


def test_a_blocked_read_does_not_hold_up_a_cancellation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    module, options = in_files(tmp_path)
    before = Left(module)
    holding = Holding(monkeypatch, 6)
    handle = fmstream.stream(module, memory=budget(module), device=here.name, **options)
    caller = Caller(call, module, 0)
    holding.latch.wait_reached()
    handle.cancel("enough")
    with pytest.raises(CancelledRun, match="enough"):
        caller.finish()
    handle.close()
    before.check(module)
    here.check()
    holding.latch.open()


def test_a_handle_goes_on_beside_a_read_that_stays_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: None
) -> None:
    fresh()
    module, options = in_files(tmp_path)
    twin = twin_on(module)
    with torch.no_grad(), streaming(module, 0.6, keeps=True, **options):
        for number in range(3):
            equal(on_host(call(module, number)), on_host(call(twin, number)))
        holding = Holding(monkeypatch, 1)

        def fail(*_args: Any) -> None:
            if holding.latch.reached.is_set():
                raise Injected

        hooks = [layer.register_forward_pre_hook(fail) for layer in module[1::2]]
        caller = Caller(module, x(3, WIDTH))
        holding.latch.wait_reached()
        caller.join(0.2)
        if caller.is_alive():  # it waits for that very read
            holding.latch.open()
            caller.join()
        else:
            assert isinstance(caller.error, Injected)
        for hook in hooks:
            hook.remove()
        for number in range(3):
            equal(on_host(call(module, number)), on_host(call(twin, number)))
        holding.latch.open()


def test_writes_through_an_array_over_a_parameter_in_a_file_are_seen(tmp_path: Path) -> None:
    fresh()
    module, _ = in_files(tmp_path)
    twin = twin_on(module)
    array = module[4].weight.detach().numpy()
    with torch.no_grad(), streaming(module):
        call(module, 0)
        array[0] = 0.5
        twin[4].weight[0] = 0.5
        equal(on_host(call(module, 1)), on_host(call(twin, 1)))
    assert (module[4].weight[0] == 0.5).all()
