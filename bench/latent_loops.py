"""Latent loops on the emulated device in which every fence of their way to the host and back is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from fmstream import LatentLoop, StageError, emulator
from fmstream.device.ferry import DeviceFerry

WIDTH: Final = 64
NUM_FRAMES: Final = 9
Without = Callable[[Any, str], AbstractContextManager[None]]


def frames() -> list[Tensor]:
    """Small frames on the device."""
    return [torch.full((4, WIDTH), float(number), device="emu") for number in range(NUM_FRAMES)]


def step(frame: Tensor) -> Tensor:
    """Some kernels."""
    for _ in range(4):
        frame = torch.tanh(frame * 1.5)
    return frame


def halve(frame: Tensor) -> Tensor:
    """A stage that writes what it is given, seen by the checker."""
    with emulator.host_guard():
        return frame.mul_(0.5)


def rounds_of_frames() -> None:
    """Some rounds, whose results are used at once."""
    for result in LatentLoop(step, halve, window=3)(frames(), rounds=3):
        result.sum()


def another_shape() -> None:
    """A stage whose results do not fit what it was given."""
    for result in LatentLoop(step, lambda frame: halve(frame)[:2], window=2)(frames()):
        result.sum()


def streams_in_turn() -> None:
    """Results are taken in one of two streams of the user's and then in the other."""
    device = torch.get_device_module("emu")
    streams = [device.Stream(), device.Stream()]
    given = frames()
    for stream in streams:
        stream.wait_stream(device.current_stream())
    run = LatentLoop(step, halve, window=2)(given)
    for number in range(NUM_FRAMES):
        with streams[number % 2]:
            next(run).sum()
    run.close()


def failing_stage() -> None:
    """A stage that fails while others are on their way to it."""

    def fail(frame: Tensor) -> Tensor:
        raise ValueError("this frame cannot be used")

    try:
        LatentLoop(step, fail, window=4).run(frames())
    except StageError as error:
        error.run.close()


SCENARIOS: Final = (rounds_of_frames, another_shape, streams_in_turn, failing_stage)


def fences(without: Without) -> Iterable[tuple[str, Callable[[], AbstractContextManager[Any]], Callable[[], None]]]:
    """Each fence: its name, a context in which it is missing, and the scenario that shows it."""
    for name, method, scenario in (
        ("latents leave behind the step", "_wait_for_output", rounds_of_frames),
        ("a stage reads latents that have landed", "_wait_for_copy", rounds_of_frames),
        ("a step reads latents that have arrived", "_wait_for_arrival", rounds_of_frames),
        ("latents land where none are left to be copied", "_wait_for_place", streams_in_turn),
        ("a loop's memory is unpinned behind its copies", "settle", failing_stage),
    ):
        yield name, lambda method=method: without(DeviceFerry, method), scenario
