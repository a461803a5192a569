"""Small runs on the emulated device in which every fence of the path to an accelerator is needed.

The device must be installed; `reports_of` puts a new machine in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

import fmstream
from bench import latent_loops
from bench.row_scenarios import ROW_SCENARIOS, watched_gathers
from fmstream import emulator
from fmstream.actors.chunks import MoveChunk, ReadChunk, ScatterChunk
from fmstream.actors.prefetch import PrefetchActor
from fmstream.doors.stream import Stream
from fmstream.emulator.backlog import Execution

WIDTH: Final = 64
DEPTH: Final = 8
SLOW: Final = replace(emulator.card("rtx4070-laptop"), gemm_flops=1e8)
"""A card that the host runs far ahead of, so that it never sees by chance that something is done."""


def reports_of(
    scenario: Callable[[], None],
    broken: Callable[[], AbstractContextManager[Any]] = nullcontext,
    execution: Execution = "eager",
) -> list[emulator.Report]:
    """What the checker says of a scenario."""
    machine = emulator.reset(SLOW, execution=execution, check="record", capacity=64 << 20, poison=True)
    with broken(), watched_reads(), watched_gathers(), torch.no_grad():
        scenario()
    return list(machine.reports)


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``make(what is there)`` stand in place of an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


# Scenarios of the runtime


def stack(seed: int) -> nn.Sequential:
    """Linear layers with a Tanh after each."""
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def num_bytes_of(module: nn.Module) -> int:
    """Bytes of the parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def pinned_passes() -> None:
    """Two roots in turn, all masters pinned, in memory that was used for something else before."""
    roots = {"first": stack(0), "second": stack(1)}
    memory = num_bytes_of(roots["first"]) // 2
    x = torch.ones(4, WIDTH, device="emu")
    _use_memory(2 * memory)
    with fmstream.stream(roots, memory=memory, device="emu") as handle:
        for number in (3, 3, 6, 6, 3):
            for root in roots.values():
                for _ in range(number):
                    x = root(x)
        assert handle.telemetry.passes[-1].streamed_bytes


def _passes(seed: int, number: int, **options: Any) -> None:
    """Passes of one root, each of the output of the one before."""
    module = stack(seed)
    x = torch.ones(4, WIDTH, device="emu")
    with fmstream.stream(module, device="emu", **options):
        for _ in range(number):
            x = module(x)


class _GaveUp(Exception):
    """What the user's code raises amid a pass."""


def broken_off_pass() -> None:
    """A pass that ends amid loads, right before the end of all."""
    module = stack(8)
    x = torch.ones(4, WIDTH, device="emu")
    with fmstream.stream(module, memory="50%", device="emu"):
        for _ in range(9):
            x = module(x)
        with module[DEPTH].register_forward_pre_hook(_give_up), suppress(_GaveUp):
            module(x)


def _give_up(module: nn.Module, args: Any) -> None:
    raise _GaveUp


def resident_passes() -> None:
    """Most of the weights stay in device memory."""
    _passes(5, 4, memory="90%")


def _use_memory(num_bytes: int) -> None:
    """Let a kernel write memory that is free right after, as the host sees it."""
    torch.zeros(num_bytes, dtype=torch.uint8, device="emu")


def staged_passes() -> None:
    """Weights that are not pinned, in a window that is smaller than what one pass needs."""
    _passes(2, 5, memory="40%", pinned=0)


def edited_passes() -> None:
    """Weights that are written while copies of them are on their way."""
    module = stack(3)
    x = torch.ones(4, WIDTH, device="emu")
    with fmstream.stream(module, memory="50%", device="emu"):
        for number in range(12):
            x = module(x)
            module[2 * (number % DEPTH)].weight[0] = 0.5  # type: ignore[index]


def switching_passes() -> None:
    """Two roots in turn, whose last units are followed by no load of their own."""
    roots = {"first": stack(6), "second": stack(7)}
    x = torch.ones(4, WIDTH, device="emu")
    with fmstream.stream(roots, memory="20%", policy="sync", device="emu"):
        for _ in range(8):
            for root in roots.values():
                x = root(x)


