"""The machine as the checks see it; every source can be another one, so a made-up machine can take its place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fmstream.core.reading import Unread
from fmstream.doctor.gpus import Gpu, find_gpus
from fmstream.doctor.host import is_wsl
from fmstream.doctor.measured import Load, Probes, put_under_load
from fmstream.doctor.nvml import Nvml, load_nvml
from fmstream.doctor.torch_facts import TorchFacts, read_torch
from fmstream.doctor.windows import WindowsFacts, ask_windows, parse_windows


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user means to run.

    Attributes:
        path: the model's file or folder.
        model_bytes: its weights.
        memory_bytes: fast memory for weights.
        pinned_bytes: host memory to be pinned.
        is_measured: whether cards may be put under load.
    """

    path: Path | None = None
    model_bytes: int | None = None
    memory_bytes: int | None = None
    pinned_bytes: int | None = None
    is_measured: bool = True

    @property
    def pins(self) -> int | None:
        """Host memory that a run would pin: what was given, else all weights; None if neither is known."""
        return self.model_bytes if self.pinned_bytes is None else self.pinned_bytes


def allowed_cpus() -> frozenset[int] | Unread:
    """CPUs that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return Unread("this system does not tell")
    return frozenset(os.sched_getaffinity(0))


def locked_limit() -> int | Unread | None:
    """Bytes that this process may lock; None where there is no limit."""
    try:
        import resource
    except ImportError:
        return Unread("this system has no such limit")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def host_memory() -> tuple[int, int]:
    """Bytes of the host's memory: all, and those that can still be taken."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def loads_library(name: str) -> bool:
    """Whether a shared library can be loaded."""
    import ctypes

    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


@dataclass
class System:
    """One machine.  What is asked of it is read once."""

    probes: Probes
    wanted: Wanted = Wanted()
    platform: str = sys.platform
    sysfs: Path = Path("/sys")
    proc: Path = Path("/proc")
    load_nvml: Callable[[], Any | Unread] = load_nvml
    read_torch: Callable[[], TorchFacts | Unread] = read_torch
    ask_windows: Callable[..., str | Unread] = ask_windows
    allowed_cpus: Callable[[], frozenset[int] | Unread] = allowed_cpus
    locked_limit: Callable[[], int | Unread | None] = locked_limit
    host_memory: Callable[[], tuple[int, int]] = host_memory
    loads_library: Callable[[str], bool] = loads_library
    _loads: dict[int, Load] = field(default_factory=dict)

    @property
    def is_linux(self) -> bool:
        """Whether it has sysfs and proc."""
        return self.platform.startswith("linux")

    @property
    def is_windows(self) -> bool:
        """Whether it is Windows itself."""
        return self.platform == "win32"

    @cached_property
    def is_wsl(self) -> bool:
        """Whether it is Linux inside Windows."""
        return self.is_linux and is_wsl(self.proc)

    @cached_property
    def nvml(self) -> Nvml:
        """NVIDIA's management library."""
        return Nvml(self.load_nvml)

    @cached_property
    def torch(self) -> TorchFacts | Unread:
        """What torch says."""
        return self.read_torch()

    @cached_property
    def gpus(self) -> list[Gpu]:
        """The cards."""
        return find_gpus(self.sysfs, self.nvml, self.torch)

    @cached_property
    def windows(self) -> WindowsFacts | Unread:
        """What Windows says, also of the host around WSL2."""
        if not (self.is_windows or self.is_wsl):
            return Unread("not on Windows")
        text = self.ask_windows(from_wsl=self.is_wsl)
        return text if isinstance(text, Unread) else parse_windows(text)

    @cached_property
    def free_memory(self) -> tuple[int, int] | Unread:
        """Bytes of the host's memory, all and available, by proc on Linux."""
        if not self.is_linux:
            return self.host_memory()
        from fmstream.doctor.host import meminfo

        sizes = meminfo(self.proc)
        if "MemTotal" not in sizes or "MemAvailable" not in sizes:
            return Unread("meminfo: no total or nothing about what is available")
        return sizes["MemTotal"], sizes["MemAvailable"]

    def load(self, gpu: Gpu) -> Load | Unread:
        """What a card does under load; it is put under load at most once."""
        if not self.wanted.is_measured:
            return Unread("not measured, as --no-load says")
        if gpu.torch is None:
            return Unread("not measured: torch does not see the card")
        if gpu.number not in self._loads:
            self._loads[gpu.number] = put_under_load(gpu, self.probes)
        return self._loads[gpu.number]

    def close(self) -> None:
        """Give the management library back."""
        self.nvml.close()
