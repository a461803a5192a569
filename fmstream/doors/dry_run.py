"""One step of a real-size model on an emulated card: shapes, bytes and virtual time, in seconds and little memory.

Of the package only this module and ``validate`` know the emulator.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fmstream import emulator
from fmstream.actors.gathers import Gathers, Ids
from fmstream.config import StreamConfig
from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.trace import Trace
from fmstream.doors.subjects import Subject
from fmstream.emulator.cards import Card
from fmstream.errors import ConfigError
from fmstream.payloads.embeddings import host_ids
from fmstream.payloads.session import Session
from fmstream.report.plan_page import CardFacts

AMPLE_BYTES: Final = 1 << 40
"""Memory of a card on which everything fits, and host memory that may be pinned: both are only addresses."""
WARM_STEPS: Final = 6
"""Steps before the one that counts: to learn the order, to take times again twice, and to fill the window."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A step with all weights on the card: its seconds, and the most bytes that it needs beside the weights."""

    seconds: float
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What a planner learns from a streamed pass; ``smallest_bytes`` is the least memory that works."""

    trace: Trace
    costs: Costs
    smallest_bytes: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """A steady streamed step: its seconds, bytes over the link, and fast memory held for weights."""

    seconds: float
    link_bytes: int
    weight_bytes: int


class DryRun:
    """Steps of a subject on one card; each plays on a machine of its own."""

    def __init__(self, card: Card, subject: Subject) -> None:
        self._card = card
        self._subject = subject

    def card_facts(self, key: str) -> CardFacts:
        """What the cost model assumes of the card, which is known as ``key``."""
        card = self._card
        return CardFacts(
            key=key,
            name=card.name,
            memory_bytes=card.memory_bytes,
            link_bytes_per_second=card.h2d_bytes_per_second,
            memory_bytes_per_second=card.memory_bytes_per_second,
            gemm_flops=card.gemm_flops,
            attention_flops=card.attention_flops,
        )

    def resident(self) -> Resident:
        """A step with all weights on the card, whether they have room there or not."""
        with self._machine() as module:
            module.to("emu")
            device = torch.get_device_module("emu")
            held = int(device.memory_allocated())
            self._step(module)
            device.reset_peak_memory_stats()
            return Resident(self._step(module), int(device.max_memory_allocated()) - held)

    def look(self) -> Seen:
        """The trace of a pass whose weights are loaded on demand, and what the link was measured to cost.

        Raises:
            ConfigError: the model has no weights.
        """
        name = type(self._subject.module).__name__
        if next(self._subject.module.parameters(), None) is None:
            raise ConfigError(f"{name} has no weights, so that nothing can be streamed: give a model that has some")
        heard: list[Seen] = []

        def listen(trace: Trace, limits: Limits, costs: Costs) -> Plan:
            heard.append(Seen(trace, costs, session.telemetry.smallest_bytes))
            return cheapest(trace, limits, costs)

        with self._machine() as module, self._session(module, "auto", "one_ahead") as session:
            cheapest, session.policy = session.policy, listen
            session.open()
            self._step(module)
            session.settle_plans()
        if not heard:
            raise ConfigError(f"one step of {name} calls no module with weights: give inputs with which it does")
        return heard[0]

    def streamed(self, memory: int, policy: str) -> Streamed:
        """The steady step of the runtime itself with so much memory for weights, less than all of them take.

        Raises:
            MemoryBudgetError: the memory is less than the least that works.
        """
        with self._machine() as module, self._session(module, memory, policy) as session:
            session.open()
            for _ in range(WARM_STEPS):
                self._step(module)
                session.settle_plans()
            before = emulator.machine().statistics().bytes_in
            seconds = self._step(module)
            executor = session.weights.executor
            held = executor.arena.num_bytes if executor is not None else 0
            return Streamed(seconds, emulator.machine().statistics().bytes_in - before, held)

    @contextmanager
    def _machine(self) -> Iterator[nn.Module]:
        """A new machine with the subject's module in its host's memory."""
        emulator.reset(self._card, execution="dry", capacity=AMPLE_BYTES, keep_timeline=False)
        with ExitStack() as modes:
            modes.enter_context(emulator.dry_host())
            modes.enter_context(torch.no_grad())
            yield without_memory(self._subject.module)
        gc.collect()

    @contextmanager
    def _session(self, module: nn.Module, memory: int | str, policy: str) -> Iterator[Session]:
        config = StreamConfig(policy=policy, memory=memory, device="emu", pinned=AMPLE_BYTES)
        session = Session({"": module}, config)
        session.tables.gather_with(Gathers(inline_bytes=AMPLE_BYTES))  # of this thread alone tensors are dry
        session.tables.read_ids = _ids_or_zeros
        try:
            yield session
        finally:
            with _Unequal():  # type: ignore[no-untyped-call]
                session.close()

    def _step(self, module: nn.Module) -> float:
        args, kwargs = self._subject.inputs(torch.device("emu"))
        device, machine = torch.get_device_module("emu"), emulator.machine()
        device.synchronize()
        began = machine.now
        module(*args, **kwargs)
        device.synchronize()
        return machine.now - began


def _ids_or_zeros(ids: torch.Tensor) -> Ids:
    """Ids, where they are known; which rows are used makes no difference but for duplicates."""
    try:
        return host_ids(ids)
    except emulator.DryValueError:
        return np.zeros(ids.numel(), np.int64)


@contextmanager
def emulated_card(name: str) -> Iterator[Card]:
    """The card of that name, and the emulated device in PyTorch while the context is open.

    Raises:
        ConfigError: no card has that name, or this PyTorch cannot be given the device.
    """
    card = emulator.card(name)
    emulator.install()
    try:
        yield card
    finally:
        emulator.uninstall()


@contextmanager
def unknown_values() -> Iterator[None]:
    """Let host tensors have shapes and no values."""
    with emulator.dry_host(), _Unequal():  # type: ignore[no-untyped-call]
        yield


class _Unequal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes tensors without values for unequal: what may have been written is then copied, as it would be."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except emulator.DryValueError:
            if func is torch.ops.aten.equal.default:
                return False
            raise


def without_memory(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and large buffers have addresses and no memory."""
    own = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    copied = emulator.dry_parameters(copy.deepcopy(module, dict(own)))
    for part in copied.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(part, name, torch.zeros_like(value, device="emu"))
    return copied
