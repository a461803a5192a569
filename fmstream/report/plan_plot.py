"""The picture of a plan: step time against memory for weights, a line for each policy.  Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from fmstream.report.plan_page import PlanPage
from fmstream.report.plot import DOTS_PER_INCH, FAINT, INK, make_figure
from fmstream.report.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = ("#2f6db5", "#2a9d74", "#d1495b", "#b8860b", "#7b5ea7", "#5a93d1")
HEADROOM: Final = 1.12
LOW: Final = 0.15
"""Share of the picture's height below which there is no room for two lines under the knee."""


def save_plan_png(page: PlanPage, path: str | Path) -> None:
    """Draw the page's curve into a PNG file.

    Raises ``ConfigError`` if matplotlib is missing.
    """
    figure = make_figure(10, 5.6)
    axes = figure.add_subplot()
    memory = [point.memory_bytes / GIB for point in page.curve]
    for name, colour in zip(page.policies, COLOURS, strict=False):
        steps = [
            (at, s) for at, point in zip(memory, page.curve, strict=True) if (s := point.seconds[name]) is not None
        ]
        if steps:
            axes.plot(*zip(*steps, strict=True), color=colour, linewidth=2, marker="o", markersize=3.5, label=name)
    bound = [point.bound_seconds for point in page.curve]
    axes.plot(memory, bound, color=INK, linewidth=1.3, linestyle=(0, (5, 3)), label="bound: max(C, (W - M) / B)")
    _limit(axes, page, bound)
    _mark(axes, page)
    _shade(axes, page)
    _finish(axes, page)
    figure.legend(loc="outside lower center", ncols=len(page.policies) + 2, frameon=False, fontsize=9)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _limit(axes: Axes, page: PlanPage, bound: list[float]) -> None:
    steps = [s for point in page.curve for s in point.seconds.values() if s is not None]
    axes.set_ylim(0, HEADROOM * max([*steps, *bound]))
    axes.set_xlim(0, page.curve[-1].memory_bytes / GIB)


def _mark(axes: Axes, page: PlanPage) -> None:
    """The knee, with its bytes."""
    at, seconds = page.knee_bytes / GIB, page.compute_seconds
    right, low = at > 0.6 * axes.get_xlim()[1], seconds < LOW * axes.get_ylim()[1]
    axes.plot([at], [seconds], marker="D", markersize=8, color="white", markeredgecolor=INK, zorder=5)
    separator = ", " if low else "\n"
    axes.annotate(
        f"knee {format_bytes(page.knee_bytes)}{separator}step = C = {format_seconds(seconds)}",
        (at, seconds),
        (-36 if right else 14, 0 if low else -14),
        textcoords="offset points",
        ha="right" if right else "left",
        va="center" if low else "top",
        fontsize=9,
        color=INK,
    )


def _shade(axes: Axes, page: PlanPage) -> None:
    """What the card does not have beside the activations."""
    low, high = page.room_bytes / GIB, axes.get_xlim()[1]
    if low >= high:
        return
    label = "no room beside activations"
    axes.axvspan(low, high, color=FAINT, alpha=0.18, linewidth=0, label=label, zorder=0)


def _finish(axes: Axes, page: PlanPage) -> None:
    axes.set_xlabel("memory for weights, GiB")
    axes.set_ylabel("seconds a step")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(color=FAINT, labelcolor=INK)
    axes.grid(color="#dfe3e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(f"{page.model.target} on {page.card.key}", loc="left", fontsize=13, fontweight="bold", color=INK)
    facts = f"{page.model.step}\nC/S {page.compute_seconds / page.link_seconds:.2f}, modelled, uncalibrated"
    axes.set_title(facts, loc="right", fontsize=9, color=INK)
