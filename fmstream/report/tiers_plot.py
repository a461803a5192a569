"""A picture of where keys and values lay over a run, by tier.  Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from fmstream.errors import ConfigError
from fmstream.report.plot import DOTS_PER_INCH, FAINT, INK, SHADES, make_figure
from fmstream.report.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB: Final = 1 << 20
DEVICE, HOST, FILE = SHADES["compute"][0], SHADES["copy"][0], SHADES["host"][0]

LABEL_GAP: Final = 0.055
"""Least distance of two names, in parts of the highest line."""


class Occupancy(Protocol):
    """Where pages lay as a pass began; passes are numbered from 0."""

    @property
    def step(self) -> int:
        """The pass."""
        ...

    @property
    def frame_pages(self) -> int:
        """Pages in fast memory."""
        ...

    @property
    def host_pages(self) -> int:
        """Pages with a home in host memory."""
        ...

    @property
    def file_pages(self) -> int:
        """Pages with a home in the file."""
        ...


@dataclass(frozen=True, slots=True)
class Story:
    """What the passes were about.

    Attributes:
        page_bytes: bytes of a page.
        token_bytes: bytes of keys and values of one token, over all layers.
        pool_bytes: fast memory for keys and values.
        tokens: tokens that were held as each pass began.
        num_prefill: passes in which the prompt was read.
    """

    page_bytes: int
    token_bytes: int
    pool_bytes: int
    tokens: Sequence[int]
    num_prefill: int


def save_tiers_png(samples: Sequence[Occupancy], story: Story, path: str | Path) -> None:
    """Draw how much of the keys and values lay in which tier as each pass began, beside how much there was.

    Raises:
        ConfigError: matplotlib is missing, or there is no sample.
    """
    if not samples:
        raise ConfigError("no pass was sampled: nothing to draw; page keys and values in at least one pass")
    figure = make_figure(10, 4.6)
    axes = figure.add_subplot()
    steps = [sample.step for sample in samples]
    lines = list(_lines(samples, story))
    highest = max(max(line.values) for line in lines)
    for line in lines:
        axes.plot(steps, line.values, color=line.shade, linewidth=line.width, linestyle=line.dashes, zorder=4)
    axes.fill_between(steps, lines[0].values, color=DEVICE, alpha=0.25, linewidth=0)
    axes.axhline(story.pool_bytes / MIB, color=DEVICE, linewidth=0.8, linestyle=(0, (1, 2)), zorder=3)
    _name_lines(axes, steps[-1], lines, highest)
    _finish(axes, steps, highest, story)
    share = story.pool_bytes / (story.tokens[-1] * story.token_bytes)
    title: dict[str, Any] = {"loc": "left", "fontsize": 13, "fontweight": "bold", "color": INK}
    axes.set_title(f"{share:.1%} of the keys and values on the device", **title)
    facts = f"pool {format_bytes(story.pool_bytes)}   context {story.tokens[-1]} tokens"
    axes.set_title(facts, loc="right", fontsize=10, color=INK)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


class _Line(NamedTuple):
    name: str
    values: list[float]
    shade: str
    width: float = 2.0
    dashes: Any = "solid"


def _lines(samples: Sequence[Occupancy], story: Story) -> Iterator[_Line]:
    """A line in MiB for each tier that was used, the device's first, and one for all there was."""
    scale, last = story.page_bytes / MIB, len(story.tokens) - 1
    yield _Line("in frames on the device", [sample.frame_pages * scale for sample in samples], DEVICE)
    host, file = [sample.host_pages * scale for sample in samples], [sample.file_pages * scale for sample in samples]
    if any(host):
        yield _Line("home in host memory", host, HOST)
    if any(file):
        yield _Line("home in the file", file, FILE)
    whole = [story.tokens[min(sample.step, last)] * story.token_bytes / MIB for sample in samples]
    yield _Line("all keys and values", whole, INK, 1.4, (0, (4, 3)))


def _name_lines(axes: Axes, step: int, lines: Sequence[_Line], highest: float) -> None:
    """Names at the ends of the lines, the lowest first, moved apart where they would overlap."""
    below = -1.0
    for line in sorted(lines, key=lambda line: line.values[-1]):
        below = max(line.values[-1], below + LABEL_GAP * highest)
        where: dict[str, Any] = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(line.name, (step, below), (8, 0), **where, color=line.shade, fontsize=9)


def _finish(axes: Axes, steps: list[int], highest: float, story: Story) -> None:
    edge = story.num_prefill - 0.5
    where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
    if steps[0] < edge < steps[-1]:
        axes.axvline(edge, color=FAINT, linewidth=0.8)
        axes.annotate("reading the prompt", (edge, 1), (-6, -4), **where, ha="right", color=FAINT, fontsize=9)
        axes.annotate("answering", (edge, 1), (6, -4), **where, ha="left", color=FAINT, fontsize=9)
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    axes.set_ylim(0, 1.12 * highest)
    axes.set_xlabel("passes of the model")
    axes.set_ylabel("MiB")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(color=FAINT, labelcolor=INK)
    axes.grid(axis="y", color="#dfe3e8", linewidth=0.6)
    axes.set_axisbelow(True)
