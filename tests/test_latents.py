"""A latent loop gives what the loop one after the other gives, whatever its stage does and whenever it ends."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmstream
from fmstream import CancelledRun, ClosedError, ConfigError, LatentLoop, StageError
from fmstream.actors.stages import StagePool
from fmstream.core.telemetry import Telemetry
from fmstream.device.ferry import CpuFerry
from fmstream.payloads.latent_run import LatentRun
from fmstream.payloads.trips import Turn
from tests.kit_latents import (
    Shuffled,
    frames,
    in_place,
    no_threads,
    one_after_the_other,
    same,
    stage,
    step,
    writes_and_returns_nothing,
)
from tests.kit_runtime import FailAt, Injected, Latch, leaves_nothing

__all__ = ["leaves_nothing"]


@given(st.integers(0, 2**32), st.integers(0, 7), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=40)
def test_any_order_of_ends_gives_the_sequential_results(seed: int, number: int, rounds: int, window: int) -> None:
    shuffled = Shuffled(seed)
    loop = LatentLoop(shuffled.step, shuffled.stage, window, num_threads=window)
    same(loop.run(frames(number), rounds), one_after_the_other(step, stage, frames(number), rounds))
    assert sorted(shuffled.ended) == sorted(Turn(i, r) for i in range(number) for r in range(rounds))


def test_calls_do_end_out_of_order() -> None:
    shuffled = Shuffled(3)
    same(
        LatentLoop(shuffled.step, shuffled.stage, 6, num_threads=6).run(frames(12)),
        one_after_the_other(step, stage, frames(12)),
    )
    assert shuffled.ended != sorted(shuffled.ended)


@pytest.mark.parametrize("window", [1, 2, 5, 64])
def test_one_thread_calls_the_stage_in_the_order_of_the_loop(window: int) -> None:
    calls: list[Turn] = []

    def remembering(frame: Tensor, turn: Turn) -> Tensor:
        calls.append(turn)
        return frame + len(calls)

    found = LatentLoop(step, remembering, window).run(frames(5), rounds=3)
    assert calls == [Turn(i, r) for r in range(3) for i in range(5)]
    calls.clear()
    same(found, one_after_the_other(step, remembering, frames(5), rounds=3))


@pytest.mark.parametrize("window", [1, 3, 8])
def test_no_more_items_than_the_window_are_under_way(window: int) -> None:
    seen: list[int] = []
    shuffled = Shuffled(1)

    def counting(frame: Tensor) -> Tensor:
        seen.append(run.num_under_way)
        return shuffled.step(frame)

    run = LatentLoop(counting, shuffled.stage, window, num_threads=8)(frames(20), rounds=2)
    same(list(run), one_after_the_other(step, stage, frames(20), rounds=2))
    assert max(seen) == window
    assert run.num_under_way == 0


def test_items_are_taken_as_they_are_needed() -> None:
    taken = []

    def source() -> Iterator[Tensor]:
        for number, frame in enumerate(frames(20)):
            taken.append(number)
            yield frame

    run = LatentLoop(step, stage, window=3)(source())
    next(run)
    next(run)
    assert len(taken) <= 5
    run.close()


@pytest.mark.parametrize("number", [0, 1])
def test_few_items(number: int) -> None:
    same(
        LatentLoop(step, stage).run(frames(number), rounds=3),
        one_after_the_other(step, stage, frames(number), rounds=3),
    )


def test_functions_of_one_parameter() -> None:
    found = LatentLoop(step, lambda frame, gain=0.5: frame * gain, window=2).run(frames(4))
    same(found, [step(frame) * 0.5 for frame in frames(4)])
    same(LatentLoop(torch.neg, torch.abs).run(frames(3)), [frame.neg().abs() for frame in frames(3)])


def test_both_functions_are_given_their_turn() -> None:
    found = LatentLoop(lambda frame, turn: frame + turn.round, lambda frame, turn: frame * turn.item).run(frames(3), 2)
    expected = []
    for index, frame in enumerate(frames(3)):
        for round in range(2):
            frame = (frame + round) * index
        expected.append(frame)
    same(found, expected)


def test_a_stage_that_returns_nothing_leaves_the_latents() -> None:
    seen: list[Tensor] = []
    same(
        LatentLoop(step, lambda frame: seen.append(frame.clone())).run(frames(5), 2),
        one_after_the_other(step, lambda *_: None, frames(5), 2),
    )
    assert len(seen) == 10


def test_a_stage_that_writes_in_place_returns_what_it_wrote() -> None:
    with pytest.raises(StageError, match=r"item 0: ConfigError: .* in place and returned None.*return the latents"):
        LatentLoop(step, writes_and_returns_nothing).run(frames(1))


@pytest.mark.parametrize("seen", [lambda z: z.conj(), lambda z: z.conj().imag])
def test_views_that_conjugate_or_negate(seen: Any) -> None:
    def complex_step(frame: Tensor) -> Tensor:
        return seen(torch.complex(frame, frame + 1))  # type: ignore[no-any-return]

    for host_stage in (lambda x: x * 2, lambda x: seen(torch.complex(x.real, x.real)), lambda _: None):
        expected = one_after_the_other(complex_step, lambda x, _, call=host_stage: call(x), frames(3))
        same(LatentLoop(complex_step, host_stage).run(frames(3)), expected)


def test_tensors_that_are_more_than_elements_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"step, for item 0, returned a tensor that is of layout torch.sparse_coo"):
        LatentLoop(lambda frame: frame.to_sparse(), stage).run(frames(2))
    with pytest.raises(StageError, match=r"host_stage returned a tensor that is of layout .*: return a dense one"):
        LatentLoop(step, lambda frame: frame.to_sparse()).run(frames(2))


def test_a_stage_may_change_shape_and_type() -> None:
    def shrink(frame: Tensor) -> Tensor:
        return frame[: len(frame) // 2].double()

    same(LatentLoop(step, shrink).run(frames(5)), [shrink(step(frame)) for frame in frames(5)])


def test_a_step_that_returns_its_own_buffer() -> None:
    buffer = torch.empty(4, 6)

    def reusing(frame: Tensor) -> Tensor:
        return buffer.copy_(step(frame))

    same(LatentLoop(reusing, in_place).run(frames(9), 2), one_after_the_other(step, in_place, frames(9), 2))
    part = torch.empty(8, 6)

    def reusing_a_part(frame: Tensor) -> Tensor:
        part[2:6] = step(frame)
        return part[2:6]

    same(LatentLoop(reusing_a_part, in_place).run(frames(9), 2), one_after_the_other(step, in_place, frames(9), 2))


@pytest.mark.parametrize("of_numpy", [False, True])
def test_a_stage_that_returns_its_own_buffer(of_numpy: bool) -> None:
    array = np.empty((4, 6), np.float32)
    buffer = torch.from_numpy(array) if of_numpy else torch.empty(4, 6)

    def reusing(frame: Tensor, turn: Turn) -> Tensor:
        buffer.copy_(stage(frame, turn))
        return torch.from_numpy(array) if of_numpy else buffer

    same(LatentLoop(step, reusing).run(frames(9), 2), one_after_the_other(step, stage, frames(9), 2))


def test_what_nobody_else_sees_is_not_copied() -> None:
    addresses: list[tuple[int, int]] = []

    def looking(frame: Tensor) -> Tensor:
        made = step(frame)
        addresses.append((made.data_ptr(), 0))
        return made

    def staged(frame: Tensor, turn: Turn) -> Tensor:
        addresses[turn.item] = (addresses[turn.item][0], frame.data_ptr())
        return frame

    found = LatentLoop(looking, staged).run(frames(6))
    assert all(left == right == result.data_ptr() for (left, right), result in zip(addresses, found, strict=True))


def test_the_users_items_are_left_alone() -> None:
    given, twins = frames(4), frames(4)
    LatentLoop(lambda frame: frame, in_place).run(given)
    same(given, twins)


def test_ten_thousand_items_without_growth() -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def counted(frame: Tensor) -> Tensor:
        nonlocal most
        made = frame + 1
        alive.add(made)
        most = max(most, len(alive))
        return made

    run = LatentLoop(counted, lambda frame: frame.mul_(2), window=4)(torch.full((8,), float(n)) for n in range(10_000))
    for number, result in enumerate(run):
        assert result[0] == (number + 1) * 2
    assert number == 9_999
    assert most <= 6


def test_modes_and_context_of_the_caller_hold_in_the_stage() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")
    name.set("caller")
    seen = []

    def looking(frame: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), name.get()))
        return frame + 1

    with torch.inference_mode():
        found = LatentLoop(step, looking).run(frames(2), 2)
        expected = [step(step(frame) + 1) + 1 for frame in frames(2)]
    same(found, expected)
    assert set(seen) == {(False, True, "caller")}


# Failures


def failing_at(turn: Turn, times: int = 1) -> Callable[[Tensor, Turn], Tensor]:
    """A stage that fails in one turn, some times, before it does anything."""
    left = [times]

    def maybe(frame: Tensor, now: Turn) -> Tensor:
        if now == turn and left[0]:
            left[0] -= 1
            raise ValueError("too dark")
        return stage(frame, now)

    return maybe


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


# Beside the loop


async def test_asynchronous_iteration() -> None:
    found = [result async for result in LatentLoop(step, stage, window=3)(frames(6), 2)]
    same(found, one_after_the_other(step, stage, frames(6), 2))
    assert await asyncio.to_thread(no_threads)


async def test_an_error_reaches_an_asynchronous_iteration() -> None:
    run = LatentLoop(step, failing_at(Turn(2, 0)))(frames(4))
    found: list[Tensor] = []

    async def collect() -> None:
        async for result in run:
            found.append(result)  # noqa: PERF401 - what came before an error counts

    with pytest.raises(StageError, match="item 2"):
        await collect()
    await collect()
    same(found, one_after_the_other(step, stage, frames(4)))
    assert await asyncio.to_thread(no_threads)


async def test_a_cancelled_task_stops_the_run_which_can_go_on() -> None:
    latch = Latch()

    def held(frame: Tensor, turn: Turn) -> Tensor:
        if turn.item == 2 and not latch.opened.is_set():
            latch.wait_here()
        return stage(frame, turn)

    run = LatentLoop(step, held, window=2)(frames(5))
    found: list[Tensor] = []

    async def collect() -> None:
        async for result in run:
            found.append(result)  # noqa: PERF401

    task = asyncio.create_task(collect())
    await asyncio.to_thread(latch.wait_reached)
    task.cancel()
    latch.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(no_threads)
    found.extend(run)
    same(found, one_after_the_other(step, stage, frames(5)))


async def test_an_asynchronous_iteration_that_is_left() -> None:
    run = LatentLoop(step, stage)(frames(9))
    results = aiter(run)
    await anext(results)
    await results.aclose()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(no_threads)
    assert len(list(run)) == 8


def test_calls_of_the_stage_are_in_the_timeline(tmp_path: Path) -> None:
    telemetry = Telemetry()
    LatentLoop(step, stage, telemetry=telemetry).run(frames(3), 2)
    assert [(span.lane, span.name) for span in telemetry.spans] == [
        ("host 0", f"item {item}, round {round}") for round in range(2) for item in range(3)
    ]
    assert all(span.start <= span.end and span.num_bytes == 96 for span in telemetry.spans)


def test_public_names() -> None:
    assert fmstream.LatentLoop is LatentLoop
    assert issubclass(StageError, fmstream.FmstreamError)
    assert partial(LatentLoop, step, stage)().window == 4
