"""A latent loop gives what the loop one after the other gives, whatever its stage does."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Iterator
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
from fmstream import ConfigError, LatentLoop, StageError
from fmstream.core.telemetry import Telemetry
from fmstream.payloads.trips import Turn
from tests.kit_latents import (
    Shuffled,
    failing_at,
    frames,
    in_place,
    no_threads,
    one_after_the_other,
    same,
    stage,
    step,
    writes_and_returns_nothing,
)
from tests.kit_runtime import Latch, leaves_nothing

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
