"""Run a PyTorch loop whose weights are larger than fast memory, at the speed of the slower of compute and link."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fmstream.config import StreamConfig
from fmstream.errors import (
    CancelledRun,
    CheckpointError,
    ClosedError,
    ConfigError,
    FmstreamError,
    ForkedError,
    IdsError,
    MemoryBudgetError,
    StageError,
    StreamError,
)

if TYPE_CHECKING:
    from fmstream.doors.latents import HostStage
    from fmstream.doors.load import load
    from fmstream.doors.run import Run, arun, run
    from fmstream.doors.stage import Staged, stage
    from fmstream.doors.stream import Stream, smallest_memory, stream
    from fmstream.payloads.kv.cache import PagedCache
    from fmstream.payloads.latents import LatentLoop
    from fmstream.report import Report

__all__ = [
    "CancelledRun",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "FmstreamError",
    "ForkedError",
    "HostStage",
    "IdsError",
    "LatentLoop",
    "MemoryBudgetError",
    "PagedCache",
    "Report",
    "Run",
    "StageError",
    "Staged",
    "Stream",
    "StreamConfig",
    "StreamError",
    "__version__",
    "arun",
    "load",
    "run",
    "smallest_memory",
    "stage",
    "stream",
]

_HOMES = {
    "HostStage": "fmstream.doors.latents",
    "LatentLoop": "fmstream.payloads.latents",
    "PagedCache": "fmstream.payloads.kv.cache",
    "Report": "fmstream.report",
    "Run": "fmstream.doors.run",
    "Staged": "fmstream.doors.stage",
    "Stream": "fmstream.doors.stream",
    "arun": "fmstream.doors.run",
    "load": "fmstream.doors.load",
    "run": "fmstream.doors.run",
    "smallest_memory": "fmstream.doors.stream",
    "stage": "fmstream.doors.stage",
    "stream": "fmstream.doors.stream",
}


def __getattr__(name: str) -> Any:
    # On demand: the command line answers without torch, and a look at the version costs nothing.
    if name == "__version__":
        from importlib.metadata import version

        return version("fmstream-runtime")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
