"""Models of real size on emulated cards, dry: the streamed step against its bound and diffusers' leaf level."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

import fmstream
from bench.contract import Bar, Findings, Row, Workplace, register
from bench.streamed import Step, streamed_step
from fmstream import emulator
from fmstream.core.auto import TOLERANCE
from fmstream.core.trace import Trace
from fmstream.doors.dry_run import AMPLE_BYTES, DryRun, Resident, unknown_values, without_memory
from fmstream.doors.inputs import Size
from fmstream.doors.subjects import Subject, find_subject
from fmstream.emulator.cards import Card, card

CLAIM: Final = (
    "Weights of real-size image and video models stream within a few percent of max(C, (W - M) / B) at any memory, and "
    'where compute bounds the step memory="auto" is free with a small part of them.'
)
BARS: Final = {
    "gap_max": Bar(at_most=1.05),
    "auto_over_compute": Bar(at_most=1.01),
    "auto_weight_gb": Bar(at_most=0.15),
    "auto_beyond_floor_gb": Bar(at_most=0.15),
    "slower_than_leaf": Bar(at_most=0.0),
}
COMPUTE_BOUND: Final = 2.0
"""C over S from which memory="auto" is held to be free: long video."""
SHARES: Final = (25, 50, 75)
"""Memory in percent of the weights."""
MOST: Final = 0.95
"""Share of the weights below which some are streamed; others reserve more than all weights take."""
TRIES: Final = 4
"""Times that the memory is lowered until no more is reserved than by another contender."""
LEAF_STEPS: Final = 4
"""The last one counts; by then the order of the modules is known."""
EVEN: Final = 1.0005
"""A step that lasts longer than another by less than this counts as equally long."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its name, and the size of its step."""

    name: str
    target: str
    size: Size


FLUX: Final = Model("Flux 1024x1024", "flux", Size())
WAN: Final = Model("Wan 14B 832x480, 81 frames", "wan2.1-i2v-14b", Size())
WAN_SHORT: Final = Model("Wan 14B 832x480, 5 frames", "wan2.1-i2v-14b", Size(frames=5))
SVD: Final = Model("SVD 1024x576, 14 frames", "svd", Size())
CARDS: Final = ("rtx4070-laptop", "rtx4090", "h200")


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a card, at some memories; ``auto`` and ``leaf``: whether these are played too."""

    model: Model
    card: str
    shares: tuple[int, ...] = SHARES
    auto: bool = True
    leaf: bool = True


FULL: Final = tuple(Case(model, key) for model in (FLUX, WAN, WAN_SHORT, SVD) for key in CARDS)
QUICK: Final = (
    Case(SVD, "rtx4070-laptop", (), leaf=False),
    Case(FLUX, "h200", (50,), auto=False),
)


@register("weights_real_size", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Play each case; nothing is measured by a clock, so two runs give the same digits."""
    emulator.install()
    try:
        return measure(QUICK if place.quick else FULL, place.say)
    finally:
        emulator.uninstall()


def measure(cases: tuple[Case, ...], say: Callable[[str], None]) -> Findings:
    """Rows of all cases, and the worst of them as figures."""
    subjects = {case.model: find_subject(case.model.target, case.model.size) for case in cases}
    rows: list[Row] = []
    for case in cases:
        say(f"{case.model.name} on {case.card}")
        rows += Play(case, subjects[case.model]).rows()
    return Findings(_figures(rows), rows)


def _figures(rows: list[Row]) -> dict[str, float]:
    free = [row for row in rows if row["memory"] == "auto" and row["c_over_s"] >= COMPUTE_BOUND]
    gaps = [row["gap"] for row in rows if "%" in row["memory"]]
    return {
        "gap_max": max(gaps),
        "gap_mean": sum(gaps) / len(gaps),
        "auto_over_compute": max(row["step_s"] / row["c_s"] for row in free),
        "auto_weight_gb": max(row["weight_gb"] for row in free),
        "auto_beyond_floor_gb": max(row["weight_gb"] - row["floor_gb"] for row in free),
        "slower_than_leaf": float(sum(bool(row.get("slower_than_leaf")) for row in rows)),
    }


def floor_bytes(trace: Trace, rate: float, tolerance: float) -> int:
    """Bytes of memory with which alone a pass can take its compute time, but for ``tolerance`` of it.

    The largest module must be there as a whole.  Of what a stretch of calls uses, all must be there when the stretch
    begins that the link cannot bring before the last of these calls begins.
    """
    calls = [(call.start, sum(trace.sizes[p] for p in call.params)) for call in trace.calls]
    floor = float(max((size for _, size in calls), default=0))
    for first, (begun, _) in enumerate(calls):
        used = 0
        for start, size in calls[first:]:
            used += size
            floor = max(floor, used - rate * (start - begun + tolerance * trace.seconds))
    return int(floor)


