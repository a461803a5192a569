"""The nouns of planning: what is allowed, what it costs, what was decided."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes to which every tensor in fast memory is aligned."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep to.

    Attributes:
        memory_bytes: fast memory for weights: residents and window together.
        page_bytes: size of a page; each streamed unit and each resident run takes whole pages.
        pinned: parameters that must be resident (written, returned or aliased ones).
        lookahead: units staged ahead of the one in use, or None where the window alone decides.
        unit_bytes: target size of a unit, or None where the planner chooses.
    """

    memory_bytes: int
    page_bytes: int
    pinned: frozenset[int] = frozenset()
    lookahead: int | None = None
    unit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Costs:
    """What moving weights costs.

    Attributes:
        bytes_per_second: sustained rate of the link (disk to fast memory, or host to device).
        latency_seconds: time for which a load occupies the link beyond its bytes, paid once per unit.
        seen_seconds: time from the end of a load to when compute may use it; the link is free meanwhile.
        shared: whether what the user copies before a pass crosses the same link, behind loads that were issued.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    seen_seconds: float = 0.0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of consecutive calls whose streamed parameters arrive and leave together.

    ``first`` and ``last`` are indices into the trace's calls (inclusive); ``params`` is in layout order;
    ``num_bytes`` is the sum of their sizes.
    """

    first: int
    last: int
    params: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulation of a plan expects of one steady pass, in seconds.

    ``bound`` is max(compute, link): no schedule with these residents can be faster.  ``regime`` is
    "compute-bound", "link-bound" or "resident" (nothing is streamed).
    """

    seconds: float
    compute: float
    link: float
    bound: float
    regime: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is resident, what is streamed in which runs, and through how large a window.

    Attributes:
        policy: name of the policy that made it.
        resident: parameters that stay in fast memory for as long as the plan is in force.
        units: streamed units in call order; their call ranges do not overlap.  A parameter that is called again
            later stands in several units.
        window_bytes: size of the circular window, a multiple of the page size; 0 where nothing is streamed.
        lookahead: units that may be issued ahead of the one in use; 0 loads on demand; None: all that fit.
        wrap: whether units of the next pass are issued before this one has ended.
        predicted: what the simulation expects.
        across: units of the next pass that are issued before this one has ended, where ``wrap``; the others when the
            next one begins.  None: all that fit.
    """

    policy: str
    resident: frozenset[int]
    units: tuple[Unit, ...]
    window_bytes: int
    lookahead: int | None
    wrap: bool
    predicted: Prediction
    across: int | None = None

    @property
    def streamed_bytes(self) -> int:
        """Bytes that cross the link in one pass."""
        return sum(unit.num_bytes for unit in self.units)
