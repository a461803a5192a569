"""Image to video with diffusers' Stable Video Diffusion: all weights resident, then streamed with and without overlap.

    python examples/image_to_video.py
    python examples/image_to_video.py --model DIR --image photo.jpg --memory 2GiB --steps 25
    python examples/image_to_video.py --host-stage

Without ``--model`` it makes a checkpoint of random weights once (about 1 GB, under ``out/``): the frames are then
coloured noise, but the layers, the loop and the reads are those of the real model.  It makes the same video three
times, fails if the frames differ in a single bit, and leaves the video, the report and the timeline in ``--out``.

With ``--host-stage`` the frames go through a stage on the host, a sharpening that follows edges: while some frames are
decoded, those before are sharpened.  The timeline then shows the decoding, with the stage in a lane of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before the import: it remarks on what is not installed

import diffusers
import numba
import numpy as np
import torch
import transformers
from diffusers import StableVideoDiffusionPipeline
from PIL import Image, ImageOps
from random_svd import make_checkpoint
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import fmstream
from fmstream.core.telemetry import Telemetry
from fmstream.report.measure import RootRow
from fmstream.report.plot import save_timeline_png
from fmstream.report.report import Report
from fmstream.report.timeline import save_chrome_trace

RANDOM_CHECKPOINT = Path("out/svd-checkpoint")
PHOTOGRAPH = Path(__file__).with_name("images") / "coffee.jpg"
SMALL, FULL = (64, 64), (576, 1024)
"""Height and width for random weights (computing a step and reading its weights are of one order) and for real ones."""

CHUNK_FRAMES = 1
"""Frames that are decoded together where they go through a stage afterwards."""
LEVELS, EDGE, GAIN = 5, 0.15, 2.5
"""Of the sharpening: scales of detail, the difference in brightness that is an edge, how much details are amplified."""

WARM_UP_STEPS = 3
"""Steps of the untimed call: one that learns the order of the layers, and two that follow the plan."""


@dataclass(frozen=True, slots=True)
class Result:
    """One way to make the video, measured.

    ``frames`` has shape (frames, height, width, 3), float32 in [0, 1]; ``seconds`` is the wall time of the whole call.
    """

    label: str
    frames: np.ndarray
    seconds: float
    report: Report
    telemetry: Telemetry

    @property
    def frames_per_second(self) -> float:
        """Frames made per second of the call."""
        return len(self.frames) / self.seconds

    @property
    def denoiser(self) -> RootRow:
        """The row of the module in which the run spent most of its time."""
        return max(self.report.roots, key=lambda row: row.total_seconds)


def main() -> int:
    """Make the video three times, compare, save; the exit status is 1 if the frames differ."""
    args = parse_arguments()
    for path in filter(None, (args.model, args.image)):
        if not path.exists():
            print(f"error: there is no {path}", file=sys.stderr)
            return 2
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    silence_loading()
    # One core is left to the readers; all three runs compute with the others.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    pipeline = load_pipeline(args.model or find_random_checkpoint(console))
    height, width = FULL if args.model else SMALL
    height, width = args.height or height, args.width or width
    request = {
        "image": load_image(args.image, height, width),
        "height": height,
        "width": width,
        "num_frames": args.frames or pipeline.unet.config.num_frames,
        "num_inference_steps": args.steps,
        "output_type": "np",
    }
    runs = [("unlimited", "overlap_async", None), ("sync", "sync", args.memory)]
    runs.append(("overlap_async", "overlap_async", args.memory))
    try:
        results = [measure(pipeline, request, args.seed, *run, host_stage=args.host_stage) for run in runs]
    except (fmstream.FmstreamError, ValueError) as error:  # the memory, or what the pipeline says of the size
        print(f"error: {error}", file=sys.stderr)
        return 2

    args.out.mkdir(parents=True, exist_ok=True)
    video = save_video(results[-1].frames, args.fps, args.out)
    save_report(results[-1], args.out, host_stage=args.host_stage)
    console.print(results[-1].report.render(width=console.width), markup=False)
    console.print(make_table(results))
    console.print(f"{video}, report.json, trace.json and timeline.png are in {args.out}")
    differences = list(find_differences(results))
    for difference in differences:
        print(f"error: {difference}", file=sys.stderr)
    if not differences:
        console.print("all frames are equal, bit for bit")
    return 1 if differences else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="diffusers checkpoint folder (default: random weights, made once)")
    parser.add_argument("--image", type=Path, default=PHOTOGRAPH, help="first frame (default: %(default)s)")
    parser.add_argument(
        "--memory", default="35%", help="fast memory for weights: 6GiB, 512MB, 50%% of them (default: 35%%)"
    )
    parser.add_argument("--steps", type=positive, default=12, help="denoising steps (default: %(default)s)")
    parser.add_argument("--frames", type=positive, help="frames of the video (default: what the model is made for)")
    parser.add_argument("--height", type=positive, help=f"pixels (default: {FULL[0]}, or {SMALL[0]} if random)")
    parser.add_argument("--width", type=positive, help=f"pixels (default: {FULL[1]}, or {SMALL[1]} if random)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default: %(default)s)")
    parser.add_argument(
        "--host-stage", action="store_true", help="sharpen the frames on the host while others are decoded"
    )
    parser.add_argument("--fps", type=positive, default=7, help="frames per second of the file (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/image_to_video"), help="folder (default: %(default)s)")
    return parser.parse_args()


def positive(text: str) -> int:
    """An integer above zero, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above zero")
    return value


