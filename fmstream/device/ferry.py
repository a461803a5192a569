"""Tensors that leave the device for a stage on the host, and come back.

A crossing has four steps.  The thread that computes calls `leave`; a thread of the stage calls `land`, which waits
until the bytes are there, and `embark` with what it made of them; the thread that computes calls `arrive`.  Only the
copy to the device is enqueued by the other thread, on the copy stream: so it begins when the stage ends, whatever the
computing thread is doing.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from fmstream.device.accelerator import Accelerator, Mark
from fmstream.device.device import Part
from fmstream.device.pinned import PinnedBlock
from fmstream.errors import ConfigError

OWN_USES: Final = 2
"""Of a storage that one tensor and one reference in Python refer to."""


class Crossing:
    """One tensor on its way: ``output`` is what left, ``result`` what came back once it did."""

    __slots__ = ("arrival", "clock", "host", "left", "output", "result", "slot", "stream", "target", "version")

    def __init__(self, output: Tensor) -> None:
        self.output = output
        self.result: Tensor | None = None
        self.slot: Slot | None = None
        self.stream = 0
        """That in which it was computed."""
        self.host: Tensor | None = None
        self.left: Mark | None = None
        """Behind the copy to the host."""
        self.target: Tensor | None = None
        """Device memory for the way back."""
        self.arrival: Mark | None = None
        """Behind the copy to the device."""
        self.clock = 0.0
        self.version = 0
        """That of the tensor that the stage is given."""


class Ferry(ABC):
    """Carries tensors to the host and back."""

    @abstractmethod
    def leave(self, box: list[Tensor]) -> Crossing:
        """Send a tensor to the host; it comes in a list of one, so that nobody need hold it besides."""

    @abstractmethod
    def land(self, crossing: Crossing) -> Tensor:
        """The tensor in host memory, once it is there; it is the caller's until `embark`."""

    @abstractmethod
    def embark(self, crossing: Crossing, box: list[Tensor | None]) -> None:
        """Send back what was made of it, in a list of one, or None in that for what left as it left.

        Raises:
            ConfigError: it is no tensor in host memory, or None though the tensor was written.
        """

    @abstractmethod
    def arrive(self, crossing: Crossing) -> Tensor:
        """The result, for the caller's present stream; its place on the ferry is free again."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for every copy."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory up, once every copy is done.  May be called again."""


def open_ferry(device: torch.device) -> Ferry:
    """The ferry of a device.

    Raises:
        ConfigError: the device has no streams.
    """
    if device.type == "cpu":
        return CpuFerry()
    from fmstream.device.opening import open_device

    opened = open_device(device)
    assert isinstance(opened, Accelerator)
    return DeviceFerry(opened)


class CpuFerry(Ferry):
    """Hands tensors over as they are; what somebody else can still see is copied first."""

    def leave(self, box: list[Tensor]) -> Crossing:
        """Take it; copied if the step kept it, or has it from a buffer that it will write again."""
        crossing = Crossing(unshared(box))
        crossing.version = crossing.output._version
        return crossing

    def land(self, crossing: Crossing) -> Tensor:
        """The tensor itself."""
        return crossing.output

    def embark(self, crossing: Crossing, box: list[Tensor | None]) -> None:
        """Take the result; copied if the stage kept it."""
        result = box.pop()
        if result is None:
            check_unwritten(crossing, crossing.output)
        if result is None or result is crossing.output:
            crossing.result = crossing.output
        else:
            check_result(result)
            crossing.result = unshared([result])

    def arrive(self, crossing: Crossing) -> Tensor:
        """The result itself."""
        assert crossing.result is not None
        return crossing.result

    def settle(self) -> None:
        """There are no copies."""

    def close(self) -> None:
        """There is no memory to give up."""


class Slot:
    """A place in pinned memory, as large as the largest tensor that was there."""

    def __init__(self) -> None:
        self.block: PinnedBlock | None = None
        self.part: Part | None = None
        self.returned: Mark | None = None
        """Behind the last copy from it."""


