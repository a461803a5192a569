"""Free places by number, given out in runs."""

from __future__ import annotations

import bisect


class FreeRuns:
    """Numbers that are free, as runs of consecutive ones; neighbours that come back are joined."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._counts: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Numbers that can be taken."""
        return sum(self._counts.values())

    def give(self, start: int, count: int) -> None:
        """Make ``[start, start + count)`` free; none of them may be free already."""
        at = bisect.bisect(self._starts, start)
        before = self._starts[at - 1] if at else None
        after = self._starts[at] if at < len(self._starts) else None
        if count < 1 or (before is not None and before + self._counts[before] > start):
            raise AssertionError(f"[{start}, {start + count}) is free already or empty")
        if after is not None and after < start + count:
            raise AssertionError(f"[{start}, {start + count}) is free already from {after} on")
        if after == start + count:
            count += self._counts.pop(after)
            del self._starts[at]
        if before is not None and before + self._counts[before] == start:
            self._counts[before] += count
        else:
            self._starts.insert(at, start)
            self._counts[start] = count

    def take(self, wanted: int) -> tuple[int, int] | None:
        """The first run of ``wanted`` numbers, else all of the longest one: (start, count); None if nothing is free."""
        if not self._starts:
            return None
        start = next((s for s in self._starts if self._counts[s] >= wanted), None)
        if start is None:
            start = max(self._starts, key=self._counts.__getitem__)
        at = bisect.bisect_left(self._starts, start)
        length = self._counts.pop(start)
        count = min(wanted, length)
        if count == length:
            del self._starts[at]
        else:
            self._starts[at] = start + count
            self._counts[start + count] = length - count
        return start, count