def silence_loading() -> None:
    """Keep the libraries' loading bars and remarks off the terminal."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def find_random_checkpoint(console: Console) -> Path:
    """The checkpoint of random weights, made now if there is none."""
    if not RANDOM_CHECKPOINT.exists():
        with console.status(f"making a checkpoint of random weights in {RANDOM_CHECKPOINT}"):
            make_checkpoint(RANDOM_CHECKPOINT)
    return RANDOM_CHECKPOINT


def load_pipeline(checkpoint: Path) -> StableVideoDiffusionPipeline:
    """The pipeline in float32; weights that are stored so stay in the mapped files and take no memory until read."""
    return StableVideoDiffusionPipeline.from_pretrained(str(checkpoint), dtype=torch.float32)


def load_image(path: Path, height: int, width: int) -> Image.Image:
    """The middle of the photograph, in the size of the video."""
    with Image.open(path) as image:
        return ImageOps.fit(ImageOps.exif_transpose(image).convert("RGB"), (width, height))


def measure(
    pipeline: StableVideoDiffusionPipeline,
    request: dict[str, Any],
    seed: int,
    label: str,
    policy: str,
    memory: str | None,
    *,
    host_stage: bool,
) -> Result:
    """Call the pipeline twice, a few steps untimed and then in full, with its weights in ``memory``.

    With a host stage, frames are decoded and sharpened one after the other, or, with ``overlap_async`` and limited
    memory, at the same time.
    """
    window = 4 if host_stage and label == "overlap_async" else 1
    forget_files(Path(pipeline.config._name_or_path))
    with fmstream.stream(pipeline, policy=policy, memory=memory) as streamed:
        pipeline.set_progress_bar_config(desc=f"{label}, warm-up")
        warm_up = request | {"num_inference_steps": WARM_UP_STEPS}
        generate = make_sharpened if host_stage else make_plain
        generate(streamed, pipeline, warm_up, seed, window)
        pipeline.set_progress_bar_config(desc=label)
        start = time.perf_counter()
        frames = generate(streamed, pipeline, request, seed, window)
        seconds = time.perf_counter() - start
    return Result(label, frames, seconds, streamed.report, streamed.telemetry)


def make_plain(
    streamed: fmstream.Stream, pipeline: StableVideoDiffusionPipeline, request: dict[str, Any], seed: int, window: int
) -> np.ndarray:
    """The frames as the pipeline gives them."""
    return streamed(**request, generator=torch.Generator().manual_seed(seed)).frames[0]


def make_sharpened(
    streamed: fmstream.Stream, pipeline: StableVideoDiffusionPipeline, request: dict[str, Any], seed: int, window: int
) -> np.ndarray:
    """The frames, decoded some at a time and sharpened on the host with ``window`` of these chunks under way."""
    request = request | {"output_type": "latent"}
    latents = streamed(**request, generator=torch.Generator().manual_seed(seed)).frames
    decode = fmstream.LatentLoop(
        lambda chunk: pipeline.decode_latents(chunk, chunk.shape[1], chunk.shape[1]),
        sharpen,
        window,
        telemetry=streamed.telemetry,
    )
    with torch.no_grad():
        video = torch.cat(decode.run(latents.split(CHUNK_FRAMES, dim=1)), dim=2)
    return pipeline.video_processor.postprocess_video(video, output_type="np")[0]


def sharpen(chunk: torch.Tensor) -> torch.Tensor:
    """Sharpen frames of shape (1, 3, frames, height, width), of one thread and without the interpreter's lock."""
    frames = chunk[0].transpose(0, 1).contiguous().numpy()
    sharp = np.stack([amplify_details(frame, LEVELS, EDGE, GAIN) for frame in frames], axis=1)
    return torch.from_numpy(sharp).unsqueeze(0)