class DeviceFerry(Ferry):
    """Copies through pinned memory that is used again and again, out on a stream of its own, in on the copy stream."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self.out = device.module.Stream(device=device.torch_device)
        self._free: list[Slot] = []
        self._slots: list[Slot] = []
        self._at_exit: weakref.finalize[..., DeviceFerry] | None = None

    def leave(self, box: list[Tensor]) -> Crossing:
        """Enqueue the copy to the host behind what computes the tensor; the host does not wait."""
        with apart():
            output = box[0] = dense(box[0])
        crossing = Crossing(output)
        crossing.slot = slot = self._free.pop() if self._free else self._new_slot()
        with apart():
            crossing.host = self._place(slot, output)
            # Allocated now, though used later: memory that is free now is free before what is computed meanwhile.
            crossing.target = torch.empty_like(output)
            computed = self.device.mark()
            crossing.stream = computed.stream
            self._wait_for_output(computed)
            self._wait_for_place(slot)
            with self.device.module.stream(self.out):
                crossing.host.copy_(output, non_blocking=True)
        crossing.left = self.device.mark(self.out, blocking=True)
        crossing.clock = self.device.hand_over()
        return crossing

    def land(self, crossing: Crossing) -> Tensor:
        """Wait for the copy; a view that may be kept, for then the memory is not used again."""
        self.device.take_over(crossing.clock)
        self._wait_for_copy(crossing)
        assert crossing.host is not None
        crossing.version = crossing.host._version
        return crossing.host.view(crossing.host.shape)

    def embark(self, crossing: Crossing, box: list[Tensor | None]) -> None:
        """Enqueue the copy to the device.

        What has the shape and type of what left goes through its pinned memory, unless the stage kept that; anything
        else is copied from where it lies, which is slower and keeps this thread.
        """
        target, host, slot = crossing.target, crossing.host, crossing.slot
        assert target is not None
        assert host is not None
        assert slot is not None
        result = box.pop()
        with apart(), self.device.module.device(self.device.torch_device):
            if result is None:
                check_unwritten(crossing, host)
                crossing.result = crossing.output
                is_kept = False
            else:
                check_result(result)
                box.append(result)
                del result
                crossing.result, is_kept = self._send(slot, host, box, target)
                crossing.arrival = slot.returned = self.device.mark(self.device.copies)
        if is_kept:
            self._wait_for_return(slot)
        crossing.clock = self.device.hand_over()

    def arrive(self, crossing: Crossing) -> Tensor:
        """Let the caller's present stream wait for the copy to the device; the host does not."""
        assert crossing.result is not None
        assert crossing.slot is not None
        self.device.take_over(crossing.clock)
        if crossing.arrival is not None:
            self._wait_for_arrival(crossing.arrival)
        stream = self.device.current_stream()
        is_own = crossing.result is crossing.target or crossing.result is crossing.output
        if stream.stream_id != crossing.stream or not is_own:
            crossing.result.record_stream(stream)  # another one allocated it
        crossing.host = crossing.target = None
        self._free.append(crossing.slot)
        return crossing.result

    def settle(self) -> None:
        """Wait on the host: nothing that copies use may be given up before."""
        settle(self.out, self.device)

    def close(self) -> None:
        """Wait for the copies and unpin; memory into which somebody still looks lives on."""
        self.settle()
        if self._at_exit is not None:
            self._at_exit.detach()
        while self._slots:
            slot = self._slots[-1]
            slot.part = None
            if slot.block is not None:
                self.device.pins.free(slot.block)
            self._slots.pop()
        self._free.clear()

    # Memory

    def _place(self, slot: Slot, output: Tensor) -> Tensor:
        """Pinned memory in a slot that lies as ``output`` does."""
        num_bytes = output.numel() * output.element_size()
        if slot.block is None or slot.part is None or slot.block.num_bytes < num_bytes or slot.part.num_views():
            if slot.block is not None:
                self.device.pins.free(slot.block)
            slot.block = self.device.pins.allocate(num_bytes)
            slot.part = Part(slot.block.part(0, slot.block.num_bytes), slot.block.address)
            self._settle_before_unpinning()
        return slot.part.typed(output.dtype).as_strided(output.shape, output.stride(), 0)

    def _settle_before_unpinning(self) -> None:
        """At exit blocks unpin themselves, the newest first; what was made after the newest comes before it."""
        if self._at_exit is not None:
            self._at_exit.detach()
        self._at_exit = weakref.finalize(self, settle, self.out, self.device)

    def _send(self, slot: Slot, host: Tensor, box: list[Tensor | None], target: Tensor) -> tuple[Tensor, bool]:
        """Copy what is in a list of one to the device; whether it is read from memory that the stage kept."""
        result = box.pop()
        assert result is not None
        assert slot.part is not None
        if result.shape != target.shape or result.dtype != target.dtype:
            with self.device.copying():  # whose stream allocates it
                return torch.empty_like(result, device=self.device.torch_device).copy_(result), False
        is_place = False
        if slot.part.is_under(result):
            is_place = is_same(result, host)
            result = result if is_place else result.clone()
        kept = weakref.ref(result)
        if is_place:
            del result
            is_kept = kept() is not None or slot.part.num_views() > 1
        elif slot.part.num_views() > 1:  # `host` is one
            with self.device.copying():
                return target.copy_(result), False
        else:
            host.copy_(result)
            is_kept = False
        with self.device.copying():
            target.copy_(host, non_blocking=True)
        return target, is_kept

    def _new_slot(self) -> Slot:
        slot = Slot()
        self._slots.append(slot)
        return slot

    # Order

    def _wait_for_output(self, computed: Mark) -> None:
        """A copy to the host follows what computes the tensor."""
        self.device.wait(computed, self.out)

    def _wait_for_place(self, slot: Slot) -> None:
        """It does not overwrite what is being copied to the device."""
        if slot.returned is not None:
            self.device.wait(slot.returned, self.out)

    def _wait_for_return(self, slot: Slot) -> None:
        """The stage may write again what it kept."""
        assert slot.returned is not None
        slot.returned.event.synchronize()

    def _wait_for_copy(self, crossing: Crossing) -> None:
        """The stage reads what has arrived on the host."""
        assert crossing.left is not None
        crossing.left.event.synchronize()

    def _wait_for_arrival(self, arrival: Mark) -> None:
        """What is computed next reads what has arrived on the device."""
        self.device.wait(arrival)


