"""Small pictures of latents, written while the loop goes on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fmstream.actors.stages import Job
from fmstream.device.ferry import Crossing
from fmstream.errors import ConfigError
from fmstream.payloads.trips import Crew

LEAST_PIXELS: Final = 256
"""Smaller pictures are enlarged until the longer side has that many."""
END_SECONDS: Final = 10.0
"""How long the end waits for a picture that is being written."""
LIMITS: Final = (0.02, 0.98)
"""Quantiles of a channel that are drawn as black and as full colour."""


class Previews:
    """Writes ``step-0001.png`` and so on into a folder, from a thread of its own.

    While one picture is being made, those that are offered are dropped: the loop never waits, and the pictures are of
    steps in order.

    Args:
        folder: where they go; it is made if it is not there.
        note: told once, in a sentence, if they cannot be written; the loop goes on without.

    Raises:
        ConfigError: the folder cannot be made, or Pillow is missing.
    """

    def __init__(self, folder: str | os.PathLike[str], note: Callable[[str], None]) -> None:
        try:
            import PIL.Image  # noqa: F401 - missing, it is missed now and not in the middle of a run
        except ImportError as error:
            raise ConfigError("previews need Pillow: pip install pillow") from error
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"preview={str(folder)!r} cannot be made a folder ({error.strerror}): give another path"
            ) from error
        self.num_dropped = 0
        self._note = note
        self._failed = False
        self._crew: Crew | None = None
        self._pending: tuple[Crossing, Job] | None = None

    def offer(self, number: int, latents: Tensor) -> None:
        """Draw latents of shape (channels, height, width), unless the picture before is not done yet."""
        if self._failed or not self._is_free():
            self.num_dropped += 1
            return
        if self._crew is None:
            self._crew = Crew(latents.device, 1)
        ferry = self._crew.ferry
        crossing = ferry.leave([latents])

        def work(_lane: str) -> None:
            self._draw(number, ferry.land(crossing))
            ferry.embark(crossing, [None])

        job = Job(work)
        self._pending = crossing, job
        self._crew.pool.submit(job)

    def close(self) -> None:
        """End the thread, once the picture that is being made is there."""
        if self._pending is not None:
            self._pending[1].wait(END_SECONDS)
        crew, self._crew, self._pending = self._crew, None, None
        if crew is not None:
            crew.close()

    def _is_free(self) -> bool:
        if self._pending is None:
            return True
        crossing, job = self._pending
        if not job.done:
            return False
        assert self._crew is not None
        if job.carried_out:
            self._crew.ferry.arrive(crossing)
        self._pending = None
        return True

    def _draw(self, number: int, latents: Tensor) -> None:
        path = self.folder / f"step-{number:04}.png"
        half = path.with_suffix(".part")
        try:
            to_image(latents).save(half, format="PNG")
            half.replace(path)  # whoever looks into the folder sees whole pictures
        except OSError as error:
            self._failed = True
            self._note(f"previews were given up: {path} cannot be written ({error})")


def to_image(latents: Tensor):  # type: ignore[no-untyped-def]  # Pillow is imported where it is used
    """A picture of latents of shape (channels, height, width): the first three channels as red, green and blue.

    Each channel is stretched between its quantiles `LIMITS`, so colours are those of a decoded image by chance only.
    """
    from PIL import Image

    channels = latents[:3].detach().float().nan_to_num()
    channels = channels[[min(index, len(channels) - 1) for index in range(3)]]
    limits = torch.quantile(channels.flatten(1), torch.tensor(LIMITS), dim=1)[..., None, None]
    pixels = ((channels - limits[0]) / (limits[1] - limits[0]).clamp_min(1e-6)).clamp(0, 1)
    image = Image.fromarray((pixels * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
    times = math.ceil(LEAST_PIXELS / max(image.size))
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
