"""Whatever ends a pass that reads rows of tables: modules are as they were, and all memory is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fmstream
from fmstream.actors.gathers import Gathers
from fmstream.actors.rows import DeviceRing, Rows
from fmstream.actors.staging import StagingRing
from fmstream.device.accelerator import Accelerator
from fmstream.errors import CancelledRun
from fmstream.payloads.embeddings import Tables
from tests.accelerator.kit import Left, equal, fresh, here, on_host, run_until_interrupted, twin_on
from tests.accelerator.test_tables import (
    Alone,
    Reader,
    ids_of,
    read,
    stream_and_compare,
    streaming,
    tiny_tables,
)
from tests.kit import budget
from tests.kit_runtime import Caller, FailAt, Injected, Latch

__all__ = ["tiny_tables"]

POINTS: dict[str, tuple[Any, str]] = {
    "look up": (Tables, "_bring"),
    "ids": (Tables, "_number"),
    "ahead": (Tables, "_begin_ahead"),
    "end of a pass": (Tables, "end_pass"),
    "begin": (Rows, "begin"),
    "few rows": (Rows, "bring_now"),
    "copy": (Rows, "_copy"),
    "bring on": (Rows, "_bring_on"),
    "select": (Rows, "select"),
    "follow": (Rows, "_follow"),
    "reset": (Rows, "reset"),
    "take a place": (DeviceRing, "take"),
    "leave a place": (DeviceRing, "leave"),
    "drop the ring": (DeviceRing, "drop"),
    "take staging": (StagingRing, "take"),
    "leave staging": (StagingRing, "leave"),
    "gather": (Gathers, "begin"),
    "look at a gather": (Gathers, "is_done"),
    "wait for a gather": (Gathers, "wait"),
    "stop the gathers": (Gathers, "close"),
    "mark": (Accelerator, "mark"),
    "wait": (Accelerator, "wait"),
}
"""Functions of the way of rows, each of which a Ctrl-C may come just before."""


@pytest.mark.parametrize("point", POINTS)
def test_an_interrupt_leaves_everything_as_it_was(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fired = 0
    owner, name = POINTS[point]
    for n in (1, 2, 6, 15):
        fresh()
        module = Reader()
        before, values = Left(module), [p.detach().clone() for p in module.parameters()]
        allocated = here.allocated()
        fail = FailAt(getattr(owner, name), n, KeyboardInterrupt)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail.as_method())
            if point in ("bring on", "wait for a gather"):
                patch.setattr(Gathers, "is_done", lambda self, ticket: False)  # so that each is waited for
            run_until_interrupted(module, read_some, 0.5, prefetch_window=16)
        fired += fail.fired
        before.check(module)
        here.check()
        assert here.allocated() == allocated
        equal(list(module.parameters()), values)
        stream_and_compare(module, read, 3, 0.5, prefetch_window=16)
    assert fired


def read_some(module: nn.Module, number: int) -> None:
    """Look up many rows, then a single one."""
    read(module, number)
    module(ids_of(number, 1, 1))


@pytest.mark.parametrize("at", range(4))
def test_a_handle_works_on_after_an_exception_in_a_forward(at: int) -> None:
    fresh("late")
    module = Reader()
    twin = twin_on(module)

    def fail(*_: Any) -> None:
        raise Injected

    with torch.no_grad(), streaming(module, 0.5, prefetch_window=16):
        for number in range(3):
            equal(on_host(read(module, number)), on_host(read(twin, number)))
            hook = module.layers[at].register_forward_pre_hook(fail)
            with pytest.raises(Injected):
                read(module, number)
            hook.remove()
        equal(on_host(read(module, 7)), on_host(read(twin, 7)))


def test_a_gather_that_is_late_does_not_hold_up_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    module = Alone()
    before = Left(module)
    latch = Latch()

    def waiting(self: Gathers, ticket: Any, check_stop: Callable[[], None]) -> None:
        latch.reached.set()
        while True:
            check_stop()

    monkeypatch.setattr(Gathers, "wait", waiting)
    monkeypatch.setattr(Gathers, "is_done", lambda self, ticket: False)
    handle = fmstream.stream(module, memory=budget(module, 0.2), device=here.name)
    caller = Caller(module, ids_of(0, 100))
    latch.wait_reached()
    handle.cancel("enough")
    with pytest.raises(CancelledRun, match="enough"):
        caller.finish()
    handle.close()
    before.check(module)
    here.check()


class Held:
    """Gathers that end only when they are stopped."""

    inline_bytes = 0

    def __init__(self) -> None:
        self.running: list[object] = []

    def begin(self, *_: Any) -> object:
        self.running.append(object())
        return self.running[-1]

    def is_done(self, ticket: object) -> bool:
        return ticket not in self.running

    def wait(self, ticket: object, check_stop: Callable[[], None]) -> None:
        check_stop()

    def stop(self, ticket: object) -> bool:
        self.running.remove(ticket)
        return True


def test_no_gather_reads_a_table_after_settling_though_the_run_was_cancelled() -> None:
    fresh()

    def stop() -> None:
        raise CancelledRun("enough")

    gathers: Any = Held()
    rows = Rows(Accelerator(torch.device(here.name)), gathers, stop, 1 << 20)
    for number in range(3):
        rows.begin(torch.ones(64, 8), np.array([number, number + 1]))
    assert len(gathers.running) == 3
    rows.settle()
    assert not gathers.running
