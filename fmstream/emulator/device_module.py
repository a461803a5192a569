"""``torch.emu``: what programs ask of a device module, by the names of ``torch.cuda``."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fmstream.emulator.current import current
from fmstream.emulator.picking import picked_rows
from fmstream.emulator.pinned import Runtime
from fmstream.emulator.streams import Event, Stream
from fmstream.emulator.tensors import NAME


@dataclass(frozen=True, slots=True)
class Properties:
    """What a program may ask of the card."""

    name: str
    total_memory: int
    multi_processor_count: int = 24
    major: int = 8
    minor: int = 9


def is_available() -> bool:
    """True: it needs no hardware."""
    return True


def is_initialized() -> bool:
    """Whether there is a machine."""
    return True


def init() -> None:
    """Nothing is left to do."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """1."""
    return 1


def current_device() -> int:
    """0."""
    return 0


def set_device(device: object) -> None:
    """Raises ValueError for an index other than 0."""
    index = device if isinstance(device, int) else torch.device(device).index  # type: ignore[call-overload]
    if index not in (None, 0):
        raise ValueError(f"device {device}: the emulator has one device, {NAME}:0")


@contextmanager
def device(device: object) -> Iterator[None]:
    """A context in which the device is current: it always is."""
    set_device(device)
    yield


def current_stream(device: object = None) -> Stream:
    """This thread's current stream."""
    return Stream(stream_id=current.machine.current_stream)


def default_stream(device: object = None) -> Stream:
    """Stream 0."""
    return Stream(stream_id=0)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream this thread's current one."""
    current.machine.set_current_stream(stream.stream_id)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """A context in which a stream is the current one; None changes nothing."""
    machine = current.machine
    before = machine.current_stream
    if stream is not None:
        machine.set_current_stream(stream.stream_id)
    try:
        yield
    finally:
        machine.set_current_stream(before)


def synchronize(device: object = None) -> None:
    """Wait on the host for everything that has been enqueued."""
    current.machine.synchronize()


def host_clock() -> float:
    """This thread's virtual time in seconds, for the thread to which it hands work."""
    return current.machine.now


def join_host_clock(seconds: float) -> None:
    """Let this thread's virtual time be at least that of one from which it takes work over."""
    current.machine.join_clock(seconds)


def empty_cache() -> None:
    """Give unused segments back."""
    current.machine.allocator.empty_cache()


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Free and total bytes."""
    allocator = current.machine.allocator
    return allocator.capacity - allocator.statistics().reserved, allocator.capacity


def memory_allocated(device: object = None) -> int:
    """Bytes of live tensors, rounded as the allocator rounds them."""
    return current.machine.allocator.statistics().allocated


def max_memory_allocated(device: object = None) -> int:
    """The most that ``memory_allocated`` has been."""
    return current.machine.allocator.statistics().peak_allocated


def memory_reserved(device: object = None) -> int:
    """Bytes of segments held."""
    return current.machine.allocator.statistics().reserved


def max_memory_reserved(device: object = None) -> int:
    """The most that ``memory_reserved`` has been."""
    return current.machine.allocator.statistics().peak_reserved


def reset_peak_memory_stats(device: object = None) -> None:
    """Let both peaks start from what is in use now."""
    current.machine.allocator.reset_peaks()


def memory_stats(device: object = None) -> dict[str, int]:
    """The statistics by the names of ``torch.cuda.memory_stats``, those that the emulator keeps."""
    found = current.machine.allocator.statistics()
    return {
        "allocated_bytes.all.current": found.allocated,
        "allocated_bytes.all.peak": found.peak_allocated,
        "reserved_bytes.all.current": found.reserved,
        "reserved_bytes.all.peak": found.peak_reserved,
        "active_bytes.all.current": found.allocated,
        "active_bytes.all.peak": found.peak_allocated,
        "inactive_split_bytes.all.current": found.reserved - found.allocated,
        "num_ooms": found.num_ooms,
        "num_alloc_retries": found.num_retries,
    }


def get_device_properties(device: object = None) -> Properties:
    """Name and memory of the card."""
    return Properties(current.machine.card.name, current.machine.allocator.capacity)


def get_device_name(device: object = None) -> str:
    """Name of the card."""
    return current.machine.card.name


def get_device_capability(device: object = None) -> tuple[int, int]:
    """Compute capability."""
    found = get_device_properties()
    return found.major, found.minor


def manual_seed(seed: int) -> None:
    """Seed the device's random numbers."""
    current.generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """The same, for there is one device."""
    current.generator.manual_seed(seed)


def initial_seed() -> int:
    """The seed in use."""
    return current.generator.initial_seed()


def get_rng_state(device: object = None) -> torch.Tensor:
    """State of the device's random numbers, on the CPU."""
    return current.generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    """Set the state of the device's random numbers."""
    current.generator.set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may cast to."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True."""
    return True


def cudart() -> Runtime:
    """CUDA's runtime, as far as it pins memory."""
    return Runtime()


def make_module() -> types.ModuleType:
    """The module that is registered as ``torch.emu``."""
    module = types.ModuleType(f"torch.{NAME}", __doc__)
    public: dict[str, Any] = {
        name: value
        for name, value in globals().items()
        if isinstance(value, types.FunctionType) and value.__module__ == __name__ and name != "make_module"
    }
    module.__dict__.update(public, Stream=Stream, Event=Event, picked_rows=picked_rows)
    return module
