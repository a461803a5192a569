"""Rates of repeated copies and reads: medians, slow ends, spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples of one kind of copy at one size.

    Attributes:
        what: the kind of copy, such as "to the device, pinned".
        num_bytes: of one copy.
        seconds: of one copy, by sample.
    """

    what: str
    num_bytes: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Bytes a second in the median of the samples."""
        return self.num_bytes / median(self.seconds)

    @property
    def p95(self) -> float:
        """Bytes a second that 95 % of the samples reached."""
        return self.num_bytes / percentile(self.seconds, 0.95)

    @property
    def cv(self) -> float:
        """Coefficient of variation of the times: standard deviation over mean.  Tells how far to trust the rest."""
        return pstdev(self.seconds) / fmean(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """In JSON types; rates in bytes a second."""
        return {
            "what": self.what,
            "bytes": self.num_bytes,
            "median": self.median,
            "p95": self.p95,
            "cv": self.cv,
            "samples": len(self.seconds),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of all lies, between neighbours in proportion (Hyndman and Fan 1996, type 7)."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
