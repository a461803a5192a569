"""This runtime on an emulated card: the steady step of a streamed model, in virtual time."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

import fmstream
from fmstream import emulator, policies
from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.policy import registry
from fmstream.core.trace import Call, Trace
from fmstream.doors.stream import Stream
from fmstream.emulator.cards import Card
from fmstream.payloads.passes import Pass

HOOK_SECONDS: Final = 15e-6
"""Host time that is charged for each call of a module that owns parameters: the bar of the benchmark ``hooks``."""
WARM_STEPS: Final = 6
"""Steps before the one that counts: to learn the order, to take times again twice, and to fill the window."""


@dataclass(frozen=True, slots=True)
class Step:
    """A steady step.

    Attributes:
        seconds: from the input's copy to the output's arrival, as the host sees it.
        compute_seconds, link_seconds: how long either was busy.
        bytes_in: over the link to the device.
        reserved_bytes, allocated_bytes: the most that the allocator took from the card, and gave out, since the model
            was streamed.
        weight_bytes: fast memory for weights.
        output: what the step returned, on the CPU.
    """

    seconds: float
    compute_seconds: float
    link_seconds: float
    bytes_in: int
    reserved_bytes: int
    allocated_bytes: int
    weight_bytes: int
    output: Tensor


def resident_step(card: Card, model: nn.Module, call: Callable[[nn.Module], Tensor]) -> Step:
    """A step of the whole model on a card that has room for it."""
    emulator.reset(card, check=None, capacity=8 * card.memory_bytes)
    on_card = copy.deepcopy(model).to("emu")
    with torch.no_grad():
        call(on_card)
        return _measured(lambda: call(on_card), 0)


def streamed_step(
    card: Card,
    model: nn.Module,
    call: Callable[[nn.Module], Tensor],
    *,
    memory: int | str,
    execution: str | int = "eager",
    check: str | None = "raise",
    capacity: int | None = None,
    charged: bool = True,
    **options: Any,
) -> Step:
    """A steady step of the model under this runtime, its hooks' host time included where ``charged``."""
    emulator.reset(card, execution=execution, check=check, capacity=capacity, keep_timeline=False)
    charging = hooks_charged() if charged else nullcontext()
    with torch.no_grad(), charging, fmstream.stream(model, device="emu", memory=memory, **options) as handle:
        for _ in range(WARM_STEPS):
            call(model)
            handle._session.settle_plans()
        step = _measured(lambda: call(model), weight_bytes(handle))
    gc.collect()
    return step


def weight_bytes(handle: Stream) -> int:
    """Fast memory that the handle holds for weights."""
    executor = handle._session._executor
    return 0 if executor is None else executor.arena.num_bytes


def _measured(call: Callable[[], Tensor], held: int) -> Step:
    machine = emulator.machine()
    before, began = machine.statistics(), machine.now
    output = call()
    seconds, after = machine.now - began, machine.statistics()
    return Step(
        seconds,
        after.busy["compute"] - before.busy["compute"],
        after.busy["copy in"] - before.busy["copy in"],
        after.bytes_in - before.bytes_in,
        after.peak_reserved,
        after.peak_allocated,
        held,
        output,
    )


@contextmanager
def hooks_charged() -> Iterator[None]:
    """Let the host take its time at each call that a pass follows."""
    enter = Pass.enter

    def charged(current: Pass, site: Any) -> Any:
        if site.params:
            emulator.machine().charge(HOOK_SECONDS, "hook")
        return enter(current, site)

    Pass.enter = charged  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pass.enter = enter  # type: ignore[method-assign]


@contextmanager
def misled(spread: float, seed: int) -> Iterator[None]:
    """Let plans be made from costs that are off: link, latencies and each call by up to ``spread``, by a seed."""
    name = "overlap_async"
    policy = policies.get(name)

    def planning(trace: Trace, limits: Limits, costs: Costs) -> Plan:
        numbers = random.Random(seed)
        return policy(_perturbed(trace, numbers, spread), limits, _off(costs, numbers, spread))

    registry[name] = planning
    try:
        yield
    finally:
        registry[name] = policy


def _off(costs: Costs, numbers: random.Random, spread: float) -> Costs:
    rate, latency, seen = (1 + numbers.uniform(-spread, spread) for _ in range(3))
    return replace(
        costs,
        bytes_per_second=costs.bytes_per_second * rate,
        latency_seconds=costs.latency_seconds * latency,
        seen_seconds=costs.seen_seconds * seen,
    )


def _perturbed(trace: Trace, numbers: random.Random, spread: float) -> Trace:
    """The same calls, each stretch of the clock between their ends and starts made longer or shorter."""
    knots = sorted({0.0, trace.seconds, *(c.start for c in trace.calls), *(c.end for c in trace.calls)})
    clock, at = {knots[0]: knots[0]}, knots[0]
    for before, after in pairwise(knots):
        at += (after - before) * (1 + numbers.uniform(-spread, spread))
        clock[after] = at
    calls = tuple(Call(c.site, c.params, clock[c.start], clock[c.end], c.parent) for c in trace.calls)
    return replace(trace, calls=calls, seconds=clock[trace.seconds])
