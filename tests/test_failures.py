"""A failure at any point reaches the caller, and leaves everything as it was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fmstream
from fmstream.actors.prefetch import PrefetchActor
from fmstream.actors.scheduler import Scheduler
from fmstream.core.arena import Window
from fmstream.core.pages import PageTable
from fmstream.core.policy import registry
from fmstream.core.ring import Ring
from fmstream.device.device import CpuDevice
from fmstream.device.files import SourceFile, Staging
from fmstream.errors import StreamError
from fmstream.payloads.weights import Weights
from fmstream.report.progress import LiveProgress
from tests.kit_runtime import (
    Caller,
    FailAt,
    Gate,
    Injected,
    Twin,
    assert_clean,
    causes,
    check_pages,
    leaves_nothing,
    make_input,
    make_mlp,
    mapped_twin,
    mlp_twin,
    runtime_threads,
)

__all__ = ["leaves_nothing"]

PASSES = 3
MOST = 400
"""More calls than any scenario makes: whoever comes here does not end."""


def stream_some(twin: Twin, passes: int = PASSES, **options: Any) -> None:
    """One handle, some passes; the failure leaves through here."""
    with fmstream.stream(twin.module, memory=twin.memory, **options) as handle:
        try:
            for _ in range(passes):
                twin.check_call()
                check_pages(handle)
        except BaseException:
            check_pages(handle)
            raise


def fail_everywhere(
    twin: Twin,
    folder: Path,
    owner: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    make_error: Callable[[], BaseException] = Injected,
    scenario: Callable[[Twin], None] = stream_some,
    may_be_unused: bool = False,
) -> int:
    """Fail the first call, then the second, until the scenario ends before the n-th; returns n.

    ``may_be_unused`` is for work done ahead: its failure may go unnoticed, if every result was right without it.
    """
    twin.check_streams()
    for n in range(1, MOST):
        original = getattr(owner, name)
        fault = FailAt(original, n, make_error)
        caught: BaseException | None = None
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault.as_method())
            try:
                scenario(twin)
            except BaseException as error:  # whatever it is, it must have the injected one for its cause
                caught = error
        if not fault.fired:
            assert caught is None, f"without a fault: {caught!r}"
            return n
        assert caught is not None or may_be_unused, f"fault {n} was swallowed"
        if caught is not None:
            kinds = [type(error) for error in causes(caught)]
            assert type(make_error()) in kinds, f"fault {n}: {caught!r} has no trace of its cause"
        try:
            twin.check_restored()
            assert_clean(folder)
        except AssertionError as error:
            raise AssertionError(f"after fault {n}: {error}") from caught
        if n <= 8 or n % 5 == 0:
            twin.check_streams()
    raise AssertionError("the scenario never ended without a fault")


def test_a_read_that_fails_is_a_stream_error_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors", num_layers=4)
    causes_seen: list[BaseException | None] = []

    def scenario(twin: Twin) -> None:
        try:
            stream_some(twin)
        except StreamError as error:
            causes_seen.append(error.__cause__)
            raise

    made = fail_everywhere(
        twin, tmp_path, SourceFile, "read_into", monkeypatch, lambda: OSError("disk on fire"), scenario, True
    )
    assert made > 4
    assert causes_seen
    assert all(isinstance(cause, OSError) for cause in causes_seen)


def test_an_allocation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mlp_twin(4)
    made = fail_everywhere(twin, tmp_path, CpuDevice, "slab", monkeypatch, lambda: MemoryError("no memory"))
    assert made > 1


@pytest.mark.parametrize("name", ["bind", "unbind", "pieces", "install", "survey"])
def test_the_payload_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fail_everywhere(mlp_twin(4), tmp_path, Weights, name, monkeypatch) > 1


def test_a_completion_that_cannot_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fail_everywhere(mlp_twin(4), tmp_path, Ring, "pop", monkeypatch) > 1


@pytest.mark.parametrize("owner", [Staging, threading.Thread], ids=["staging", "thread"])
def test_workers_that_cannot_start(owner: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors", 4)
    name = "__init__" if owner is Staging else "start"
    made = fail_everywhere(twin, tmp_path, owner, name, monkeypatch, lambda: RuntimeError("no more of them"))
    assert made > 1


QUEUE = [
    (Ring, "pop_many"),
    (Ring, "push"),
    (PrefetchActor, "prepare"),
    (PrefetchActor, "submit"),
    (PrefetchActor, "cancel"),
    (Window, "reserve"),
    (Window, "release"),
    (PageTable, "load"),
    (PageTable, "ready"),
    (PageTable, "pin"),
    (PageTable, "unpin"),
    (PageTable, "evict"),
]


@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [*((*case, "file") for case in QUEUE), (Ring, "push", "memory"), (PrefetchActor, "submit", "memory")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_operation_on_queue_window_or_pages_fails(
    owner: type, name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = mlp_twin(3) if place == "memory" else mapped_twin(tmp_path / "w.safetensors", 3)
    fail_everywhere(twin, tmp_path, owner, name, monkeypatch)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_worker_that_dies_is_a_stream_error_and_no_hang(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors", 4)  # small copies within memory are no worker's affair
    with monkeypatch.context() as patch:
        patch.setattr(Ring, "push", FailAt(Ring.push, n).as_method())
        handle = fmstream.stream(twin.module, memory=twin.memory, policy="sync")
        caller = Caller(lambda: [twin.check_call() for _ in range(PASSES)])
        caller.join(10.0)
        hangs = caller.is_alive()
        handle.cancel()  # so that a run that hangs ends as well
        caller.join(20.0)
        handle.close()
    assert not hangs
    assert isinstance(caller.error, StreamError)
    assert any(isinstance(error, Injected) for error in causes(caller.error))
    twin.check_restored()


@pytest.mark.parametrize("kind", ["pre_hook", "hook", "global_hook"])
def test_a_hook_of_the_user_fails(kind: str, tmp_path: Path) -> None:
    twin = mlp_twin(4)
    for n in range(1, MOST):
        fault = FailAt(lambda *args: None, n)
        if kind == "pre_hook":
            handles = [m.register_forward_pre_hook(fault) for m in twin.module]  # type: ignore[attr-defined]
        elif kind == "hook":
            handles = [m.register_forward_hook(fault) for m in (*twin.module, twin.module)]  # type: ignore[misc]
        else:
            handles = [torch.nn.modules.module.register_module_forward_hook(fault)]
        try:
            stream_some(twin)
        except Injected:
            assert fault.fired
        else:
            assert not fault.fired
            return
        finally:
            for handle in handles:
                handle.remove()
        twin.check_restored()
    raise AssertionError("the scenario never ended without a fault")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "kind", [Injected, KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit, StopIteration]
)
def test_a_forward_that_raises_leaves_the_same_handle_usable(kind: type[BaseException], grad: bool) -> None:
    fault = FailAt(lambda: None, 0, kind)
    gates = [Gate(fault) for _ in range(4)]
    mlp = make_mlp(4)
    steps = (step for pair in zip(mlp[::2], gates, strict=True) for step in pair)
    twin = Twin(torch.nn.Sequential(*steps), make_input())
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        for n in range(1, 4 * PASSES + 1):
            fault.count, fault.n = 0, n
            with pytest.raises(kind), torch.set_grad_enabled(grad):  # noqa: PT012 (which pass fails depends on n)
                for _ in range(PASSES):
                    twin.module(twin.x)
            check_pages(handle)
            assert fault.fired
            twin.check_call()
    twin.check_restored()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interrupt_in_the_midst_of_showing_a_weight(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fail_everywhere(mlp_twin(3), tmp_path, Weights, "bind", monkeypatch, kind) > 1


@pytest.mark.parametrize("name", ["bind", "unbind", "pieces"])
def test_the_handle_goes_on_after_the_payload_failed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mlp_twin(4)
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        for n in range(1, MOST):
            fault = FailAt(getattr(Weights, name), n)
            with monkeypatch.context() as patch:
                patch.setattr(Weights, name, fault.as_method())
                try:
                    for _ in range(PASSES):
                        twin.check_call()
                except Injected:
                    assert fault.fired
            check_pages(handle)
            twin.check_call()
            if not fault.fired:
                break
        assert fault.n > 1
    twin.check_restored()


def test_a_policy_that_raises_reaches_the_caller_and_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trace: Any, limits: Any, costs: Any) -> Any:
        raise Injected("no plan today")

    monkeypatch.setitem(registry, "broken", broken)
    twin = mlp_twin()
    with pytest.raises(Exception, match="no plan today") as caught:
        stream_some(twin, policy="broken")
    assert any(isinstance(error, Injected) for error in causes(caught.value))
    twin.check_restored()
    twin.check_streams()


def test_a_policy_that_fails_later_leaves_the_module_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = registry["overlap_async"]
    for n in range(1, 4):
        fault = FailAt(plan, n)
        monkeypatch.setitem(registry, "overlap_async", fault)
        twin = mlp_twin()
        with pytest.raises(Injected) as caught:
            stream_some(twin, passes=500)  # better plans are taken when they are there
        assert fault.fired
        assert isinstance(caught.value, Injected)
        twin.check_restored()


def test_a_failed_policy_is_told_once_and_the_handle_streams_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = registry["overlap_async"]
    fault = FailAt(plan, 1)
    monkeypatch.setitem(registry, "overlap_async", fault)
    twin = mlp_twin()
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        twin.check_call()
        with pytest.raises(Injected):
            twin.check_call()
        for _ in range(PASSES):
            twin.check_call()
        check_pages(handle)
    twin.check_restored()


def test_a_scheduler_that_fails_is_a_stream_error_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mlp_twin()
    with monkeypatch.context() as patch:

        def fail(scheduler: Scheduler) -> None:
            raise Injected("the clock stopped")

        patch.setattr(Scheduler, "_look", fail)
        with fmstream.stream(twin.module, memory=twin.memory):
            for thread in runtime_threads():
                if thread.name == "fmstream scheduler":
                    thread.join(30)
            with pytest.raises(StreamError, match="the clock stopped") as caught:
                twin.check_call()
            assert isinstance(caught.value.__cause__, Injected)
            twin.check_restored()
    twin.check_restored()
    twin.check_streams()


def test_a_scheduler_that_dies_between_passes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mlp_twin()
    look = Scheduler._look
    for n in range(2, 4):
        fault = FailAt(look, n)
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "_look", fault.as_method())
            with fmstream.stream(twin.module, memory=twin.memory):
                twin.check_call()
                for thread in runtime_threads():
                    if thread.name == "fmstream scheduler":
                        thread.join(30)
                with pytest.raises(StreamError):
                    twin.check_call()
        twin.check_restored()


@pytest.mark.parametrize("name", ["open", "update", "close"])
def test_a_display_that_raises_does_not_touch_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(display: LiveProgress, *args: Any) -> None:
        raise Injected("no terminal")

    monkeypatch.setattr(LiveProgress, name, fail)
    twin = mlp_twin()
    with fmstream.stream(twin.module, memory=twin.memory, progress=True) as handle:
        for _ in range(PASSES):
            twin.check_call()
    twin.check_restored()
    assert any("no terminal" in note for note in handle.report.notes)


def test_opening_fails_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mlp_twin()

    def fail(scheduler: Scheduler) -> None:
        raise Injected

    monkeypatch.setattr(Scheduler, "start", fail)
    with pytest.raises(Injected):
        fmstream.stream(twin.module, memory=twin.memory)
    twin.check_restored()


def test_a_failure_with_weights_in_files_closes_every_file(tmp_path: Path) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors")
    fault = FailAt(lambda *args: None, 9)
    hooks = [m.register_forward_pre_hook(fault) for m in twin.module]  # type: ignore[attr-defined]
    with pytest.raises(Injected):
        stream_some(twin)
    for hook in hooks:
        hook.remove()
    assert_clean(tmp_path)
    twin.check_restored()
    twin.check_streams()


def test_a_fault_that_cannot_be_read_is_an_error_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    twin = mapped_twin(path)
    with fmstream.stream(twin.module, memory=twin.memory):
        twin.check_call()

        def fail(file: SourceFile, *args: Any) -> None:
            raise OSError(f"{file.path}: disk on fire")

        with monkeypatch.context() as patch:
            patch.setattr(SourceFile, "read_into", fail)
            with pytest.raises((OSError, StreamError), match="disk on fire"):
                twin.module[0].weight.sum()  # type: ignore[index, union-attr]
        assert torch.equal(twin.module[0].weight + 0, twin.copy[0].weight)  # type: ignore[index]
    twin.check_restored()
