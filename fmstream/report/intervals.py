"""Arithmetic on stretches of time: sorted, disjoint lists of (start, end)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, sorted and disjoint; empty and reversed ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What two merged lists have in common, itself merged."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(merged: Iterable[Interval]) -> float:
    """Seconds that a merged list covers."""
    return sum(end - start for start, end in merged)


def overlap(interval: Interval, merged: Sequence[Interval]) -> float:
    """Seconds of one interval that lie in a merged list."""
    start, end = interval
    index = max(bisect_right(merged, (start, float("inf"))) - 1, 0)
    seconds = 0.0
    while index < len(merged) and merged[index][0] < end:
        seconds += max(min(end, merged[index][1]) - max(start, merged[index][0]), 0.0)
        index += 1
    return seconds
