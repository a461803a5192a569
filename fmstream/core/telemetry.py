"""Raw records of a run: written by the actors, read by the report."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from fmstream.core.choices import History, SelectionCounts
from fmstream.core.plan import Prediction

MAX_SPANS = 200_000
"""Spans kept for the timeline; older ones are dropped first."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of work on one lane of the timeline.

    ``lane`` is "compute" (calls that use streamed weights), "wait" (the compute actor waits for weights), "host N"
    (thread N of a stage on the host) or "copy N" (prefetch worker N). Times are ``time.perf_counter()`` seconds.
    """

    lane: str
    name: str
    start: float
    end: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass: one call of an outermost module.

    Attributes:
        root: name of the module that was called ("unet", "text_encoder", "vae.decoder").
        policy: the policy in force, or "trace" for a pass that loaded on demand to learn the order.
        start, end: ``time.perf_counter()`` seconds.
        compute_seconds: end - start less the time spent waiting for weights.
        wait_seconds: time the compute actor waited for weights.
        streamed_bytes: bytes loaded into fast memory for this pass (also those issued before it began).
        resident_bytes, window_bytes: fast memory in use.
        fault_bytes: bytes read by faults, outside the plan.
        predicted: the plan's prediction, None for a traced pass.
    """

    root: str
    policy: str
    start: float
    end: float
    compute_seconds: float
    wait_seconds: float
    streamed_bytes: int
    resident_bytes: int
    window_bytes: int
    fault_bytes: int = 0
    predicted: Prediction | None = None

    @property
    def seconds(self) -> float:
        """Wall time of the pass."""
        return self.end - self.start


@dataclass(slots=True)
class Telemetry:
    """Everything recorded since a handle was opened.  Appends are atomic under the GIL; there is no lock.

    Attributes:
        weights_bytes: bytes of all parameters but tables, each counted once.
        memory_bytes: fast memory given for weights.
        kept_bytes: bytes of parameters left in place because they cannot be streamed (wrapper subclasses, sparse).
        table_bytes: bytes of embedding tables that stay on the host, whose rows are brought as they are used.
        num_lookups, row_bytes: how often rows were asked for, and the bytes that crossed the link for it.
        file_bytes, ram_bytes: bytes of streamed parameters whose master lies in a file, or in RAM.
        smallest_bytes: the smallest ``memory`` that works for these modules.
        link_seconds: busy time of the prefetch workers.
        link_bytes: bytes that they moved.
        wasted_bytes: bytes loaded ahead and dropped unused.
        replans: number of plans made.
        peak_rss_bytes: largest resident set size of the process that the scheduler saw, 0 if not watched.
    """

    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    policy: str = ""
    device: str = ""
    weights_bytes: int = 0
    memory_bytes: int = 0
    kept_bytes: int = 0
    table_bytes: int = 0
    num_lookups: int = 0
    row_bytes: int = 0
    file_bytes: int = 0
    ram_bytes: int = 0
    smallest_bytes: int = 0
    link_seconds: float = 0.0
    link_bytes: int = 0
    wasted_bytes: int = 0
    replans: int = 0
    peak_rss_bytes: int = 0
    passes: list[PassRecord] = field(default_factory=list)
    faults: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """(parameter, reader) -> [count, bytes]."""
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    kv: list[tuple[SelectionCounts, History]] = field(default_factory=list)
    """Of each paged cache that was made for ``generate``."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user: fall-backs taken, parameters left in place, why."""