def settle(out: Any, device: Accelerator) -> None:
    """Wait on the host for every copy, out and in."""
    out.synchronize()
    device.settle()


def check_result(result: object) -> None:
    """Raise ConfigError for what a stage cannot return."""
    if not isinstance(result, Tensor):
        raise ConfigError(
            f"host_stage returned {type(result).__name__}: return a tensor in host memory, or None to leave the "
            "latents as they are"
        )
    if result.device.type != "cpu":
        raise ConfigError(f"host_stage returned a tensor on {result.device}: return one in host memory, tensor.cpu()")
    check_strided(result, "host_stage")


def check_strided(tensor: Tensor, who: str) -> None:
    """Raise ConfigError for a tensor that is more than elements in memory."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = f"quantized, {tensor.dtype}" if tensor.is_quantized else f"of layout {tensor.layout}"
        raise ConfigError(f"{who} returned a tensor that is {kind}: return a dense one, to_dense() or dequantize()")


def check_unwritten(crossing: Crossing, given: Tensor) -> None:
    """Raise ConfigError if the tensor that the stage was given is not as it was."""
    if given._version != crossing.version:
        raise ConfigError(
            "host_stage wrote to the latents in place and returned None, which is to leave them as they are: return "
            "the latents, or write to a clone()"
        )


def is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and type show the same memory as the same values."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.stride() == other.stride()
        and tensor.is_conj() == other.is_conj()
        and tensor.is_neg() == other.is_neg()
    )


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy without gaps in memory, which one copy over the link can carry."""
    alike = torch.empty_like(tensor, device="meta")
    return tensor if alike.stride() == tensor.stride() else tensor.clone(memory_format=torch.preserve_format)


def unshared(box: list[Tensor]) -> Tensor:
    """The tensor of a list of one, or a copy of it where anything but that list can see its memory; it stays there."""
    if box[0].is_conj() or box[0].is_neg():
        with apart():
            box[0] = box[0].resolve_conj().resolve_neg()
    alive = weakref.ref(box[0])
    storage, dtype = box[0].untyped_storage(), box[0].dtype
    place = box[0].storage_offset(), box[0].size(), box[0].stride()
    with apart():
        view = torch.empty(0, dtype=dtype).set_(storage, *place)
        box[0] = view
        # Memory that PyTorch did not allocate (numpy's) may be seen by others whom its storage does not count.
        is_ours = storage.resizable() and torch._C._storage_Use_Count(storage._cdata) == OWN_USES
        if alive() is not None or not is_ours:
            box[0] = view.clone()
    return box[0]


@contextmanager
def apart() -> Iterator[Any]:
    """Make and write tensors that any mode can use later, unseen by autograd."""
    with torch.inference_mode(False), torch.no_grad():
        yield
