"""The lanes of a device: its streams, or on the CPU the one order in which everything is done at once."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

from fmstream.core.order import Lane
from fmstream.device.accelerator import Accelerator, DeviceSlab, Stream
from fmstream.device.device import CpuDevice, Device, Slab
from fmstream.device.memory import private_memory
from fmstream.device.pinned import PinnedBlock

KEPT_EVENTS: Final = 512
"""Points of a lane that are remembered one by one; who waits for an older one waits for the oldest of these."""


class HostBlock(Protocol):
    """Host memory that copies go to and come from."""

    num_bytes: int
    tensor: torch.Tensor
    pinned: bool


class PlainBlock:
    """Host memory beside a device that copies by itself, where nothing is pinned."""

    pinned = True

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(private_memory(num_bytes), dtype=torch.uint8)


class DirectLanes:
    """The CPU: each operation has ended when it returns, so that there is nothing to wait for."""

    def __init__(self, device: CpuDevice) -> None:
        self.torch_device = device.torch_device
        self.lock = threading.RLock()
        self._device = device

    def slab(self, num_bytes: int) -> Slab:
        """Allocate fast memory."""
        return self._device.slab(num_bytes)

    def block(self, num_bytes: int) -> HostBlock:
        """Allocate host memory."""
        return PlainBlock(num_bytes)

    def free(self, block: HostBlock) -> None:
        """Give host memory back; tensors keep it alive."""

    def enter(self, slab: Slab | None) -> None:
        """The caller's stream is the compute lane from now on."""

    def follow(self) -> None:
        """Let the compute lane wait for all that the caller's streams were given."""

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        """Enqueue on a lane."""
        return contextlib.nullcontext()

    def upcoming(self, lane: Lane) -> int:
        """See `fmstream.core.order.Order`."""
        return 1

    def point(self, lane: Lane) -> None:
        """Make a point."""

    def wait(self, lane: Lane, other: Lane, point: int) -> None:
        """See `fmstream.core.order.Order`."""

    def join(self, lane: Lane, point: int) -> None:
        """See `fmstream.core.order.Order`."""

    def has_passed(self, lane: Lane, point: int) -> bool:
        """Whether a lane has got to a point; asking does not wait."""
        return True

    def settle(self) -> None:
        """Let the host wait for every copy."""

    def picking(self, tensor: torch.Tensor, rows: Iterable[int]) -> AbstractContextManager[None]:
        """Operators in the body use these rows of a tensor, by index."""
        return contextlib.nullcontext()

    def available_bytes(self) -> int | None:
        """Bytes of the device's memory that can be taken, None where it has none of its own."""
        return None


class StreamLanes:
    """An accelerator: the user's present stream, and one stream each for copies to it, from it, and for unpacking.

    Attributes:
        lock: held by whoever gives work to the lanes: what another thread's stream is given would not be waited for.
    """

    def __init__(self, device: Accelerator) -> None:
        self.torch_device = device.torch_device
        self.lock = threading.RLock()
        self._device = device
        self._streams: list[Stream] = [
            device.current_stream(),
            device.copies,
            device.module.Stream(device=device.torch_device),
            device.module.Stream(device=device.torch_device),
        ]
        self._before: dict[int, Stream] = {}
        """Streams that were the compute lane."""
        # Both in one: Ctrl-C, or a finaliser, finds either the point or not.
        self._points: list[list[tuple[int, Any]]] = [[] for _ in Lane]
        self._seen = [[0 for _ in Lane] for _ in Lane]

    def slab(self, num_bytes: int) -> Slab:
        """Allocate fast memory; raises `MemoryBudgetError` where there is no room."""
        slab = self._device.slab(num_bytes)
        assert isinstance(slab, DeviceSlab)
        for stream in self._streams:
            slab.used_on(stream)
        for lane in (Lane.OUT, Lane.UNPACK):
            self._device.wait(self._device.mark(), self._streams[lane])
        return slab

    def block(self, num_bytes: int) -> HostBlock:
        """Allocate host memory, pinned if the driver takes it."""
        return self._device.pins.allocate(num_bytes)

    def free(self, block: HostBlock) -> None:
        """Give host memory back, once no copy uses it."""
        self.settle()
        assert isinstance(block, PinnedBlock)
        self._device.pins.free(block)

    def enter(self, slab: Slab | None) -> None:
        """The caller's stream is the compute lane from now on; it follows the one that was."""
        stream, before = self._device.current_stream(), self._streams[Lane.COMPUTE]
        if stream.stream_id == before.stream_id:
            return
        self._before[before.stream_id] = before
        self._device.wait(self._device.mark(before), stream)
        self._streams[Lane.COMPUTE] = stream
        if isinstance(slab, DeviceSlab):
            slab.used_on(stream)

    def follow(self) -> None:
        """Let the compute lane wait for all that the caller's streams were given, those that he has left as well."""
        for stream in self._before.values():
            self._device.wait(self._device.mark(stream), self._streams[Lane.COMPUTE])

    @contextlib.contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Enqueue on a lane."""
        with self._device.module.stream(self._streams[lane]):
            yield

    def upcoming(self, lane: Lane) -> int:
        """See `fmstream.core.order.Order`."""
        points = self._points[lane]
        return points[-1][0] + 1 if points else 1

    def point(self, lane: Lane) -> None:
        """Make a point behind all that a lane was given."""
        points = self._points[lane]
        points.append((self.upcoming(lane), self._device.mark(self._streams[lane]).event))
        if len(points) > 2 * KEPT_EVENTS:
            del points[:KEPT_EVENTS]

    def wait(self, lane: Lane, other: Lane, point: int) -> None:
        """See `fmstream.core.order.Order`."""
        if point > self._seen[lane][other]:
            number, event = self._find(other, point)
            self._streams[lane].wait_event(event)
            self._seen[lane][other] = number

    def join(self, lane: Lane, point: int) -> None:
        """See `fmstream.core.order.Order`."""
        self._find(lane, point)[1].synchronize()

    def has_passed(self, lane: Lane, point: int) -> bool:
        """Whether a lane has got to a point; asking does not wait."""
        return point < self.upcoming(lane) and bool(self._find(lane, point)[1].query())

    def settle(self) -> None:
        """Let the host wait for every copy."""
        for lane in (Lane.IN, Lane.OUT, Lane.UNPACK):
            self._streams[lane].synchronize()

    def picking(self, tensor: torch.Tensor, rows: Iterable[int]) -> AbstractContextManager[None]:
        """Operators in the body use these rows of a tensor, by index; a device that checks order is told of it."""
        told: Any = getattr(self._device.module, "picked_rows", None)
        return contextlib.nullcontext() if told is None else told(tensor, rows)

    def available_bytes(self) -> int | None:
        """Bytes of the device's memory that can be taken."""
        return self._device.available_bytes()

    def _find(self, lane: Lane, point: int) -> tuple[int, Any]:
        """A point, or the oldest behind it that is remembered: its number and event."""
        if point >= self.upcoming(lane):
            self.point(lane)
        points = self._points[lane]
        return points[bisect.bisect_left(points, (point,))]


Lanes = DirectLanes | StreamLanes


def lanes_of(device: Device) -> Lanes:
    """The lanes of a device."""
    if isinstance(device, Accelerator):
        return StreamLanes(device)
    assert isinstance(device, CpuDevice)
    return DirectLanes(device)
