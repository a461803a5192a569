"""Copies to and from an accelerator, timed by the device between events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from fmstream.device.accelerator import Accelerator
from fmstream.doctor.rates import Rate
from fmstream.doctor.spans import Span, enqueue_copies
from fmstream.errors import MemoryBudgetError

MIB: Final = 1 << 20
SAMPLES: Final = 11
BATCH_BYTES: Final = 64 * MIB
MAX_COPIES: Final = 64
"""Copies of one sample move some tens of megabytes, at least two of them and at most so many."""
HELD_BYTES: Final = 256 * MIB
HELD_SECONDS: Final = 3e-3
"""For which the device works at something else while copies are enqueued, lest it waits for the host."""
MAX_HELD: Final = 64
ROOM: Final = 8
"""Of the free memory no buffer takes more than this part."""

PINNED_IN, PINNED_OUT = "to the device, pinned", "from the device, pinned"
BOTH_IN, BOTH_OUT = "to the device, both at once", "from the device, both at once"
PAGEABLE_IN, PAGEABLE_OUT = "to the device, pageable", "from the device, pageable"
Look = Callable[[], None]


class TimedCopies:
    """Buffers on both sides and the ways to time copies between them; close it when done.

    Args:
        device: the accelerator.
        largest: bytes of the largest copy; ``largest`` is less afterwards where there is no room.
        look: called while copies are under way.

    Raises:
        MemoryBudgetError: the device has no room, or the driver pins nothing.
    """

    def __init__(self, device: Accelerator, largest: int, look: Look) -> None:
        self._device = device
        self._look = look
        self._blocks: list[Any] = []
        self.largest = min(largest, max(1, device.available_bytes() // ROOM))
        try:
            self._card, self._other_card = (self._on_device(self.largest) for _ in range(2))
            self._busy = self._on_device(min(HELD_BYTES, self.largest))
            self._pageable = torch.zeros(self.largest, dtype=torch.uint8)
            self._pinned, self._other_pinned = (self._pin() for _ in range(2))
        except torch.OutOfMemoryError as error:
            self.close()
            raise MemoryBudgetError(f"{device.torch_device} has no room for copies of {self.largest} bytes") from error
        except BaseException:
            self.close()
            raise
        self._in, self._out = device.copies, device.module.Stream(device=device.torch_device)
        device.module.synchronize()
        self._num_held = self._how_often()

    def _on_device(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device.torch_device)

    def _pin(self) -> Tensor:
        block = self._device.pins.allocate(self.largest)
        self._blocks.append(block)
        if not block.pinned:
            raise MemoryBudgetError(
                f"the driver pins no {self.largest} bytes of host memory: raise the limit of locked memory, or give a "
                "smaller --largest"
            )
        pinned: Tensor = block.tensor[: self.largest]
        return pinned

    def close(self) -> None:
        """Give all memory back.  Idempotent."""
        self._device.module.synchronize()
        for block in self._blocks:
            self._device.pins.free(block)
        for name in ("_card", "_other_card", "_busy", "_pageable", "_pinned", "_other_pinned"):
            setattr(self, name, None)
        self._blocks.clear()
        self._device.module.empty_cache()

    def rates(self, num_bytes: int) -> Iterator[Rate]:
        """All kinds of copy of one size; what goes both ways at once counts each direction for itself."""
        yield self._one_way(PINNED_IN, num_bytes, self._card, self._pinned)
        yield self._one_way(PINNED_OUT, num_bytes, self._pinned, self._card)
        yield self._both_ways(BOTH_IN, num_bytes, inward=True)
        yield self._both_ways(BOTH_OUT, num_bytes, inward=False)
        yield self._one_way(PAGEABLE_IN, num_bytes, self._card, self._pageable, held=False)
        yield self._one_way(PAGEABLE_OUT, num_bytes, self._pageable, self._card, held=False)

    def _one_way(self, what: str, num_bytes: int, target: Tensor, source: Tensor, *, held: bool = True) -> Rate:
        """The host makes copies of pageable memory itself, so that nothing has to hold them back."""
        count = num_copies(num_bytes)

        def sample() -> float:
            if held:
                self._hold(self._in)
            span = self._enqueue(self._in, num_bytes, target, source, count)
            self._look()
            return span.seconds() / count

        return Rate(what, num_bytes, self._samples(sample))

    def _both_ways(self, what: str, num_bytes: int, *, inward: bool) -> Rate:
        """One direction while the other copies twice as much, so that it does so all the time."""
        count = num_copies(num_bytes)
        ways = ((self._card, self._pinned), (self._other_pinned, self._other_card))
        stream, beside = (self._in, self._out) if inward else (self._out, self._in)
        measured, other = ways if inward else ways[::-1]

        def sample() -> float:
            self._hold(stream)
            self._device.wait(self._device.mark(stream), beside)
            covered = self._enqueue(beside, num_bytes, *other, 2 * count)
            span = self._enqueue(stream, num_bytes, *measured, count)
            self._look()
            seconds = span.seconds() / count
            covered.ended.event.synchronize()
            return seconds

        return Rate(what, num_bytes, self._samples(sample))

    @staticmethod
    def _samples(sample: Callable[[], float]) -> tuple[float, ...]:
        sample()  # the first use of anything is slow
        return tuple(max(sample(), 1e-12) for _ in range(SAMPLES))

    def _enqueue(self, stream: Any, num_bytes: int, target: Tensor, source: Tensor, count: int) -> Span:
        return enqueue_copies(self._device, stream, target[:num_bytes], source[:num_bytes], count)

    def _hold(self, stream: Any) -> None:
        with self._device.module.stream(stream):
            for _ in range(self._num_held):
                self._busy.add_(1)

    def _how_often(self) -> int:
        """How many times something has to be done to keep the device at work while copies are enqueued."""
        self._num_held = 1
        taken = []
        for _ in range(3):
            began = self._device.mark(self._in, timed=True)
            self._hold(self._in)
            taken.append(Span(began, self._device.mark(self._in, timed=True)).seconds())
        return min(MAX_HELD, max(1, math.ceil(HELD_SECONDS / max(median(taken), 1e-9))))


def num_copies(num_bytes: int) -> int:
    """Copies of one sample."""
    return min(MAX_COPIES, max(2, BATCH_BYTES // num_bytes))
