"""The errors that fmstream raises on purpose.  Each message names the value, the limit and the remedy."""

from __future__ import annotations


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
