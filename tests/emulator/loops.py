"""A streaming loop by hand, with one fence left out at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from fmstream import emulator

DEPTH: Final = 2
"""Buffers on the device."""
FAULTS: Final = (
    "compute does not wait for the copy",
    "the event is recorded before the copy",
    "the copy does not wait for the reader",
    "the host overwrites a source in flight",
    "the host reads a result too early",
    "record_stream is left out",
)
LATE = ("late", 1, 2, 3, 4, 5)
"""Ways of execution in which data may show a fault; where all is done at once it hardly ever does."""


def reports_of(fault: str, execution: str | int) -> list[emulator.Report]:
    """What the checker finds in the loop with this fault; none is raised."""
    machine = emulator.reset(execution=execution, check="record", poison=True)  # type: ignore[arg-type]
    _compute(fault)
    return machine.reports


def is_wrong(fault: str, execution: str | int) -> bool:
    """Whether the loop's result differs from the CPU's, with nobody looking."""
    emulator.reset(execution=execution, check=None, poison=True)  # type: ignore[arg-type]
    return not torch.allclose(_compute(fault), expected(), atol=1e-5)


def weights() -> list[torch.Tensor]:
    """Eight square matrices, the same each time."""
    random = torch.Generator("cpu").manual_seed(0)
    return [torch.randn(64, 64, generator=random) / 8 for _ in range(8)]


def tokens() -> torch.Tensor:
    """What they are applied to."""
    return torch.randn(4, 64, generator=torch.Generator("cpu").manual_seed(1))


def expected() -> torch.Tensor:
    """The result on the CPU."""
    y = tokens()
    for weight in weights():
        y = torch.tanh(y @ weight)
    return y


def _compute(fault: str) -> torch.Tensor:
    with torch.no_grad(), emulator.host_guard():
        if fault == "record_stream is left out":
            return use_side_allocations(weights(), record=False)
        return stream_weights(weights(), fault)


def stream_weights(homes: Sequence[torch.Tensor], fault: str = "") -> torch.Tensor:
    """The loop of any streaming runtime, two buffers deep, with one of `FAULTS` or none."""
    emu: Any = torch.get_device_module("emu")
    main, side = emu.current_stream(), emu.Stream()
    pinned = [home.pin_memory() for home in homes]
    buffers = [torch.empty_like(pinned[0], device="emu") for _ in range(DEPTH)]
    ready, freed = [emu.Event() for _ in range(DEPTH)], [emu.Event() for _ in range(DEPTH)]
    load = _loader(emu, side, pinned, buffers, ready, freed, fault)
    side.wait_stream(main)
    y = tokens().to("emu")
    for index in range(DEPTH):
        load(index)
    for index in range(len(pinned)):
        slot = index % DEPTH
        if fault != "compute does not wait for the copy":
            main.wait_event(ready[slot])
        y = torch.tanh(y @ buffers[slot])
        freed[slot].record(main)
        if index + DEPTH < len(pinned):
            load(index + DEPTH)
        if fault == "the host overwrites a source in flight" and index == 0:
            pinned[2].zero_()
    result = torch.empty(y.shape).pin_memory()
    result.copy_(y, non_blocking=True)
    if fault != "the host reads a result too early":
        main.synchronize()
    return result.clone()


def _loader(
    emu: Any,
    side: Any,
    homes: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    ready: Sequence[Any],
    freed: Sequence[Any],
    fault: str,
) -> Callable[[int], None]:
    def load(index: int) -> None:
        slot = index % DEPTH
        early = fault == "the event is recorded before the copy"
        with emu.stream(side):
            if fault != "the copy does not wait for the reader":
                side.wait_event(freed[slot])
            if early:
                ready[slot].record(side)
            buffers[slot].copy_(homes[index], non_blocking=True)
            if not early:
                ready[slot].record(side)

    return load


def use_side_allocations(homes: Sequence[torch.Tensor], *, record: bool) -> torch.Tensor:
    """Weights allocated on the copy stream, read on the main one, and freed by their last reference."""
    emu: Any = torch.get_device_module("emu")
    main, side = emu.current_stream(), emu.Stream()
    pinned = [home.pin_memory() for home in homes]
    y = tokens().to("emu")
    for home in pinned:
        with emu.stream(side):
            weight = home.to("emu", non_blocking=True)
        main.wait_stream(side)
        if record:
            weight.record_stream(main)
        y = torch.tanh(y @ weight)
        del weight
    return y.cpu()
