"""Pinned memory: what it counts, what it covers, and when it may go."""

from __future__ import annotations

from typing import Any

import pytest

from fmstream.emulator.pins import PinError
from tests.kit_machine import copy_in, kernel, machine, span


def test_pinned_ranges_count_exactly_or_rounded() -> None:
    on = machine(pinned_rounding="power2")
    on.pinned.register(1 << 20, 5000)
    assert on.pinned.charged_bytes == 8192
    on.pinned.register(1 << 21, 4096)
    assert on.pinned.charged_bytes == 8192 + 4096
    on.pinned.register(1 << 22, 5000, exact=True)
    assert on.pinned.charged_bytes == 8192 + 4096 + 5000
    exact = machine()
    exact.pinned.register(1 << 20, 5000)
    assert exact.pinned.charged_bytes == 5000


def test_no_more_is_pinned_than_the_cap() -> None:
    on = machine(pinned_cap=10_000)
    on.pinned.register(1 << 20, 6000)
    with pytest.raises(PinError, match="4001 bytes more cannot be pinned: 6000 are, of at most 10000; pin less"):
        on.pinned.register(1 << 21, 4001)
    on.pinned.register(1 << 21, 4000)
    on.pinned.unregister(1 << 20)
    on.pinned.register(1 << 20, 6000)
    on.pinned.release(1 << 21)
    assert on.pinned.charged_bytes == 6000
    assert on.statistics().peak_pinned_bytes == 10_000
    on.reset_statistics()
    assert on.statistics().peak_pinned_bytes == 6000


def test_pinned_ranges_do_not_overlap() -> None:
    on = machine()
    on.pinned.register(1000, 100)
    on.pinned.register(1100, 100)
    for address, size in ((1000, 100), (950, 51), (1199, 5), (900, 500), (1050, 10)):
        with pytest.raises(PinError, match="already"):
            on.pinned.register(address, size)
    with pytest.raises(PinError, match="0 bytes"):
        on.pinned.register(5000, 0)
    with pytest.raises(PinError, match="no pinned range begins"):
        on.pinned.unregister(1050)
    assert on.pinned.charged_bytes == 200


@pytest.mark.parametrize(
    ("address", "size", "covered"),
    [
        (1000, 100, True),
        (1010, 5, True),
        (1000, 300, True),
        (1050, 151, True),
        (1000, 301, False),
        (999, 2, False),
        (1299, 1, True),
        (1300, 1, False),
        (1500, 100, True),
        (1599, 2, False),
        (1250, 260, False),
        (1000, 0, True),
        (10, 1, False),
    ],
)
def test_a_range_is_covered_if_all_of_it_is_pinned(address: int, size: int, covered: bool) -> None:
    on = machine()
    for start, end in ((1000, 1100), (1100, 1300), (1500, 1600)):
        on.pinned.register(start, end - start)
    assert on.pinned.covers(address, size) is covered


def test_pinned_memory_may_die_amid_work() -> None:
    on = machine()
    on.pinned.register(1 << 20, 4096)
    kernel(on, run=lambda: on.pinned.release(1 << 20))
    assert not on.pinned.covers(1 << 20, 1)
    on.pinned.release(1 << 20)  # nothing is there any more
    on.pinned.register(1 << 20, 4096)
    assert on.pinned.charged_bytes == 4096


def test_memory_that_a_copy_still_reads_is_not_unpinned() -> None:
    on = machine()
    on.pinned.register(1 << 20, 4096)
    block = on.allocator.allocate(4096, 0)
    source: Any = (1 << 20, 4096)
    copy_in(on, reads=(source,), writes=(span(block),))
    with pytest.raises(RuntimeError, match="write by unpin on the host is not ordered after the read by copy"):
        on.pinned.unregister(1 << 20)
    assert on.pinned.covers(*source)
    on.synchronize()
    on.pinned.unregister(1 << 20)
    assert not on.pinned.covers(*source)
