"""What choosing pages of keys and values did: counts, and where pages lay over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MAX_SAMPLES: Final = 2048
"""Samples that are kept; from there on every other one is dropped, and half as many are taken."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Pages in frames, in host memory and in the file as a pass began: ``step`` counts passes from 0."""

    step: int
    frame_pages: int
    host_pages: int
    file_pages: int


@dataclass(slots=True)
class SelectionCounts:
    """Counts over all layers that choose, by KV head.

    Attributes:
        decisions: steps of a layer in which pages were chosen, or would have been.
        fallbacks: those of them in which the gate let the layer attend to everything.
        chosen: pages that were attended to.
        recalled: chosen pages that had to be brought, because they were in no frame.
        ahead: pages that were brought before they were chosen: the coming positions favour them, or a prompt's last
            token.
        ahead_used: those of them that were chosen while they were there.
    """

    decisions: int = 0
    fallbacks: int = 0
    chosen: int = 0
    recalled: int = 0
    ahead: int = 0
    ahead_used: int = 0

    def add(self, other: SelectionCounts) -> None:
        """Add the counts of another cache."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class History:
    """Samples of where pages lay, over the whole time and never more than `MAX_SAMPLES`."""

    samples: list[Sample] = field(default_factory=list)
    num_passes: int = 0
    every: int = 1

    def is_due(self) -> bool:
        """Count a pass; whether to take a sample of it."""
        self.num_passes += 1
        return (self.num_passes - 1) % self.every == 0

    def add(self, frame_pages: int, host_pages: int, file_pages: int) -> None:
        """Keep a sample of the pass that was counted last."""
        self.samples.append(Sample(self.num_passes - 1, frame_pages, host_pages, file_pages))
        if len(self.samples) >= MAX_SAMPLES:
            del self.samples[1::2]
            self.every *= 2
