"""Stages on the host and previews in diffusers pipelines, beside a callback written by hand."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream import ConfigError, HostStage, StageError
from fmstream.doors.latents import frame_axes, picture
from fmstream.payloads.preview import Previews, to_image
from tests.clients import pipelines
from tests.clients.client import flat, noise
from tests.kit_runtime import Latch, leaves_nothing

__all__ = ["leaves_nothing"]
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # a scheduler's

STEPS = 3
SIZE = {"height": 16, "width": 16, "num_inference_steps": STEPS, "output_type": "np"}
VIDEO = {"image": noise(1, 3, 16, 16).sigmoid(), "num_frames": 3, "decode_chunk_size": 1, **SIZE}
CASES: dict[str, tuple[Callable[[], Any], int | None, dict[str, Any]]] = {
    "svd": (pipelines.stable_video_diffusion, 1, VIDEO),
    "wan": (
        pipelines.wan_text_to_video,
        2,
        {"prompt": "A FOX", "negative_prompt": "BLUR", "num_frames": 5, "max_sequence_length": 16, **SIZE},
    ),
    "sd": (pipelines.stable_diffusion, None, {"prompt": "A RED FOX", **SIZE}),
    "flux": (
        pipelines.flux_pipeline,
        None,
        {"prompt_embeds": noise(1, 5, 32), "pooled_prompt_embeds": noise(1, 32), **SIZE},
    ),
}


@functools.cache
def built(name: str) -> Any:
    """A pipeline of random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return CASES[name][0]().modules


@pytest.fixture
def svd() -> Callable[..., Any]:
    """Calls `fmstream.run` with the small video pipeline."""

    def call(**options: Any) -> Any:
        return run("svd", **options)

    return call


def run(name: str, **options: Any) -> Any:
    seed = torch.Generator().manual_seed(3)
    return fmstream.run(built(name), memory="50%", device="cpu", generator=seed, **CASES[name][2], **options)


def by_hand(name: str, function: Callable[[Tensor, tuple[int, int]], Tensor | None]) -> list[Tensor]:
    """The output of a pipeline whose user wrote the stage as a callback, frame after frame."""
    _, axis, options = CASES[name]
    step = [0]

    def callback(pipe: Any, index: int, timestep: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
        latents = given["latents"]
        frames = [latents] if axis is None else list(latents.unbind(axis))
        for number, frame in enumerate(frames):
            staged = function(frame.clone(), (number, step[0]))
            frames[number] = frame if staged is None else staged
        step[0] += 1
        return {"latents": frames[0] if axis is None else torch.stack(frames, axis)}

    seed = torch.Generator().manual_seed(3)
    return flat(built(name)(generator=seed, callback_on_step_end=callback, **options))


def fade(frame: Tensor, place: tuple[int, int]) -> Tensor:
    """A stage that changes each frame in each step in another way."""
    return frame * 0.9 + 0.01 * place[0] + 0.02 * place[1]


@pytest.mark.parametrize("name", CASES)
def test_the_stage_sees_each_frame_of_each_step(name: str) -> None:
    expected = by_hand(name, fade)
    for stage in (fade, HostStage(fade, window=1), HostStage(fade, window=3, num_threads=2)):
        found = flat(run(name, host_stage=stage).output)
        assert len(found) == len(expected) > 0
        assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, flat(run(name).output), expected))


def test_a_stage_of_one_parameter_that_returns_nothing(svd: Callable[..., Any]) -> None:
    shapes = []
    found = svd(host_stage=lambda frame: shapes.append(tuple(frame.shape)))
    assert all(map(torch.equal, flat(found.output), flat(svd().output)))
    assert len(shapes) == STEPS * 3
    assert {len(shape) for shape in shapes} == {4}


def test_calls_are_in_the_order_of_steps_and_frames(svd: Callable[..., Any]) -> None:
    places: list[tuple[int, int]] = []

    def noting(frame: Tensor, place: tuple[int, int]) -> None:
        places.append(tuple(place))

    svd(host_stage=noting)
    assert places == [(frame, step) for step in range(STEPS) for frame in range(3)]