class Spacious(nn.Module):
    """Uses memory of its own before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(4)

    def forward(self, x: Tensor) -> Any:
        _use_memory(2 * num_bytes_of(self))
        return self.layers(x)


def _wait_for_plans(handle: Stream) -> None:
    """Let the next pass have the plan that is being made; the device is not waited for."""
    routes = handle._session._routes
    assert routes is not None
    routes.settle()


def side_stream() -> None:
    """Passes in a stream of the user's, in one of which somebody keeps a view of a weight.

    The memory of weights is left to that view, and used for something else once it is gone.
    """
    module = Spacious()
    device = torch.get_device_module("emu")
    side = device.Stream()
    kept: list[Tensor] = []
    x = torch.ones(4, WIDTH, device="emu")
    side.wait_stream(device.current_stream())
    with fmstream.stream(module, memory="50%", device="emu") as handle:
        with side:
            for _ in range(6):
                x = module(x)
                _wait_for_plans(handle)
            layer = module.layers[6]
            hook = layer.register_forward_hook(lambda layer, *_: kept.append(layer.weight[0]))
            x = module(x)
            hook.remove()
            kept.clear()
        _use_memory(num_bytes_of(module) // 2)
        with side:
            module(x)


# A loop that streams by hand


def double_buffered(fences: frozenset[str]) -> None:
    """Weights go through two buffers; ``fences`` are those that are kept."""
    device = torch.get_device_module("emu")
    side, main = device.Stream(), device.current_stream()
    _use_memory(8 * WIDTH * WIDTH)
    masters = [torch.randn(WIDTH, WIDTH).pin_memory() for _ in range(DEPTH)]
    buffers = [torch.empty(WIDTH, WIDTH, device="emu") for _ in range(2)]
    ready, freed = ([device.Event() for _ in range(2)] for _ in range(2))
    if "new memory" in fences:
        side.wait_stream(main)

    def load(number: int) -> None:
        at = number % 2
        with device.stream(side):
            if "uses" in fences:
                side.wait_event(freed[at])
            if "mark behind" not in fences:
                ready[at].record(side)
            buffers[at].copy_(masters[number], non_blocking=True)
            if "mark behind" in fences:
                ready[at].record(side)

    y = torch.ones(2, WIDTH, device="emu")
    load(0)
    load(1)
    for number in range(DEPTH):
        if "ready" in fences:
            main.wait_event(ready[number % 2])
        y = torch.tanh(y @ buffers[number % 2])
        freed[number % 2].record(main)
        if number + 2 < DEPTH:
            load(number + 2)
        if number == 0:
            with emulator.host_guard():
                if "master kept" not in fences:
                    masters[2].zero_()
    _read_back(y, "result" in fences)
    _freed_elsewhere(y, "stream recorded" in fences)


def _read_back(y: Tensor, waits: bool) -> None:
    """Copy a result to the host and look at it."""
    result = torch.empty(y.shape).pin_memory()
    result.copy_(y, non_blocking=True)
    if waits:
        torch.get_device_module("emu").current_stream().synchronize()
    with emulator.host_guard():
        result.sum()


def _freed_elsewhere(y: Tensor, recorded: bool) -> None:
    """Memory of one stream that another one uses, dropped and taken again."""
    device = torch.get_device_module("emu")
    side, main = device.Stream(), device.current_stream()
    for _ in range(2):
        with device.stream(side):
            weight = torch.zeros(WIDTH, WIDTH, device="emu")
        main.wait_stream(side)
        torch.mm(y, weight)
        if recorded:
            weight.record_stream(main)
        del weight


PLAIN_FENCES: Final = ("ready", "mark behind", "uses", "new memory", "master kept", "result", "stream recorded")
_kept = set(PLAIN_FENCES)


def by_hand() -> None:
    """The loop with the fences that stand at present."""
    double_buffered(frozenset(_kept))


@contextmanager
def without_fence(name: str) -> Iterator[None]:
    _kept.discard(name)
    try:
        yield
    finally:
        _kept.add(name)


SCENARIOS: Final[tuple[Callable[[], None], ...]] = (
    pinned_passes,
    broken_off_pass,
    resident_passes,
    switching_passes,
    staged_passes,
    side_stream,
    by_hand,
    *ROW_SCENARIOS,
    *latent_loops.SCENARIOS,
)
"""Those above, in each of which the checker finds nothing."""


# Reads by the prefetch actor


def _spans(chunk: MoveChunk | ReadChunk | ScatterChunk) -> Sequence[tuple[int, int]]:
    parts = [chunk.part] if isinstance(chunk, ReadChunk) else chunk.parts
    return [(part.dst, part.num_bytes) for part in parts]


@contextmanager
def watched_reads() -> Iterator[None]:
    """Let the checker see what the prefetch actor writes to pinned memory, which is done past PyTorch."""

    def seen(carry_out: Any) -> Any:
        def carrying(chunk: Any, *args: Any) -> None:
            emulator.machine().host_access((), _spans(chunk), "a read to staging")
            carry_out(chunk, *args)

        return carrying

    def seen_here(carry_out: Any) -> Any:
        def carrying(actor: PrefetchActor, ticket: int, chunk: MoveChunk, name: str) -> None:
            emulator.machine().host_access((), _spans(chunk), "a copy to staging")
            carry_out(actor, ticket, chunk, name)

        return carrying

    with (
        replaced(MoveChunk, "carry_out", seen),
        replaced(ReadChunk, "carry_out", seen),
        replaced(ScatterChunk, "carry_out", seen),
        replaced(PrefetchActor, "_carry_out_here", seen_here),
    ):
        yield
