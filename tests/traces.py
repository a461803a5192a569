"""Traces to plan for: equal blocks, and arbitrary ones drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from fmstream.core.trace import Call, Trace


def flat(sizes: Sequence[int], durations: Sequence[float], between: float = 0.0) -> Trace:
    """One call for each parameter, one after the other."""
    calls, clock = [], 0.0
    for index, duration in enumerate(durations):
        calls.append(Call(index, (index,), clock, clock + duration))
        clock += duration
    return Trace(tuple(calls), tuple(sizes), clock, between)


def blocks(
    seconds: float, num_blocks: int = 40, leaf_bytes: Sequence[int] = (3 << 18, 1 << 18, 1 << 20, 1 << 20)
) -> Trace:
    """Equal blocks of leaf modules, the time of each in proportion to its bytes."""
    sizes = list(leaf_bytes) * num_blocks
    return flat(sizes, [seconds * size / sum(sizes) for size in sizes])


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Nested calls that share parameters, of very different sizes and durations."""
    sizes = draw(st.lists(st.integers(1, 4096), min_size=1, max_size=24))
    sizes = [64 * size for size in sizes]
    ids = st.integers(0, len(sizes) - 1)
    calls: list[Call] = []
    clock = 0.0

    def enter(depth: int, parent: int) -> None:
        nonlocal clock
        index = len(calls)
        params = tuple(draw(st.lists(ids, min_size=1, max_size=3)))
        start = clock
        calls.append(Call(index, params, start, start, parent))
        clock += draw(st.floats(0.0, 1.0))
        if depth < 3:
            for _ in range(draw(st.integers(0, 2))):
                enter(depth + 1, index)
        clock += draw(st.floats(0.0, 1.0))
        calls[index] = Call(index, params, start, clock, parent)

    for _ in range(draw(st.integers(1, 6))):
        enter(0, -1)
    return Trace(tuple(calls), tuple(sizes), clock + draw(st.floats(0.0, 1.0)), draw(st.floats(0.0, 1.0)))
