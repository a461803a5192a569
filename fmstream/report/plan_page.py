"""What ``fmstream plan`` found, as numbers, sentences and a table.  No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from fmstream.report.units import format_bytes, format_rate, format_seconds

SCHEMA: Final = 1
PLAIN_WIDTH: Final = 100
NEAR: Final = 0.005
"""Share of its compute time by which a step may last longer and still count as computing alone."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the cost model assumes of a card; rates are bytes or floating-point operations a second.

    ``link_is_measured`` tells whether the link's are from a calibration; the rest are estimates.
    """

    key: str
    name: str
    memory_bytes: int
    link_bytes_per_second: float
    memory_bytes_per_second: float
    gemm_flops: float
    attention_flops: float
    link_is_measured: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is planned for.  ``dtypes`` is bytes of weights by data type; ``step`` says what one step is."""

    target: str
    name: str
    step: str
    num_parameters: int
    weights_bytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Point:
    """Steps with a memory for weights.

    Attributes:
        memory_bytes: fast memory for weights, and ``share`` of all weights.
        bound_seconds: max(compute, what the memory does not hold over the link): no policy can be faster.
        seconds: predicted step by policy; None where a policy cannot work with so little.
        has_room: whether the card has so much beside the activations.
    """

    memory_bytes: int
    share: float
    bound_seconds: float
    seconds: dict[str, float | None]
    has_room: bool


@dataclass(frozen=True, slots=True)
class Played:
    """The runtime itself, played with a memory: what it held for weights, its steady step, what was predicted."""

    memory: str
    policy: str
    weight_bytes: int
    seconds: float
    predicted_seconds: float | None


@dataclass(frozen=True, slots=True)
class PlanPage:
    """The whole page.

    Attributes:
        compute_seconds: a step with all weights on the card; ``link_seconds``: all weights over the link once.
        activation_bytes: the most that a step needs beside the weights.
        room_bytes: what the card has for weights then, 0 where activations leave none.
        knee_bytes: least memory at which the step takes what computing alone takes.
        auto_bytes, auto_seconds: what ``memory="auto"`` takes, and its step; None where there is no room.
        table: points that are printed; ``curve``: points that are drawn, in order of memory.
        played: steps that were played, not only predicted.
    """

    model: ModelFacts
    card: CardFacts
    compute_seconds: float
    link_seconds: float
    activation_bytes: int
    room_bytes: int
    smallest_bytes: int
    knee_bytes: int
    auto_bytes: int | None
    auto_seconds: float | None
    table: tuple[Point, ...]
    curve: tuple[Point, ...]
    played: tuple[Played, ...] = ()

    @property
    def regime(self) -> str:
        """What bounds a step that streams everything: "compute-bound" or "link-bound"."""
        return "compute-bound" if self.compute_seconds >= self.link_seconds else "link-bound"

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies, in the table's order."""
        return tuple(self.table[0].seconds)

    def to_json(self) -> str:
        """As JSON, with what follows from the numbers."""
        ratio = self.compute_seconds / self.link_seconds
        more: dict[str, Any] = {"schema": SCHEMA, "regime": self.regime, "compute_over_link": ratio}
        return json.dumps(more | asdict(self), indent=2)

    def sentences(self) -> Iterator[str]:
        """What follows from the numbers, for people."""
        card, weights = format_bytes(self.card.memory_bytes), self.model.weights_bytes
        if not self.room_bytes:
            yield (
                f"The step needs {format_bytes(self.activation_bytes)} beside its weights, and the card has {card}: it "
                "does not run at this size; take fewer frames, a smaller picture, or a smaller batch."
            )
            return
        if self.auto_bytes is None or self.auto_seconds is None:
            yield (
                f"Activations leave {format_bytes(self.room_bytes)}, but {format_bytes(self.smallest_bytes)} is the "
                "least that works, for the largest module must be there as a whole."
            )
            return
        if self.room_bytes >= weights:
            yield "All weights fit beside the activations: nothing needs to be streamed."
        if self.auto_seconds <= self.compute_seconds * (1 + 2 * NEAR):
            yield (
                f'Streaming is free here: memory="auto" holds {format_bytes(self.auto_bytes)} '
                f"({self.auto_bytes / weights:.1%} of the weights) and leaves the rest to activations: more frames, "
                "larger pictures."
            )
        else:
            over = self.auto_seconds / self.compute_seconds
            yield (
                f"The link bounds the step: with all that is free it lasts {over:.2f} times as long as computing "
                f"alone. Every further GB of memory saves {format_seconds(1e9 / self.card.link_bytes_per_second)} a "
                f"step, up to {format_bytes(self.knee_bytes)}; so would smaller weights or a larger batch."
            )


