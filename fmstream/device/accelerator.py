"""An accelerator: streams, events and its memory, through ``torch.get_device_module`` and nothing else.

Every line here is the same for CUDA and for any device that offers streams and events as CUDA does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fmstream.core.plan import Costs
from fmstream.device.device import Part, PartSlab, Slab
from fmstream.device.pinned import Pins
from fmstream.errors import MemoryBudgetError

PROBE_SMALL_BYTES = 256 << 10
"""Copies of that size take longer than the host needs to issue the next one."""
PROBE_LARGE_BYTES = 4 << 20
PROBE_COPIES = 16
"""Copies in a row whose time, less that of one, shows what each occupies the link for."""
PROBE_TIMES = 3

Event = Any
Stream = Any


class Mark(NamedTuple):
    """A point in a stream."""

    stream: int
    event: Event


class DeviceSlab(PartSlab):
    """One allocation of device memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory.data_ptr(), memory.numel())
        self.memory = memory
        self._streams: set[int] = set()

    def used_on(self, stream: Stream) -> None:
        """Let the allocator wait for a stream before the memory, once dropped, is used again."""
        if stream.stream_id not in self._streams:
            self._streams.add(stream.stream_id)
            self.memory.record_stream(stream)

    def _make(self, offset: int, num_bytes: int) -> Part:
        # Through a capsule, so that the part has a storage of its own over the same bytes.
        raw = self.memory[offset : offset + num_bytes]
        capsule = torch._C._to_dlpack(raw)
        return Part(torch._C._from_dlpack(capsule), raw.data_ptr(), raw)


class Accelerator:
    """A device that copies and computes in streams.

    One stream carries all copies to it.
    """

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        index = device.index if device.index is not None else self.module.current_device()
        self.torch_device = torch.device(device.type, index)
        self.copies: Stream = self.module.Stream(device=self.torch_device)
        self.pins = Pins(self.module, self.torch_device, self.settle)
        """Host memory that is registered for this device."""
        self.costs: Costs | None = None
        """What the link does, once it was probed or is known from a calibration."""

    # Memory

    def slab(self, num_bytes: int) -> Slab:
        """Allocate device memory; raises `MemoryBudgetError` that says how much there is."""
        try:
            with torch.inference_mode(False):
                memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise MemoryBudgetError(
                f"{self.torch_device} has no room for {num_bytes} bytes of weights ({self.available_bytes()} bytes are "
                f"free): give a smaller memory="
            ) from error
        slab = DeviceSlab(memory)
        slab.used_on(self.copies)
        self.let_copies_wait()
        return slab

    def available_bytes(self) -> int:
        """Bytes that can still be allocated: what is free, and what the allocator keeps for later."""
        free, _ = self.module.mem_get_info(self.torch_device)
        kept = self.module.memory_reserved(self.torch_device) - self.module.memory_allocated(self.torch_device)
        return int(free) + int(kept)

    def total_bytes(self) -> int:
        """Bytes of the device's memory."""
        return int(self.module.mem_get_info(self.torch_device)[1])

    def allocated_bytes(self) -> int:
        """Bytes of all tensors on the device."""
        return int(self.module.memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        """Begin to look for the most bytes that tensors take."""
        self.module.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        """The most bytes that tensors took since `reset_peak`."""
        return int(self.module.max_memory_allocated(self.torch_device))

    # Order

    def mark(self, stream: Stream | None = None, *, timed: bool = False, blocking: bool = False) -> Mark:
        """A point behind all that has been enqueued on a stream (the caller's present one).

        A thread of the host that waits for a ``blocking`` one sleeps; for another one it may keep its core busy.
        """
        stream = self.module.current_stream(self.torch_device) if stream is None else stream
        event = self.module.Event(enable_timing=timed, **({"blocking": True} if blocking else {}))
        event.record(stream)
        return Mark(stream.stream_id, event)

    def wait(self, mark: Mark, stream: Stream | None = None) -> None:
        """Let a stream (the caller's present one) wait for a mark; the host does not."""
        stream = self.module.current_stream(self.torch_device) if stream is None else stream
        if stream.stream_id != mark.stream:
            stream.wait_event(mark.event)

    def let_copies_wait(self) -> None:
        """Let copies to memory that was just allocated wait for those whose memory it was before."""
        self.wait(self.mark(), self.copies)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Enqueue on the copy stream."""
        with self.module.stream(self.copies):
            yield

    def current_stream(self) -> Stream:
        """The caller's present stream."""
        return self.module.current_stream(self.torch_device)

    def settle(self) -> None:
        """Wait on the host for every copy."""
        self.copies.synchronize()

    def hand_over(self) -> float:
        """What a thread that hands work to another one gives along with it, for `take_over`.

        On a device whose time is virtual every thread of the host has a clock of its own, and this is its time.
        """
        clock = getattr(self.module, "host_clock", None)
        return 0.0 if clock is None else float(clock())

    def take_over(self, moment: float) -> None:
        """Go on from where another thread handed work over; nothing, where time is real."""
        join = getattr(self.module, "join_host_clock", None)
        if join is not None:
            join(moment)

    # Cost

    def probe(self, memory: torch.Tensor) -> Costs:
        """Measure the link with a few copies to device memory that nothing uses yet; takes some milliseconds."""
        large = min(PROBE_LARGE_BYTES, memory.numel())
        small = min(PROBE_SMALL_BYTES, large // 4)
        block = self.pins.allocate(large)
        try:
            self._copy_seconds(block.tensor, memory, large, 1)  # the first use of anything is slow
            one = self._copy_seconds(block.tensor, memory, small, 1)
            each_small = (self._copy_seconds(block.tensor, memory, small, 1 + PROBE_COPIES) - one) / PROBE_COPIES
            first = self._copy_seconds(block.tensor, memory, large, 1)
            each_large = (self._copy_seconds(block.tensor, memory, large, 5) - first) / 4
        finally:
            self.settle()
            self.pins.free(block)
        rate = (large - small) / max(each_large - each_small, 1e-9)
        self.costs = Costs(rate, max(0.0, each_small - small / rate), max(0.0, one - each_small), shared=True)
        return self.costs

    def _copy_seconds(self, source: torch.Tensor, target: torch.Tensor, num_bytes: int, times: int) -> float:
        """Median seconds from the first copy's issue to the last one's end."""
        source, target = source[:num_bytes], target[:num_bytes]
        taken = []
        for _ in range(PROBE_TIMES):
            self.settle()
            with self.copying():
                began = self.mark(self.copies, timed=True)
                for _ in range(times):
                    target.copy_(source, non_blocking=True)
                ended = self.mark(self.copies, timed=True)
            ended.event.synchronize()
            taken.append(began.event.elapsed_time(ended.event) / 1e3)
        return float(sorted(taken)[PROBE_TIMES // 2])
