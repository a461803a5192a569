"""Latent loops on the emulated device: the sequential results in every order of execution, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmstream
from fmstream import CancelledRun, LatentLoop, StageError, emulator
from fmstream.actors.stages import StagePool
from fmstream.device.ferry import DeviceFerry
from fmstream.emulator.backlog import Execution
from fmstream.payloads.latent_run import LatentRun
from fmstream.payloads.trips import Turn
from tests.accelerator.conftest import leaves_nothing
from tests.accelerator.kit import ORDERS, fresh, here
from tests.clients.client import noise
from tests.clients.pipelines import stable_video_diffusion
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
from tests.kit_runtime import FailAt

__all__ = ["leaves_nothing"]

FRAME_BYTES = 4096
"""Pinned for a frame: a memory page."""


def guarded(frame: Tensor, turn: Turn) -> Tensor:
    """A stage whose reads and writes of pinned memory the checker sees."""
    with emulator.host_guard():
        return in_place(frame, turn)


def settled() -> None:
    """Nothing is pinned, no thread is left, no race was seen."""
    assert no_threads()
    here.check()


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("staged", [stage, guarded, lambda frame: None])
def test_results_are_the_sequential_ones(execution: Execution, window: int, staged: Any) -> None:
    fresh(execution)
    inner = staged if staged in (stage, guarded) else lambda frame, _: None
    expected = one_after_the_other(step, inner, frames(6, "emu"), 3)
    found = LatentLoop(step, staged, window).run(frames(6, "emu"), 3)
    settled()
    same(found, expected)


@given(st.sampled_from(ORDERS), st.integers(0, 2**32), st.integers(0, 6), st.integers(1, 3), st.integers(1, 5))
@settings(max_examples=25)
def test_any_order_of_ends(execution: Execution, seed: int, number: int, rounds: int, window: int) -> None:
    fresh(execution)
    shuffled = Shuffled(seed, guarded)
    found = LatentLoop(shuffled.step, shuffled.stage, window, num_threads=window).run(frames(number, "emu"), rounds)
    settled()
    same(found, one_after_the_other(step, in_place, frames(number, "emu"), rounds))


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 900), st.sampled_from(DTYPES)), max_size=8))
@settings(max_examples=25)
def test_items_of_any_shape_and_type(shapes: list[tuple[int, int, torch.dtype]]) -> None:
    fresh()
    given_items = [torch.arange(a * b).reshape(a, b).to(dtype).to("emu") for a, b, dtype in shapes]
    found = LatentLoop(lambda x: x.clone(), lambda x: x.flip(0), window=2).run(given_items)
    settled()
    same(found, [item.flip(0) for item in given_items])


def test_latents_that_do_not_lie_in_one_piece() -> None:
    fresh()
    for view in (lambda x: x[:, ::2], lambda x: x.t(), lambda x: x.unsqueeze(0).expand(3, -1, -1)):
        strides = []
        found = LatentLoop(lambda x, v=view: v(x), lambda x, s=strides: s.append(x.stride()) or x + 1).run(
            frames(3, "emu")
        )
        same([x.contiguous() for x in found], [view(x).add(1).contiguous() for x in frames(3, "emu")])
        assert len(strides) == 3
    settled()


def test_results_that_do_not_fit_what_left() -> None:
    fresh("late")
    for change in (lambda x: x[:2], lambda x: x.double(), lambda x: x.repeat(50, 1), lambda x: x[0, 0]):
        found = LatentLoop(step, change, window=2).run(frames(5, "emu"))
        same(found, [change(step(frame)) for frame in frames(5, "emu")])
    settled()


def test_parts_of_what_the_stage_was_given() -> None:
    fresh("late")
    for change in (lambda x: x.flip(0), lambda x: x.view(6, 4).t(), lambda x: x.roll(1, 0), lambda x: x.view(4, 6)):
        found = LatentLoop(step, change, window=2).run(frames(5, "emu"))
        same(found, [change(step(frame)) for frame in frames(5, "emu")])
    settled()


def test_a_stage_may_keep_what_it_was_given() -> None:
    fresh()
    kept: list[Tensor] = []
    LatentLoop(step, lambda frame: kept.append(frame), window=2).run(frames(8, "emu"))
    settled()
    same(kept, [step(frame) for frame in frames(8)])
    arrays = []
    LatentLoop(step, lambda frame: arrays.append(frame.numpy()), window=2).run(frames(8, "emu"))
    same([torch.from_numpy(array) for array in arrays], [step(frame) for frame in frames(8)])


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("window", [1, 3])
def test_what_a_stage_keeps_is_not_written_by_later_copies(execution: Execution, window: int) -> None:
    fresh(execution)

    def smoothed(states: list[Tensor]) -> Any:
        def difference(frame: Tensor, _: Turn) -> Tensor:
            states.append(frame)
            return frame - 0.5 * states[-2] if len(states) > 1 else frame * 1

        return difference

    expected = one_after_the_other(step, smoothed([]), frames(6, "emu"), 2)
    same(LatentLoop(step, smoothed([]), window).run(frames(6, "emu"), 2), expected)
    settled()


class Averaging:
    """A stage that goes on writing to what it was first given, and returned."""

    def __init__(self, result: Any) -> None:
        self.state: Tensor | None = None
        self.result = result

    def __call__(self, frame: Tensor, _: Turn) -> Tensor:
        if self.state is None:
            self.state = frame
        else:
            with emulator.host_guard():
                self.state.mul_(0.5).add_(frame)
        return self.result(self.state)  # type: ignore[no-any-return]


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("result", [lambda x: x, lambda x: x.view(x.shape)])
def test_a_stage_that_writes_again_what_it_returned(execution: Execution, result: Any) -> None:
    fresh(execution)
    expected = one_after_the_other(step, Averaging(result), frames(6, "emu"))
    same(LatentLoop(step, Averaging(result), 3).run(frames(6, "emu")), expected)
    settled()


def test_a_stage_that_writes_in_place_returns_what_it_wrote() -> None:
    fresh()
    with pytest.raises(StageError, match=r"item 0: ConfigError: .* in place and returned None.*return the latents"):
        LatentLoop(step, writes_and_returns_nothing).run(frames(1, "emu"))
    settled()


def test_a_window_of_any_size_takes_memory_for_what_is_under_way() -> None:
    machine = fresh()
    same(LatentLoop(step, stage, 10**18).run(frames(3, "emu")), one_after_the_other(step, stage, frames(3, "emu")))
    assert machine.pinned.peak_bytes == 3 * FRAME_BYTES
    settled()


@pytest.mark.parametrize("window", [1, 3, 8])
def test_pinned_memory_is_the_windows_and_is_used_again(window: int) -> None:
    machine = fresh()
    run = LatentLoop(step, stage, window)(frames(30, "emu"), 3)
    list(run)
    assert machine.pinned.peak_bytes == window * FRAME_BYTES
    settled()


def test_ten_thousand_items_without_growth() -> None:
    machine = fresh(keep_timeline=False)
    before = here.allocated()
    most = []
    source = (torch.full((8,), float(n), device="emu") for n in range(10_000))
    for number, result in enumerate(LatentLoop(lambda x: x + 1, lambda x: x.mul_(2), window=4)(source)):
        if number in (100, 9_999):
            most.append((machine.statistics().peak_allocated, machine.pinned.peak_bytes))
            assert result[0].item() == (number + 1) * 2
    assert most[0] == most[1]
    del result
    settled()
    assert here.allocated() == before


def test_the_copy_streams_work_while_the_device_computes() -> None:
    machine = fresh()
    lane = machine.lane("stage")

    def slow(frame: Tensor) -> None:
        machine.join_clock(lane.occupy(1e-3, "stage")[1])

    given_frames = [torch.ones(256, 256, device="emu") for _ in range(16)]
    weight = torch.eye(256, device="emu")
    machine.synchronize()
    machine.reset_statistics()
    for _ in LatentLoop(lambda x: x @ weight, slow, window=4)(given_frames):
        pass
    machine.synchronize()
    assert machine.statistics().seconds < 16 * 1e-3 * 1.1
    # The host of the computing thread stands where the stage's thread was when it took the last one over.
    assert machine.now >= 16e-3


def test_one_item_at_a_time_is_the_sequential_loop() -> None:
    machine = fresh()
    lane = machine.lane("stage")
    spans: list[tuple[float, float]] = []

    def slow(frame: Tensor) -> Tensor:
        spans.append(lane.occupy(1e-3, "stage"))
        machine.join_clock(spans[-1][1])
        return frame

    LatentLoop(step, slow, window=1).run(frames(5, "emu"), 2)
    kernels = [span for span in machine.timeline() if span.lane == "compute"]
    for start, end in spans:
        assert not any(span.start < end and span.end > start for span in kernels)


POINTS = [
    (LatentRun, "_begin"),
    (LatentRun, "_send"),
    (LatentRun, "_file"),
    (DeviceFerry, "leave"),
    (DeviceFerry, "_place"),
    (DeviceFerry, "land"),
    (DeviceFerry, "embark"),
    (DeviceFerry, "_send"),
    (DeviceFerry, "arrive"),
    (StagePool, "submit"),
]


@pytest.mark.parametrize("execution", ["eager", "late"])
@pytest.mark.parametrize("number", [1, 2, 4, 7])
@pytest.mark.parametrize(("owner", "name"), POINTS, ids=lambda value: getattr(value, "__name__", value))
def test_an_interrupt_anywhere_unpins_everything_and_the_run_goes_on(
    owner: type, name: str, number: int, execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(execution)
    point = FailAt(getattr(owner, name), number, KeyboardInterrupt)
    monkeypatch.setattr(owner, name, point.as_method())
    run = LatentLoop(step, guarded, window=3)(frames(4, "emu"), 2)
    found: list[Tensor] = []
    try:
        found.extend(run)
    except KeyboardInterrupt:
        assert point.fired
    monkeypatch.undo()
    settled()
    found.extend(run)
    settled()
    same(found, one_after_the_other(step, in_place, frames(4, "emu"), 2))


def test_a_failed_stage_is_called_again_with_what_the_step_made() -> None:
    fresh("late")
    failed = []

    def failing(frame: Tensor, turn: Turn) -> Tensor:
        if turn == (2, 1) and not failed:
            failed.append(frame.fill_(torch.nan))
            raise ValueError("too dark")
        return guarded(frame, turn)

    run = LatentLoop(step, failing, window=3)(frames(4, "emu"), 2)
    with pytest.raises(StageError, match="item 2 in round 1") as raised:
        list(run)
    settled()
    raised.value.__cause__ = None
    found = list(run)
    expected = one_after_the_other(step, in_place, frames(4, "emu"), 2)
    same(found, expected[2:])
    settled()


def test_a_run_that_is_cancelled_or_dropped_leaves_no_memory() -> None:
    fresh()
    before = here.allocated()
    run = LatentLoop(step, stage, window=3)(frames(6, "emu"))
    next(run)
    run.cancel()
    with pytest.raises(CancelledRun):
        list(run)
    settled()
    run.close()
    del run
    run = LatentLoop(step, stage, window=3)(frames(6, "emu"))
    next(run)
    del run
    gc.collect()
    settled()
    assert here.allocated() == before


def test_where_nothing_can_be_pinned_results_are_the_same() -> None:
    fresh(pinned_cap=0)
    same(
        LatentLoop(step, stage, window=3).run(frames(6, "emu"), 2),
        one_after_the_other(step, stage, frames(6, "emu"), 2),
    )
    settled()


def test_a_loop_that_is_kept_open_pins_once() -> None:
    machine = fresh()
    with LatentLoop(step, stage, window=2) as loop:
        loop.run(frames(4, "emu"))
        pinned = machine.pinned.charged_bytes
        assert pinned == 2 * FRAME_BYTES
        loop.run(frames(4, "emu"))
        assert machine.pinned.charged_bytes == pinned
        same(loop.run(frames(4)), one_after_the_other(step, stage, frames(4)))
        assert no_threads_but(1)
    settled()


def no_threads_but(number: int) -> bool:
    """Whether that many threads are left."""
    return sum(thread.name.startswith("fmstream") for thread in threading.enumerate()) == number


async def test_asynchronous_iteration() -> None:
    fresh("late")
    found = [result async for result in LatentLoop(step, guarded, window=3)(frames(6, "emu"), 2)]
    same(found, one_after_the_other(step, in_place, frames(6, "emu"), 2))
    settled()


@pytest.mark.parametrize("execution", ["eager", "late", 1])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # a scheduler's
def test_a_pipeline_that_streams_with_a_stage(execution: Execution) -> None:
    fresh(execution)
    pipe = stable_video_diffusion().modules
    twin = copy.deepcopy(pipe).to("emu")
    options: dict[str, Any] = {"image": noise(1, 3, 16, 16).sigmoid(), "height": 16, "width": 16, "num_frames": 3}
    options |= {"decode_chunk_size": 1, "num_inference_steps": 3, "output_type": "np"}

    def by_hand(_: Any, step: int, __: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        staged = [in_place(f.cpu().clone(), Turn(n, step)) for n, f in enumerate(inputs["latents"].unbind(1))]
        return {"latents": torch.stack(staged, 1).to("emu")}

    seed = torch.Generator().manual_seed(3)
    expected = twin(generator=seed, callback_on_step_end=by_hand, **options).frames
    for number in (1, 2):
        stage = fmstream.HostStage(guarded, num_threads=number)
        seed = torch.Generator().manual_seed(3)
        found = fmstream.run(pipe, memory="50%", device="emu", host_stage=stage, generator=seed, **options)
        assert (found.output.frames == expected).all()
    settled()