@numba.njit(nogil=True)
def amplify_details(frame: np.ndarray, levels: int, edge: float, gain: float) -> np.ndarray:
    """Amplify what smoothing takes away at scales of 1, 2, 4, ... pixels; it stops at edges, so none gets a halo.

    The wavelets are the edge-avoiding ones of Dammertz and others (2010), with 1 / (1 + x^2) in place of exp(-x^2).
    """
    taps = np.array([1, 4, 6, 4, 1], np.float32)
    channels, height, width = frame.shape
    sharp, fine = frame.copy(), frame.copy()
    smooth = np.empty_like(frame)
    mean = np.empty(channels, np.float32)
    for level in range(levels):
        apart = 1 << level
        for y in range(height):
            for x in range(width):
                mean[:] = 0
                weights = np.float32(0)
                for v in range(5):
                    row = min(max(y + (v - 2) * apart, 0), height - 1)
                    for u in range(5):
                        column = min(max(x + (u - 2) * apart, 0), width - 1)
                        difference = np.float32(0)
                        for channel in range(channels):
                            difference += abs(fine[channel, row, column] - fine[channel, y, x])
                        ratio = difference / np.float32(channels * edge)
                        weight = taps[v] * taps[u] / (1 + ratio * ratio)
                        weights += weight
                        for channel in range(channels):
                            mean[channel] += weight * fine[channel, row, column]
                for channel in range(channels):
                    smooth[channel, y, x] = mean[channel] / weights
                    sharp[channel, y, x] += (gain - 1) * (fine[channel, y, x] - smooth[channel, y, x])
        fine, smooth = smooth, fine
    return sharp


def forget_files(checkpoint: Path) -> None:
    """Ask the system to drop the checkpoint from its page cache, so that reads come from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in checkpoint.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def find_differences(results: list[Result]) -> Iterator[str]:
    """A sentence for each run whose frames are not those of the first, bit for bit."""
    wanted = results[0]
    for result in results[1:]:
        if not np.array_equal(result.frames, wanted.frames):
            unequal = np.count_nonzero(result.frames != wanted.frames)
            largest = np.abs(result.frames - wanted.frames).max()
            yield (
                f"{result.label} changed the video: {unequal} of {wanted.frames.size} values differ from "
                f"{wanted.label}, by up to {largest:.3g}"
            )


def save_video(frames: np.ndarray, fps: int, folder: Path) -> str:
    """Write the frames as MP4, or as GIF where there is no ffmpeg; returns the file's name."""
    pixels = (frames * 255).round().astype(np.uint8)
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        first, *rest = (Image.fromarray(frame) for frame in pixels)
        first.save(folder / "video.gif", save_all=True, append_images=rest, duration=1000 // fps, loop=0)
        return "video.gif"
    size = pixels.shape[2], pixels.shape[1]
    writer = imageio_ffmpeg.write_frames(str(folder / "video.mp4"), size, fps=fps, macro_block_size=2)
    writer.send(None)
    for frame in pixels:
        writer.send(np.ascontiguousarray(frame))
    writer.close()
    return "video.mp4"


def save_report(result: Result, folder: Path, *, host_stage: bool) -> None:
    """Write the report, the trace for chrome://tracing, and a drawing of two steps, or of the decoding with a stage."""
    telemetry = result.telemetry
    result.report.save(folder / "report.json")
    save_chrome_trace(telemetry.spans, folder / "trace.json")
    if host_stage:
        save_timeline_png(telemetry.spans, telemetry.passes, folder / "timeline.png", seconds=find_decoding(telemetry))
    else:
        steps = [record for record in telemetry.passes if record.root == result.denoiser.root]
        save_timeline_png(telemetry.spans, steps, folder / "timeline.png")


def find_decoding(telemetry: Telemetry) -> tuple[float, float]:
    """From the last step to the end of the last call of the stage, in seconds since the first record."""
    first = min(record.start for record in [*telemetry.spans, *telemetry.passes])
    stages = [span for span in telemetry.spans if span.lane.startswith("host")]
    last = [span for span in stages if span.name == "item 0, round 0"][-1]
    decoding = [record for record in telemetry.passes if record.end <= last.start][-1]
    return decoding.start - first, stages[-1].end - first


def make_table(results: list[Result]) -> Table:
    """The runs side by side; "sync" is the one that the speedup is over.

    The bound of a step is max(the step of the unlimited run, streamed bytes / link rate).
    """
    [slowest] = [result for result in results if result.label == "sync"]
    alone = results[0].denoiser.step_seconds
    table = Table(title="the same video, three ways", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "frames/s", "step s", "bound s", "step/bound", "speedup", "weights GiB", "peak RSS GiB"):
        table.add_column(heading, justify="right" if heading else "left")
    for result in results:
        row = result.denoiser
        bound = max(alone, row.link_seconds or 0.0)
        table.add_row(
            result.label,
            f"{result.frames_per_second:.3f}",
            f"{row.step_seconds:.3f}",
            f"{bound:.3f}",
            f"{row.step_seconds / bound:.3f}",
            f"{slowest.seconds / result.seconds:.2f}x",
            f"{result.report.memory_bytes / 2**30:.3f}",
            f"{result.report.peak_rss_bytes / 2**30:.3f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