class Play:
    """One case, played."""

    def __init__(self, case: Case, subject: Subject) -> None:
        self.case = case
        self.subject = subject
        self.card: Card = card(case.card)
        self.weights_bytes = sum(p.numel() * p.element_size() for p in subject.module.parameters())
        self.resident: Resident = DryRun(self.card, subject).resident()

    def rows(self) -> Iterator[Row]:
        """A row for each way of streaming."""
        for share in self.case.shares:
            yield self._row(f"{share}%", self._streamed(f"{share}%"), share / 100 * self.weights_bytes)
        if self.case.auto:
            step, trace = self._streamed("auto"), DryRun(self.card, self.subject).look().trace
            floor = floor_bytes(trace, self.card.h2d_bytes_per_second, TOLERANCE)
            yield self._row("auto", step, step.weight_bytes) | {"floor_gb": floor / 1e9}
        if self.case.leaf:
            yield from self._against_leaf()

    def _against_leaf(self) -> Iterator[Row]:
        """diffusers' leaf level at what it needs, and this runtime with as much reserved from the card."""
        leaf = self._leaf()
        if leaf is None:
            return
        held = leaf.reserved_bytes - self.resident.activation_bytes
        yield self._row("its own", leaf, held, contender="diffusers leaf")
        ours = self._at_reserved(leaf.reserved_bytes, held)
        slower = ours.seconds > EVEN * leaf.seconds
        more = {"slower_than_leaf": slower, "reserved_over_leaf": ours.reserved_bytes / leaf.reserved_bytes}
        yield self._row("as leaf", ours, ours.weight_bytes) | more

    def _row(self, memory: str, step: Step, held: float, contender: str = "fmstream") -> Row:
        rate, compute = self.card.h2d_bytes_per_second, self.resident.seconds
        bound = max(compute, (self.weights_bytes - held) / rate)
        return {
            "model": self.case.model.name,
            "card": self.case.card,
            "contender": contender,
            "memory": memory,
            "w_gb": self.weights_bytes / 1e9,
            "c_s": compute,
            "c_over_s": compute * rate / self.weights_bytes,
            "step_s": step.seconds,
            "bound_s": bound,
            "gap": step.seconds / bound,
            "weight_gb": held / 1e9,
            "link_gb": step.bytes_in / 1e9,
            "reserved_gb": step.reserved_bytes / 1e9,
        }

    def _call(self, module: nn.Module) -> Tensor:
        args, kwargs = self.subject.inputs(torch.device("emu"))
        result = module(*args, **kwargs)[0]
        torch.get_device_module("emu").synchronize()
        assert isinstance(result, Tensor)
        return result

    def _streamed(self, memory: int | str) -> Step:
        """The runtime; a share of the weights may be more than the card has, "auto" is told what it has."""
        capacity = None if memory == "auto" else AMPLE_BYTES
        module = self._module()
        with unknown_values():
            return streamed_step(
                self.card,
                module,
                self._call,
                memory=memory,
                execution="dry",
                capacity=capacity,
                pinned=AMPLE_BYTES,
            )

    def _at_reserved(self, reserved_bytes: int, memory: int) -> Step:
        """The runtime with a memory at which the card's allocator reserves no more than that in all."""
        smallest = fmstream.smallest_memory(self._module())
        memory = min(max(memory, smallest), int(MOST * self.weights_bytes))
        step = self._streamed(memory)
        for _ in range(TRIES):
            excess = step.reserved_bytes - reserved_bytes
            if excess <= 0 or memory <= smallest:
                break
            memory = max(smallest, memory - excess)
            step = self._streamed(memory)
        return step

    def _leaf(self) -> Step | None:
        """diffusers' group offloading, each leaf module a group, copies on a stream; None for other libraries."""
        from diffusers import ModelMixin
        from diffusers.hooks.group_offloading import apply_group_offloading

        if not isinstance(self.subject.module, ModelMixin):
            return None
        machine = emulator.reset(self.card, execution="dry", capacity=AMPLE_BYTES, keep_timeline=False)
        with unknown_values(), torch.no_grad():
            module = without_memory(self.subject.module)
            apply_group_offloading(
                module,
                onload_device=torch.device("emu:0"),
                offload_type="leaf_level",
                use_stream=True,
                record_stream=True,
            )
            for _ in range(LEAF_STEPS - 1):
                self._call(module)
            before, began = machine.statistics(), machine.now
            output = self._call(module)
            seconds, after = machine.now - began, machine.statistics()
        del module
        gc.collect()
        return Step(
            seconds=seconds,
            compute_seconds=after.busy["compute"] - before.busy["compute"],
            link_seconds=after.busy["copy in"] - before.busy["copy in"],
            bytes_in=after.bytes_in - before.bytes_in,
            reserved_bytes=after.peak_reserved,
            allocated_bytes=after.peak_allocated,
            weight_bytes=0,
            output=output,
        )

    def _module(self) -> nn.Module:
        """The model in the memory of a host that has only addresses; what is on the device dies with the machine."""
        emulator.reset(self.card, execution="dry", capacity=AMPLE_BYTES, keep_timeline=False)
        return without_memory(self.subject.module)
