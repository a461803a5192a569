"""Latents of a diffusers pipeline: a stage on the host and previews after each step, through its own callback."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fmstream.config import is_path
from fmstream.core.telemetry import Telemetry
from fmstream.errors import ConfigError
from fmstream.payloads.latent_run import LatentRun
from fmstream.payloads.latents import LatentLoop
from fmstream.payloads.preview import Previews
from fmstream.payloads.trips import Turn, with_turn

CALLBACK: Final = "callback_on_step_end"
INPUTS: Final = "callback_on_step_end_tensor_inputs"


@dataclass(frozen=True, slots=True)
class HostStage:
    """A ``host_stage`` for `run` with its options.

    Attributes:
        function: takes the latents of a frame in host memory, which it may change, and returns them, or None to leave
            them as they are.  Shape and type stay.  If it has a second parameter without a default, it is given
            (frame, step), both from 0.
        window: frames under way at once.
        num_threads: threads that call ``function``; with one, the calls come in the order of frames.
        frame_axis: axis of the frames in the latents; None finds it, and takes other latents than those of videos as
            a whole.
    """

    function: Callable[..., Tensor | None]
    window: int = 4
    num_threads: int = 1
    frame_axis: int | None = None


class LatentHook:
    """What a pipeline calls at the end of each step: the user's own callback, then the stage, then the preview."""

    def __init__(
        self,
        stage: HostStage | None,
        preview: str | os.PathLike[str] | None,
        callback: Callable[..., Any] | None,
        inputs: Sequence[str],
        aspect: float,
    ) -> None:
        self._stage = stage
        self._preview = preview
        self._callback = callback
        self._inputs = tuple(inputs)
        self._aspect = aspect
        self._function = None if stage is None else with_turn(stage.function)
        self._loop: LatentLoop | None = None
        self._run: LatentRun | None = None
        self._previews: Previews | None = None
        self._num_steps = 0

    def opened(self, telemetry: Telemetry) -> ExitStack:
        """A context in which threads and pinned memory are kept from step to step."""
        stack = ExitStack()
        if self._stage is not None:
            self._loop = LatentLoop(
                lambda frame: frame,
                lambda frame, turn: self._call(frame, turn),
                self._stage.window,
                num_threads=self._stage.num_threads,
                telemetry=telemetry,
            )
            stack.enter_context(self._loop)
        if self._preview is not None:
            self._previews = Previews(self._preview, telemetry.notes.append)
            stack.callback(self._previews.close)
        return stack

    def cancel(self) -> None:
        """Let the step's stage end early; from any thread."""
        run = self._run
        if run is not None:
            run.cancel()

    def __call__(self, pipeline: Any, step: Any, timestep: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """diffusers' callback: takes named tensors, and returns those that are to stand in their place."""
        outputs = {}
        if self._callback is not None:
            seen = {name: given[name] for name in self._inputs}
            outputs = dict(self._callback(pipeline, step, timestep, seen) or {})
        latents = outputs.get("latents", given["latents"])
        axis = self._axis(pipeline, latents)
        if self._loop is not None:
            latents = outputs["latents"] = self._staged(self._loop, latents, axis)
        if self._previews is not None:
            self._previews.offer(self._num_steps + 1, picture(pipeline, latents, axis, self._aspect))
        self._num_steps += 1
        return outputs

    def _axis(self, pipeline: Any, latents: Tensor) -> int | None:
        if self._stage is not None and self._stage.frame_axis is not None:
            axis = self._stage.frame_axis
            if not isinstance(axis, int) or not -latents.ndim <= axis < latents.ndim:
                raise ConfigError(f"frame_axis={axis!r} is no axis of latents of shape {tuple(latents.shape)}")
            return axis
        axes = frame_axes(pipeline, latents)
        if self._stage is not None and latents.ndim == 5 and len(axes) != 1:
            raise ConfigError(
                f"latents of shape {tuple(latents.shape)} do not tell which axis has the frames: give "
                "host_stage=fmstream.HostStage(function, frame_axis=1), or another axis"
            )
        return axes[0] if axes else None

    def _staged(self, loop: LatentLoop, latents: Tensor, axis: int | None) -> Tensor:
        frames = [latents] if axis is None else list(latents.unbind(axis))
        self._run = loop(frames)
        try:
            staged = list(self._run)
        finally:
            self._run = None
        for index, (before, after) in enumerate(zip(frames, staged, strict=True)):
            if before.shape != after.shape or before.dtype != after.dtype:
                raise ConfigError(
                    f"host_stage made {tuple(before.shape)} {before.dtype} into {tuple(after.shape)} {after.dtype} for "
                    f"frame {index}: the next step needs latents of the same shape and type"
                )
        return staged[0] if axis is None else torch.stack(staged, axis)

    def _call(self, frame: Tensor, turn: Turn) -> Tensor | None:
        assert self._function is not None
        result: Tensor | None = self._function(frame, Turn(turn.item, self._num_steps))
        return result


def hook_latents(
    call: Callable[..., Any],
    kwargs: Mapping[str, Any],
    host_stage: HostStage | Callable[..., Any] | None,
    preview: str | os.PathLike[str] | None,
) -> tuple[dict[str, Any], LatentHook | None]:
    """The arguments of a pipeline with a hook in its step callback; None if nothing is asked for.

    Raises:
        ConfigError: ``call`` has no such callback, or does not show it the latents.
    """
    if host_stage is None and preview is None:
        return dict(kwargs), None
    option = "host_stage" if host_stage is not None else "preview"
    if host_stage is not None:
        host_stage = host_stage if isinstance(host_stage, HostStage) else HostStage(host_stage)
        if not callable(host_stage.function):
            raise ConfigError(
                f"host_stage={host_stage.function!r} cannot be called: give a function that takes latents"
            )
    if preview is not None and not is_path(preview):
        raise ConfigError(f"preview={preview!r} is no folder: give its path")
    default = _default_inputs(call, option)
    callback = kwargs.get(CALLBACK)
    inputs = kwargs.get(INPUTS) or getattr(callback, "tensor_inputs", None) or default
    aspect = kwargs["height"] / kwargs["width"] if kwargs.get("height") and kwargs.get("width") else 1.0
    hook = LatentHook(host_stage, preview, callback, inputs if callback is not None else (), aspect)
    asked = list(dict.fromkeys([*(inputs if callback is not None else ()), "latents"]))
    return {**kwargs, CALLBACK: hook, INPUTS: asked}, hook


def _default_inputs(call: Any, option: str) -> Sequence[str]:
    """Which tensors the pipeline shows to a callback that says nothing else."""
    name = type(call).__name__ if not inspect.isroutine(call) else call.__qualname__
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # a built-in that does not tell its parameters
        parameters = {}  # type: ignore[assignment]
    if CALLBACK not in parameters or INPUTS not in parameters:
        raise ConfigError(
            f"{option}= needs a diffusers pipeline with {CALLBACK} and {INPUTS}, which {name} has not: write the loop "
            "with fmstream.LatentLoop"
        )
    shown = getattr(getattr(call, "__self__", call), "_callback_tensor_inputs", ["latents"])
    if "latents" not in shown:
        raise ConfigError(f"{option}= needs the latents, which {name} does not show to callbacks, but only {shown}")
    default = parameters[INPUTS].default
    return default if isinstance(default, list | tuple) else ["latents"]


def frame_axes(pipeline: Any, latents: Tensor) -> list[int]:
    """Which axes of latents may be that of the frames, the likeliest first; none, unless they have five.

    Pipelines lay them out (batch, frames, channels, height, width), (batch, channels, frames, height, width) or
    (batch, frames, height, width, channels); which one is seen by the number of channels.
    """
    if latents.ndim != 5:
        return []
    channels = _num_channels(pipeline)
    found = [frames for axis, frames in ((2, 1), (1, 2)) if latents.shape[axis] == channels]
    return found or ([1] if latents.shape[4] == channels else [])


def _num_channels(pipeline: Any) -> int | None:
    """Channels of the latents, by what the decoder or else the denoiser says of itself."""
    for part, names in (
        ("vae", ("latent_channels", "z_dim")),
        ("unet", ("out_channels",)),
        ("transformer", ("out_channels", "in_channels")),
    ):
        config = getattr(getattr(pipeline, part, None), "config", None)
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int):
                return value
    return None


def picture(pipeline: Any, latents: Tensor, axis: int | None, aspect: float) -> Tensor:
    """Of the first item of a batch the middle frame, as (channels, height, width).

    Packed latents of shape (batch, positions, channels) are laid out in rows by the aspect, height over width.
    """
    first = latents[0]
    if axis is not None:
        first = first.select(axis - 1, first.shape[axis - 1] // 2)
        channels = _num_channels(pipeline)
        if first.ndim == 3 and first.shape[0] != channels and first.shape[-1] == channels:
            first = first.movedim(-1, 0)
    if first.ndim == 2:
        positions = len(first)
        rows = min(divisors(positions), key=lambda rows: abs(rows * rows / positions / aspect - 1))
        first = first.t().reshape(first.shape[1], rows, positions // rows)
    return first.reshape(-1, *first.shape[-2:]) if first.ndim != 3 else first


def divisors(number: int) -> list[int]:
    """All numbers that divide one."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
