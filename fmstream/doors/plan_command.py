"""``fmstream plan``: a dry pass of the real-size model, the policies on its trace, and a page of what follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from fmstream.config import parse_size
from fmstream.core.arena import choose_page_bytes, num_pages
from fmstream.core.auto import least_memory
from fmstream.core.plan import Limits
from fmstream.core.policy import Policy
from fmstream.doors.dry_run import DryRun, Resident, Seen, emulated_card
from fmstream.doors.inputs import Size
from fmstream.doors.subjects import Subject, find_subject
from fmstream.errors import MemoryBudgetError
from fmstream.payloads.room import MARGIN, MARGIN_SHARE
from fmstream.policies import get, names
from fmstream.report.plan_page import CardFacts, ModelFacts, PlanPage, Played, Point

POLICY: Final = "overlap_async"
"""The policy of ``memory="auto"`` and of steps that are played."""
TABLE_SHARES: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Memories in the table, as shares of the weights."""
CURVE_SHARES: Final = (0.01, 0.02, 0.03, 0.04, 0.07, 0.15, 0.2, 0.3, 0.35, 0.425, 0.6, 0.675, 0.85, 0.925)
"""Memories that are drawn beside those of the table."""


def make_page(
    target: str,
    gpu: str,
    size: Size,
    *,
    memory: str | None = None,
    verify: bool = False,
    drawn: bool = False,
    calibration: str | None = None,
) -> PlanPage:
    """What streaming would give for a model on a card.

    Args:
        target: see `find_subject`.
        gpu: name of a card that can be emulated.
        size: of the step.
        memory: for weights: bytes, "6GiB", "50%" or "auto"; the runtime is then played with it.
        verify: whether the runtime is played with "auto" too.
        drawn: whether more points are looked at, for a picture.
        calibration: file with the rates of the card's link as they were measured; None takes the estimates.

    Raises:
        ConfigError: the target or the card is not known, the calibration is of another card, or a size means nothing
            to the model.
        MemoryBudgetError: ``memory`` is less than the least that works.
    """
    with emulated_card(gpu, calibration) as card:
        subject = find_subject(target, size)
        model = _describe(subject)
        asked = [] if memory is None else [memory]
        asked += ["auto"] if verify and "auto" not in asked else []
        given = [_bytes(text, model.weights_bytes) for text in asked]
        dry = DryRun(card, subject, link_is_measured=calibration is not None)
        desk = Desk(dry.card_facts(gpu), dry.resident(), dry.look())
        played = tuple(_play(dry, desk, *pair) for pair in zip(asked, given, strict=True))
        return desk.page(model, played, CURVE_SHARES if drawn else ())


def _bytes(memory: str, weights_bytes: int) -> int | None:
    return None if memory == "auto" else parse_size(memory, of=weights_bytes, name="memory")


def _describe(subject: Subject) -> ModelFacts:
    parameters = list(subject.module.parameters())
    dtypes: Counter[str] = Counter()
    for parameter in parameters:
        dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel() * parameter.element_size()
    return ModelFacts(
        target=subject.name,
        name=type(subject.module).__name__,
        step=subject.step,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weights_bytes=dtypes.total(),
        dtypes=dict(dtypes.most_common()),
    )


def _play(dry: DryRun, desk: Desk, memory: str, given: int | None) -> Played:
    """Play the runtime; with "auto" it has what the card leaves, as it would find out there."""
    wanted = desk.automatic() if given is None else given
    if wanted is None:
        raise MemoryBudgetError(
            f"memory={memory!r}: activations leave {desk.room_bytes} bytes of the card, and {desk.seen.smallest_bytes} "
            "is the least that works: take a smaller step, or give the memory in bytes"
        )
    if wanted >= desk.weights_bytes:  # nothing streams
        return Played(memory, POLICY, desk.weights_bytes, desk.resident.seconds, desk.resident.seconds)
    streamed = dry.streamed(wanted, POLICY)
    return Played(memory, POLICY, streamed.weight_bytes, streamed.seconds, desk.predict(POLICY, wanted))


class Desk:
    """Where the policies are asked about one trace."""

    def __init__(self, card: CardFacts, resident: Resident, seen: Seen) -> None:
        self.card = card
        self.resident = resident
        self.seen = seen
        self.weights_bytes = seen.trace.num_bytes
        """Of the weights as they lie in fast memory."""
        needed = int(resident.activation_bytes * MARGIN + card.memory_bytes * MARGIN_SHARE)
        self.room_bytes = max(0, card.memory_bytes - needed)
        self._predicted: dict[tuple[str, int], float | None] = {}

    def limits(self, memory_bytes: int) -> Limits:
        """What a plan for so much memory must keep to: whole pages, no more than the weights take."""
        page = choose_page_bytes(max(1, min(memory_bytes, self.weights_bytes)))
        all_fits = memory_bytes >= self.weights_bytes
        frames = num_pages(self.weights_bytes, page) if all_fits else memory_bytes // page
        return Limits(memory_bytes=frames * page, page_bytes=page)

    def predict(self, policy: str, memory_bytes: int) -> float | None:
        """Seconds of a steady step; None where the policy cannot work with so little."""
        key = policy, memory_bytes
        if key not in self._predicted:
            self._predicted[key] = self._predict(policy, memory_bytes)
        return self._predicted[key]

    def _predict(self, policy: str, memory_bytes: int) -> float | None:
        make: Policy = get(policy)
        try:
            return make(self.seen.trace, self.limits(memory_bytes), self.seen.costs).predicted.seconds
        except MemoryBudgetError:
            return None

    def least(self, memory_bytes: int) -> int | None:
        """What a step can make use of, of so much memory; None where even that is too little."""
        try:
            return least_memory(self.seen.trace, self.limits(memory_bytes), self.seen.costs, get(POLICY))
        except MemoryBudgetError:
            return None

    def automatic(self) -> int | None:
        """What ``memory="auto"`` takes on the card."""
        return self.least(self.room_bytes) if self.room_bytes else None

    def point(self, memory_bytes: int) -> Point:
        """All policies with so much memory."""
        missing = max(0, self.weights_bytes - memory_bytes)
        return Point(
            memory_bytes=memory_bytes,
            share=memory_bytes / self.weights_bytes,
            bound_seconds=max(self.resident.seconds, missing / self.card.link_bytes_per_second),
            seconds={name: self.predict(name, memory_bytes) for name in names()},
            has_room=memory_bytes <= self.room_bytes,
        )

    def page(self, model: ModelFacts, played: tuple[Played, ...], more_shares: Iterable[float]) -> PlanPage:
        """The page, its curve with points at more shares of the weights."""
        knee = self.least(self.weights_bytes)
        assert knee is not None, "all weights in memory are enough memory"
        auto = self.automatic()
        table = {round(share * self.weights_bytes) for share in TABLE_SHARES}
        if 0 < self.room_bytes < self.weights_bytes:
            table.add(self.room_bytes)
        curve = table | {round(share * self.weights_bytes) for share in more_shares} | {knee}
        points = {memory: self.point(memory) for memory in sorted(curve)}
        return PlanPage(
            model=model,
            card=self.card,
            compute_seconds=self.resident.seconds,
            link_seconds=self.weights_bytes / self.card.link_bytes_per_second,
            activation_bytes=self.resident.activation_bytes,
            room_bytes=self.room_bytes,
            smallest_bytes=self.seen.smallest_bytes,
            knee_bytes=knee,
            auto_bytes=auto,
            auto_seconds=None if auto is None else self.predict(POLICY, auto),
            table=tuple(points[memory] for memory in sorted(table)),
            curve=tuple(points.values()),
            played=played,
        )
