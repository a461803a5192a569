"""The errors that fmstream raises on purpose.  Each message names the value, the limit and the remedy."""

from __future__ import annotations

from typing import Any


class FmstreamError(Exception):
    """Base of all errors of this package."""


class ConfigError(FmstreamError, ValueError):
    """An option has a value that cannot be used, or options contradict each other."""


class IdsError(FmstreamError, IndexError):
    """An id is no row of the table that it is looked up in; nothing was moved."""


class MemoryBudgetError(FmstreamError, ValueError):
    """The memory given is smaller than the least that works."""


class CheckpointError(FmstreamError, ValueError):
    """A checkpoint is missing, damaged, or does not fit the module."""


class ForkedError(FmstreamError, RuntimeError):
    """A handle is used in a child process that inherited it by fork."""


class ClosedError(FmstreamError, RuntimeError):
    """A handle is used after it was closed."""


class CancelledRun(FmstreamError, RuntimeError):
    """A run was cancelled from outside while it waited for weights."""


class StreamError(FmstreamError, RuntimeError):
    """An actor failed; the modules have been restored.  The cause is chained."""


class StageError(FmstreamError, RuntimeError):
    """A ``host_stage`` failed; the cause is chained.

    Attributes:
        index: which item it was called for, from 0.
        round: in which round, from 0.
        finished: results that `LatentLoop.run` had when it failed, in the order of the items.
        run: the run; going on with it calls the stage again for that item (see `LatentRun`).
    """

    def __init__(self, message: str, index: int = 0, round: int = 0) -> None:
        super().__init__(message)
        self.index = index
        self.round = round
        self.finished: list[Any] = []
        self.run: Any = None
