"""Names of `torch.cuda` that answer for the emulated device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch

from bench.peers.shim.patches import Patches

SAME: Final = (
    *("Event", "Stream", "current_stream", "default_stream", "stream", "set_stream", "synchronize"),
    *("mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_stats", "reset_peak_memory_stats", "empty_cache"),
    *("is_available", "device_count", "current_device", "set_device", "get_device_name"),
    *("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state"),
)
"""What the emulated device's own module offers under the same name."""


def install(patches: Patches) -> None:
    """Replace what a package asks of `torch.cuda`; the rest keeps failing as it does without a GPU."""
    emulated = torch.get_device_module("emu")
    for name in SAME:
        patches.set(torch.cuda, name, getattr(emulated, name))
    for name, value in _answers(emulated).items():
        patches.set(torch.cuda, name, value)
    patches.set(torch.cuda.streams, "Stream", emulated.Stream)
    patches.set(torch.cuda.streams, "Event", emulated.Event)
    patches.set(torch.version, "cuda", "12.8")


def _answers(emulated: Any) -> dict[str, Any]:
    """Answers of a plain card of compute capability 8.6."""

    def properties(device: Any = None) -> SimpleNamespace:
        _, total = emulated.mem_get_info()
        return SimpleNamespace(
            name="emulated", total_memory=total, major=8, minor=6, multi_processor_count=16, warp_size=32
        )

    return {
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (8, 6),
        "device": lambda device=None: nullcontext(),
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "get_allocator_backend": lambda: "native",
        "ipc_collect": lambda: None,
    }
