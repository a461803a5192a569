"""Streams and events of the device, with the methods of CUDA's."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

import torch

from fmstream.emulator.clocks import Mark
from fmstream.emulator.current import current
from fmstream.emulator.tensors import NAME

DEVICE_TYPE: Final = 20
"""c10::DeviceType::PrivateUse1."""

RealStream: Final = torch.Stream
RealEvent: Final = torch.Event


class Stream(torch.Stream):
    """A stream of the machine; a new one unless ``stream_id`` names it.

    PyTorch's own constructor would give stream 0 every time.
    """

    def __new__(
        cls,
        device: object = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int = 0,
        device_type: int = DEVICE_TYPE,
    ) -> Stream:
        number = current.machine.new_stream() if stream_id is None else stream_id
        made: Stream = super().__new__(cls, stream_id=number, device_index=0, device_type=DEVICE_TYPE)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._outer: list[int] = []

    def synchronize(self) -> None:
        """Wait on the host for all that has been enqueued."""
        current.machine.synchronize(self.stream_id)

    def query(self) -> bool:
        """Whether all that has been enqueued is done."""
        return current.machine.mark_done(current.machine.record(self.stream_id))

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record an event, a new one if none is given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: torch.Event) -> None:
        """Let later work wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Let later work wait for all that has been enqueued on another stream."""
        machine = current.machine
        machine.wait(self.stream_id, machine.record(stream.stream_id))

    def __enter__(self) -> Stream:
        self._outer.append(current.machine.current_stream)
        current.machine.set_current_stream(self.stream_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.machine.set_current_stream(self._outer.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RealStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash((NAME, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.emu.Stream {self.stream_id}>"


class Event(torch.Event):
    """A point in a stream."""

    _mark: Mark | None = None

    def __new__(
        cls, device: object = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        made: Event = super().__new__(cls, NAME)
        return made

    def __init__(
        self, device: object = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: torch.Stream | None = None) -> None:
        """Take the point that a stream, the current one by default, has reached."""
        machine = current.machine
        self._mark = machine.record(machine.current_stream if stream is None else stream.stream_id)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Let later work of a stream, the current one by default, wait for this point."""
        if self._mark is not None:
            machine = current.machine
            machine.wait(machine.current_stream if stream is None else stream.stream_id, self._mark)

    def synchronize(self) -> None:
        """Wait for it on the host."""
        if self._mark is not None:
            current.machine.synchronize(self._mark)

    def query(self) -> bool:
        """Whether it lies behind; True for one never recorded."""
        return self._mark is None or current.machine.mark_done(self._mark)

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds from this event to another.  Raises RuntimeError as CUDA does."""
        assert isinstance(end_event, Event)
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must be made with enable_timing=True")
        if self._mark is None or end_event._mark is None:
            raise RuntimeError("both events must be recorded before their time is taken")
        if not (self.query() and end_event.query()):
            raise RuntimeError("both events must be completed before their time is taken: synchronize first")
        return (end_event._mark.seconds - self._mark.seconds) * 1e3

    def __repr__(self) -> str:
        return f"<torch.emu.Event {'at rest' if self._mark is None else f'at {self._mark.seconds:.9f} s'}>"


def new_stream(device: Any = None, *args: Any, **kwargs: Any) -> torch.Stream:
    """``torch.Stream(device)``: the emulator's, unless another device is named."""
    if kwargs.get("device_type", DEVICE_TYPE) != DEVICE_TYPE or not _is_ours(device):
        made: torch.Stream = RealStream(device, *args, **kwargs)
        return made
    return Stream(device, *args, **kwargs)


def new_event(device: Any = None, **kwargs: Any) -> torch.Event:
    """``torch.Event(device)``: the emulator's, unless another device is named."""
    return Event(device, **kwargs) if _is_ours(device) else RealEvent(device, **kwargs)


def _is_ours(device: Any) -> bool:
    return device is None or isinstance(device, int) or torch.device(device).type == NAME


class _Kind(type):
    """Lets PyTorch's names make the emulator's objects, and still tell by ``isinstance`` what they told before."""

    real: type
    make: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.real)


class AnyStream(metaclass=_Kind):
    """What ``torch.Stream`` is while the emulator is installed."""

    real = RealStream
    make = staticmethod(new_stream)


class AnyEvent(metaclass=_Kind):
    """What ``torch.Event`` is while the emulator is installed."""

    real = RealEvent
    make = staticmethod(new_event)
