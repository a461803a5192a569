"""A latent loop that fails, is interrupted or cancelled leaves nothing behind, and can go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from fmstream import CancelledRun, ClosedError, ConfigError, LatentLoop, StageError
from fmstream.actors.stages import StagePool
from fmstream.device.ferry import CpuFerry
from fmstream.payloads.latent_run import LatentRun
from fmstream.payloads.trips import Turn
from tests.kit_latents import failing_at, frames, no_threads, one_after_the_other, same, stage, step
from tests.kit_runtime import FailAt, Injected, Latch, leaves_nothing

__all__ = ["leaves_nothing"]


# Failures


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 6])
@pytest.mark.parametrize("item", [0, 3, 7])
def test_a_failing_stage_names_its_item_and_the_run_goes_on(item: int, window: int, num_threads: int) -> None:
    expected = one_after_the_other(step, stage, frames(8), 2)
    loop = LatentLoop(step, failing_at(Turn(item, 1), times=2), window, num_threads=num_threads)
    with pytest.raises(StageError, match=f"item {item} in round 1: ValueError: too dark") as raised:
        loop.run(frames(8), 2)
    error = raised.value
    assert (error.index, error.round) == (item, 1)
    assert isinstance(error.__cause__, ValueError)
    assert no_threads()
    same(error.finished, expected[:item])
    with pytest.raises(StageError, match=f"item {item}"):
        next(error.run)
    assert no_threads()
    same([*error.finished, *error.run], expected)


def test_latents_that_came_back_can_be_had() -> None:
    run = LatentLoop(step, failing_at(Turn(0, 1)), window=2)(frames(4), 2)
    with pytest.raises(StageError):
        list(run)
    first = one_after_the_other(step, stage, frames(4))
    assert sorted(run.latents) == [2, 3]
    same([run.latents[2], run.latents[3]], first[2:])
    run.close()
    assert not run.latents


def test_a_replaced_result() -> None:
    instead = torch.zeros(4, 6)
    run = LatentLoop(step, failing_at(Turn(1, 0), times=9), window=3)(frames(4))
    found = [next(run)]
    with pytest.raises(StageError):
        next(run)
    run.replace(instead)
    expected = one_after_the_other(step, stage, frames(4))
    same([*found, *run], [expected[0], instead, *expected[2:]])
    run = LatentLoop(step, failing_at(Turn(0, 0), times=9))(frames(1))
    with pytest.raises(StageError):
        next(run)
    run.replace(None)
    same(list(run), [step(frames(1)[0])])
    with pytest.raises(ConfigError, match="no item waits"):
        run.replace(instead)


def test_a_failing_step_can_be_tried_again() -> None:
    failing = FailAt(step, 3)
    run = LatentLoop(lambda frame: failing(frame), stage, window=2)(frames(5))
    found: list[Tensor] = []
    with pytest.raises(Injected):
        found.extend(run)
    assert no_threads()
    same([*found, *run], one_after_the_other(step, stage, frames(5)))


def test_the_end_of_an_iterator_in_a_step_is_no_end_of_the_run() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        LatentLoop(lambda frame: next(iter(())), stage).run(frames(2))


@pytest.mark.parametrize(
    ("result", "message"), [(3, "host_stage returned int"), (torch.empty(2, device="meta"), "tensor on meta")]
)
def test_what_a_stage_cannot_return(result: Any, message: str) -> None:
    with pytest.raises(StageError, match=message) as raised:
        LatentLoop(step, lambda frame: result).run(frames(2))
    assert isinstance(raised.value.__cause__, ConfigError)


def test_what_a_step_cannot_return() -> None:
    with pytest.raises(ConfigError, match="step returned NoneType for item 0"):
        LatentLoop(lambda frame: None, stage).run(frames(2))
    weight = torch.ones(6, requires_grad=True)
    with pytest.raises(ConfigError, match=r"no_grad\(\)"):
        LatentLoop(lambda frame: frame * weight, stage).run(frames(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 2.0}, "window=2.0"),
        ({"num_threads": 65}, "from 1 to 64"),
        ({"num_threads": True}, "num_threads=True"),
        ({"step": 3}, "step=3 cannot be called"),
        ({"host_stage": None}, "host_stage=None cannot be called"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LatentLoop(**{"step": step, "host_stage": stage} | options)


def test_rounds_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="rounds=0"):
        LatentLoop(step, stage).run(frames(2), rounds=0)


# Stopping


POINTS = [
    (LatentRun, "_top_up"),
    (LatentRun, "_begin"),
    (LatentRun, "_send"),
    (LatentRun, "_file"),
    (LatentRun, "_wait"),
    (LatentRun, "_end"),
    (CpuFerry, "leave"),
    (CpuFerry, "land"),
    (CpuFerry, "embark"),
    (CpuFerry, "arrive"),
    (StagePool, "submit"),
    (StagePool, "_start"),
]


@pytest.mark.parametrize("number", [1, 2, 5, 9])
@pytest.mark.parametrize(("owner", "name"), POINTS, ids=lambda value: getattr(value, "__name__", value))
def test_an_interrupt_anywhere_leaves_nothing_and_the_run_goes_on(
    owner: type, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = FailAt(getattr(owner, name), number, KeyboardInterrupt)
    monkeypatch.setattr(owner, name, point.as_method())
    run = LatentLoop(step, stage, window=3)(frames(5), 2)
    found: list[Tensor] = []
    try:
        found.extend(run)
    except KeyboardInterrupt:
        assert point.fired
    monkeypatch.undo()
    assert no_threads()
    found.extend(run)
    same(found, one_after_the_other(step, stage, frames(5), 2))


@pytest.mark.parametrize("number", range(1, 11))
@pytest.mark.parametrize("where", ["step", "stage"])
def test_a_run_is_cancelled_at_its_next_step_or_wait(where: str, number: int) -> None:
    count = [0]

    def maybe(name: str) -> None:
        count[0] += name == where
        if name == where and count[0] == number:
            run.cancel("enough")

    def stepped(frame: Tensor) -> Tensor:
        maybe("step")
        return step(frame)

    def staged(frame: Tensor, turn: Turn) -> Tensor:
        maybe("stage")
        return stage(frame, turn)

    run = LatentLoop(stepped, staged, window=2)(frames(5), 2)
    found: list[Tensor] = []
    cancelled = 0
    while len(found) < 5:
        try:
            found.append(next(run))
        except CancelledRun:
            assert no_threads()
            cancelled += 1
    assert cancelled <= 1
    assert cancelled == 1 or number == 10 or where == "stage"
    same(found, one_after_the_other(step, stage, frames(5), 2))
    run.close()


def test_a_stage_that_hangs_is_left_behind() -> None:
    latch = Latch()

    def hanging(frame: Tensor, turn: Turn) -> Tensor:
        if not latch.opened.is_set():
            latch.wait_here()
        return stage(frame, turn)

    run = LatentLoop(step, hanging, window=2)(frames(3))
    canceller = threading.Thread(target=lambda: (latch.wait_reached(), run.cancel()))
    canceller.start()
    with pytest.raises(CancelledRun):
        next(run)
    canceller.join()
    latch.open()
    assert no_threads()
    same(list(run), one_after_the_other(step, stage, frames(3)))


def test_a_run_that_is_dropped_leaves_nothing() -> None:
    run = LatentLoop(step, stage, window=4)(frames(9))
    next(run)
    del run
    assert no_threads()


def test_a_closed_run() -> None:
    run = LatentLoop(step, stage)(frames(9))
    next(run)
    run.close()
    run.close()
    assert no_threads()
    with pytest.raises(ClosedError):
        next(run)


def test_an_ended_run_stays_ended() -> None:
    run = LatentLoop(step, stage)(frames(2), 2)
    assert len(list(run)) == 2
    assert list(run) == []


def test_a_loop_that_is_kept_open_keeps_its_threads() -> None:
    threads = set()

    def looking(frame: Tensor) -> None:
        threads.add(threading.get_ident())

    with LatentLoop(step, looking) as loop:
        for _ in range(3):
            loop.run(frames(3))
    assert len(threads) == 1
    assert no_threads()
