"""How fast large copies to and from an accelerator are: a short look, for the doctor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from statistics import median
from typing import Final

import torch

from fmstream.device.accelerator import Accelerator
from fmstream.doctor.measured import LinkRates
from fmstream.doctor.spans import enqueue_copies

COPY_BYTES: Final = 64 << 20
"""Large enough that what a copy costs beside its bytes does not show."""
LOOKS: Final = 3
LOOK_SECONDS: Final = 0.1
MAX_COPIES: Final = 32


def measure_copies(device: Accelerator, sample: Callable[[], None], num_bytes: int = COPY_BYTES) -> LinkRates:
    """Medians of a few looks at copies of one size; ``sample`` is called while some are under way.

    Raises ``RuntimeError`` where the device or the host has no room, or the driver pins nothing.
    """
    copies = _Copies(device, num_bytes)
    with closing(copies):
        pinned_in = copies.rate(copies.card, copies.pinned, sample)
        pinned_out = copies.rate(copies.pinned, copies.card, sample)
        both_in, both_out = copies.rates_of_both(sample)
        pageable_in = copies.rate(copies.card, copies.pageable, sample)
        pageable_out = copies.rate(copies.pageable, copies.card, sample)
    return LinkRates(pinned_in, pinned_out, pageable_in, pageable_out, both_in, both_out)


class _Copies:
    def __init__(self, device: Accelerator, num_bytes: int) -> None:
        self._device = device
        self._out = device.module.Stream(device=device.torch_device)
        self._num_bytes = num_bytes
        self._enqueue = partial(enqueue_copies, device)
        self.card = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._other_card = torch.empty_like(self.card)
        self.pageable = torch.zeros(num_bytes, dtype=torch.uint8)
        self._blocks = [device.pins.allocate(num_bytes) for _ in range(2)]
        self.pinned, self._other_pinned = (block.tensor[:num_bytes] for block in self._blocks)
        if not all(block.pinned for block in self._blocks):
            self.close()
            raise RuntimeError("the driver pins no memory")
        device.let_copies_wait()
        self._out.wait_stream(device.current_stream())

    def close(self) -> None:
        self._out.synchronize()
        for block in self._blocks:
            self._device.pins.free(block)

    def rate(self, target: torch.Tensor, source: torch.Tensor, sample: Callable[[], None]) -> float:
        """Bytes a second from one buffer to another."""
        stream = self._device.copies
        one = self._enqueue(stream, target, source, 1).seconds()
        count = self._count(one)
        taken = []
        for _ in range(LOOKS):
            span = self._enqueue(stream, target, source, count)
            sample()
            taken.append(span.seconds())
        return count * self._num_bytes / median(taken)

    def rates_of_both(self, sample: Callable[[], None]) -> tuple[float, float]:
        """Bytes a second in and out, each while copies go the other way for all of its time."""
        copies, other = self._device.copies, self._out
        inward, outward = (self.card, self.pinned), (self._other_pinned, self._other_card)
        count = self._count(self._enqueue(copies, *inward, 1).seconds())
        rates = []
        for (stream, measured), (beside, noise) in (
            ((copies, inward), (other, outward)),
            ((other, outward), (copies, inward)),
        ):
            taken = []
            for _ in range(LOOKS):
                # Enqueued first and twice as much, so that it covers what is measured.
                covering = self._enqueue(beside, *noise, 2 * count)
                span = self._enqueue(stream, *measured, count)
                sample()
                taken.append(span.seconds())
                covering.seconds()
            rates.append(count * self._num_bytes / median(taken))
        return rates[0], rates[1]

    def _count(self, one_seconds: float) -> int:
        return max(2, min(MAX_COPIES, int(LOOK_SECONDS / max(one_seconds, 1e-6))))