def test_a_callback_of_the_users_own_comes_first(svd: Callable[..., Any]) -> None:
    order: list[str] = []

    def callback(pipe: Any, step: int, timestep: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
        assert list(given) == ["latents"]
        order.append("callback")
        return {"latents": given["latents"] * 0.5}

    def stage(frame: Tensor) -> Tensor:
        order.append("stage")
        return frame + 1

    found = svd(host_stage=stage, callback_on_step_end=callback)
    assert order == ["callback", "stage", "stage", "stage"] * STEPS
    assert all(map(torch.equal, flat(found.output), by_hand("svd", lambda frame, _: frame * 0.5 + 1)))


def test_a_callback_sees_what_it_asks_for_and_no_more() -> None:
    seen: list[list[str]] = []

    class Asking:
        tensor_inputs = ("prompt_embeds",)

        def __call__(self, pipe: Any, step: int, timestep: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
            seen.append(list(given))
            return given

    run("sd", host_stage=lambda frame: frame, callback_on_step_end=Asking())
    names = ["prompt_embeds"]
    callback = Asking().__call__
    run(
        "sd",
        host_stage=lambda frame: frame,
        callback_on_step_end=callback,
        callback_on_step_end_tensor_inputs=names,
    )
    assert seen == [["prompt_embeds"]] * 2 * STEPS
    assert names == ["prompt_embeds"]


def test_a_failing_stage_names_its_frame(svd: Callable[..., Any]) -> None:
    def failing(frame: Tensor, place: tuple[int, int]) -> None:
        if place == (1, 2):
            raise ValueError("too dark")

    with pytest.raises(StageError, match="item 1: ValueError: too dark") as raised:
        svd(host_stage=failing)
    assert raised.value.index == 1


def test_a_stage_must_keep_the_shape(svd: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="for frame 2"):
        svd(host_stage=lambda frame, place: frame.double() if place[0] == 2 else frame)


def test_calls_of_the_stage_are_in_the_timeline(monkeypatch: pytest.MonkeyPatch, svd: Callable[..., Any]) -> None:
    handles = []
    make = fmstream.doors.run.Stream
    monkeypatch.setattr("fmstream.doors.run.Stream", lambda *args: handles.append(make(*args)) or handles[-1])
    svd(host_stage=fade)
    spans = [span for span in handles[0].telemetry.spans if span.lane == "host 0"]
    assert len(spans) == STEPS * 3


async def test_a_cancelled_task_ends_the_stage() -> None:
    latch = Latch()
    calls = []

    def held(frame: Tensor) -> None:
        calls.append(1)
        latch.wait_here()

    task = asyncio.create_task(
        fmstream.arun(built("svd"), memory="50%", device="cpu", host_stage=held, **CASES["svd"][2])
    )
    await asyncio.to_thread(latch.wait_reached)
    task.cancel()
    await asyncio.sleep(0)
    latch.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(calls) <= 3


class Plain(nn.Module):
    """Has no step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Blind:
    """A pipeline that keeps its latents to itself."""

    _callback_tensor_inputs = ("prompt_embeds",)

    def __init__(self) -> None:
        self.unet = Plain()

    def __call__(self, callback_on_step_end: Any = None, callback_on_step_end_tensor_inputs: Any = None) -> None:
        raise AssertionError("it was called")


@pytest.mark.parametrize("option", [{"host_stage": fade}, {"preview": "previews"}])
def test_targets_without_a_callback_are_refused(option: dict[str, Any], tmp_path: Path) -> None:
    name = next(iter(option))
    with pytest.raises(ConfigError, match=f"{name}= needs a diffusers pipeline.*Plain has not.*LatentLoop"):
        fmstream.run(Plain(), torch.ones(4), **option)
    with pytest.raises(ConfigError, match=re.escape("only ('prompt_embeds',)")):
        fmstream.run(Blind(), **option)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_stage": 3}, "host_stage=3 cannot be called"),
        ({"host_stage": HostStage(3)}, "host_stage=3 cannot be called"),  # type: ignore[arg-type]
        ({"host_stage": HostStage(fade, frame_axis=9)}, "frame_axis=9 is no axis of latents of shape"),
        ({"host_stage": HostStage(fade, window=0)}, "window=0"),
        ({"host_stage": HostStage(fade, num_threads=0)}, "num_threads=0"),
        ({"preview": 3}, "preview=3 is no folder"),
        ({"preview": ""}, "preview='' is no folder"),
        ({"preview": "a\0b"}, r"preview='a\\x00b' is no folder"),
    ],
)
def test_options_that_cannot_be_used(svd: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        svd(**options)


def test_which_axis_has_the_frames() -> None:
    def axes(*shape: int, **parts: Any) -> list[int]:
        return frame_axes(SimpleNamespace(**parts), torch.empty(shape))

    vae = SimpleNamespace(config=SimpleNamespace(latent_channels=4))
    wan = SimpleNamespace(config=SimpleNamespace(z_dim=16))
    denoiser = SimpleNamespace(config=SimpleNamespace(out_channels=8, in_channels=36))
    assert axes(1, 4, 8, 8, vae=vae) == []
    assert axes(1, 7, 4, 8, 8, vae=vae) == [1]
    assert axes(1, 4, 7, 8, 8, vae=vae) == [2]
    assert axes(1, 7, 8, 8, 4, vae=vae) == [1]
    assert axes(1, 4, 4, 8, 8, vae=vae) == [1, 2]
    assert axes(1, 16, 3, 4, 4, vae=wan) == [2]
    assert axes(1, 8, 3, 4, 4, transformer=denoiser) == [2]
    assert axes(1, 8, 3, 4, 4) == []


def test_frames_that_cannot_be_told_from_channels(svd: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"\(1, 4, 4, .*frame_axis=1"):
        run_video(4, host_stage=fade)
    shapes = set()
    run_video(4, host_stage=HostStage(lambda frame: shapes.add(tuple(frame.shape)), frame_axis=1))
    assert {shape[:2] for shape in shapes} == {(1, 4)}


def run_video(num_frames: int, **options: Any) -> Any:
    return fmstream.run(built("svd"), memory="50%", device="cpu", **VIDEO | {"num_frames": num_frames}, **options)


# Previews


def test_previews_of_each_step(svd: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made" / "here"
    found = svd(preview=folder, progress=True)
    assert all(map(torch.equal, flat(found.output), flat(svd().output)))
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "step-0001.png"
    assert set(names) <= {f"step-{number:04}.png" for number in (1, 2, 3)}
    with PIL.Image.open(folder / names[0]) as image:
        assert image.mode == "RGB"
        assert max(image.size) >= 256


def test_a_preview_is_of_what_the_stage_made(tmp_path: Path) -> None:
    run("sd", host_stage=lambda frame: torch.linspace(0, 1, frame.shape[-1]).expand_as(frame), preview=tmp_path)
    with PIL.Image.open(tmp_path / "step-0001.png") as image:
        row = np.asarray(image)[0, :, 0].astype(int)
    assert row[0] < 10
    assert row[-1] > 245
    assert (np.diff(row) >= 0).all()


def test_a_preview_that_is_behind_is_dropped_and_the_order_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch()
    drawn: list[float] = []

    def slow(latents: Tensor) -> Any:
        drawn.append(float(latents.flatten()[0]))
        latch.wait_here()
        return to_image(latents)

    monkeypatch.setattr("fmstream.payloads.preview.to_image", slow)
    previews = Previews(tmp_path, lambda note: None)
    latents = torch.full((3, 4, 4), 1.0)
    previews.offer(1, latents)
    latents.fill_(2.0)  # what was offered is not what is drawn later
    latch.wait_reached()
    previews.offer(2, latents)
    previews.offer(3, latents)
    latch.open()
    previews.close()
    assert drawn == [1.0]
    assert previews.num_dropped == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-0001.png"]


def test_a_folder_that_goes_away_ends_the_previews_and_not_the_run(svd: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "previews"

    def removing(frame: Tensor) -> None:
        if folder.exists():
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

    found = svd(preview=folder, host_stage=HostStage(removing, window=1))
    assert any("previews were given up" in note for note in found.report.notes)


def test_a_folder_that_cannot_be_made(svd: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be made a folder"):
        svd(preview=tmp_path / "file" / "previews")


def test_pictures_of_any_latents() -> None:
    pipe = SimpleNamespace(vae=SimpleNamespace(config=SimpleNamespace(latent_channels=4)))
    video = torch.arange(2 * 5 * 4 * 6 * 8.0).reshape(2, 5, 4, 6, 8)
    assert torch.equal(picture(pipe, video, 1, 1.0), video[0, 2])
    assert torch.equal(picture(pipe, video.transpose(1, 2), 2, 1.0), video[0, 2])
    assert torch.equal(picture(pipe, video.permute(0, 1, 3, 4, 2), 1, 1.0), video[0, 2])
    packed = torch.rand(1, 24, 64)
    assert picture(pipe, packed, None, 6 / 4).shape == (64, 6, 4)
    assert picture(pipe, packed, None, 4 / 6).shape == (64, 4, 6)
    for shape in ((1, 3, 5), (2, 3, 5), (16, 3, 300)):
        assert max(to_image(torch.rand(shape)).size) >= 256
    for odd in (torch.zeros(4, 2, 2), torch.full((4, 2, 2), torch.nan), torch.rand(4, 2, 2).bfloat16()):
        assert to_image(odd).mode == "RGB"


def test_no_thread_is_left_of_previews(tmp_path: Path) -> None:
    previews = Previews(tmp_path, lambda note: None)
    previews.offer(1, torch.rand(3, 4, 4))
    previews.close()
    previews.close()
    assert not any(thread.name.startswith("fmstream host") for thread in threading.enumerate())
