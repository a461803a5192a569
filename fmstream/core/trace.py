"""What one pass of a root module did, as the planner needs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module that binds parameters.

    Times are seconds on the *compute clock* of the pass: wall time since the pass began, less the time spent
    waiting for weights.  ``parent`` is the index of the innermost enclosing call in the same trace, or -1.
    """

    site: int
    params: tuple[int, ...]
    start: float
    end: float
    parent: int = -1


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls of one pass in order of entry.

    Attributes:
        calls: calls in order of entry; a nested call comes after its parent.
        sizes: bytes of each parameter as laid out in fast memory (a multiple of 64), indexed by parameter id.
        seconds: compute time of the whole pass.
        between: wall seconds from the end of a pass to the start of the next one of the same root, 0.0 if unknown.
    """

    calls: tuple[Call, ...]
    sizes: tuple[int, ...]
    seconds: float
    between: float = 0.0

    @property
    def params(self) -> frozenset[int]:
        """Ids of all parameters that the pass binds."""
        return frozenset(p for call in self.calls for p in call.params)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters that the pass binds, each counted once."""
        return sum(self.sizes[p] for p in self.params)
