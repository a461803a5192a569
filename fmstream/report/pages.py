"""The part of a report on keys and values in pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fmstream.core.choices import Sample, SelectionCounts
from fmstream.core.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Pages:
    """What the paged caches of a run did, over all of them.

    Attributes:
        num_caches: how many there were, one for each call of ``generate``.
        decisions ... ahead_used: as in `fmstream.core.choices.SelectionCounts`; 0 where every token attends to all.
        samples: pages in frames, host memory and the file as passes began; steps go on from one cache to the next.
    """

    num_caches: int
    decisions: int
    fallbacks: int
    chosen: int
    recalled: int
    ahead: int
    ahead_used: int
    samples: tuple[Sample, ...]


def measure_pages(telemetry: Telemetry) -> Pages | None:
    """Add up what was recorded; None where no cache lay in pages."""
    records = list(telemetry.kv)
    if not records:
        return None
    sums, samples, first = SelectionCounts(), [], 0
    for counts, history in records:
        sums.add(counts)
        samples += [replace(sample, step=sample.step + first) for sample in list(history.samples)]
        first += history.num_passes
    return Pages(
        len(records),
        sums.decisions,
        sums.fallbacks,
        sums.chosen,
        sums.recalled,
        sums.ahead,
        sums.ahead_used,
        tuple(samples),
    )