def render_plan(page: PlanPage) -> str:
    """The page as plain text, lines of at most 100 characters."""
    from rich.console import Group
    from rich.text import Text

    from fmstream.report.layout import facts_table, render

    sentences = (*page.sentences(), _caution(page))
    return render(Group(facts_table(_facts(page)), "", _table(page), "", *map(Text, sentences)), PLAIN_WIDTH)


def _facts(page: PlanPage) -> Iterator[tuple[str, str]]:
    model, card = page.model, page.card
    trust = "the link as measured, the rest estimates" if card.link_is_measured else "estimates, uncalibrated"
    kinds = ", ".join(f"{format_bytes(size)} {dtype}" for dtype, size in model.dtypes.items())
    yield "model", f"{model.target}: {model.name}, {model.num_parameters / 1e9:.2f} billion parameters, {kinds}"
    yield "step", model.step
    yield (
        "card",
        f"{card.name}, {format_bytes(card.memory_bytes)}, link {format_rate(card.link_bytes_per_second)}, "
        f"{card.gemm_flops / 1e12:.0f} TFLOP/s (attention {card.attention_flops / 1e12:.0f}), "
        f"memory {format_rate(card.memory_bytes_per_second)}; {trust}",
    )
    ratio = page.compute_seconds / page.link_seconds
    yield (
        "step time",
        f"computing C {format_seconds(page.compute_seconds)}, all weights over the link S "
        f"{format_seconds(page.link_seconds)}, C/S {ratio:.2f}: {page.regime} where all is streamed",
    )
    room = f"leaves {format_bytes(page.room_bytes)} for weights" if page.room_bytes else "leaves no room for weights"
    yield "activations", f"{format_bytes(page.activation_bytes)} at the peak, which {room}"
    share = page.knee_bytes / page.model.weights_bytes
    yield "knee", f"{format_bytes(page.knee_bytes)} ({share:.1%}): the least memory with which a step takes C"
    if page.auto_bytes is not None and page.auto_seconds is not None:
        yield "auto", f"{format_bytes(page.auto_bytes)}, step {format_seconds(page.auto_seconds)}"
    for played in page.played:
        predicted = (
            "" if played.predicted_seconds is None else f" (predicted {format_seconds(played.predicted_seconds)})"
        )
        yield (
            "played",
            f"memory {played.memory}, {played.policy}: step {format_seconds(played.seconds)}{predicted}, "
            f"{format_bytes(played.weight_bytes)} held for weights",
        )


def _table(page: PlanPage) -> Any:
    from fmstream.report.layout import ruled_table

    table = ruled_table(gap=2)
    for name in ("memory", "of weights", "bound", *page.policies, "on this card"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in page.table:
        steps = ["too little" if s is None else format_seconds(s) for s in point.seconds.values()]
        room = "yes" if point.has_room else "no room"
        row = (format_bytes(point.memory_bytes), f"{point.share:.1%}", format_seconds(point.bound_seconds))
        table.add_row(*row, *steps, room)
    return table


def _caution(page: PlanPage) -> str:
    return (
        "Times come from a cost model of the card and from shapes alone: weights are unknown, kernels are not run, and "
        "the host's own time in Python is left out."
    )
