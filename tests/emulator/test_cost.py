"""The cost model and the cards: seconds worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fmstream.emulator.cards import CARDS, Card, card
from fmstream.emulator.cost import copy_seconds, kernel_seconds
from fmstream.errors import ConfigError
from tests.kit_machine import ROUND


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory_above_a_floor() -> None:
    assert kernel_seconds(ROUND, 0) == 2e-6
    assert kernel_seconds(ROUND, 1e10) == pytest.approx(1.0 + 2e-6, rel=1e-12)
    assert kernel_seconds(ROUND, 1e10, gemm_flops=5e11) == pytest.approx(1.0 + 2e-6, rel=1e-12)
    assert kernel_seconds(ROUND, 1e10, gemm_flops=3e12) == pytest.approx(3.0 + 2e-6, rel=1e-12)
    assert kernel_seconds(ROUND, 1e10, attention_flops=3e12) == pytest.approx(6.0 + 2e-6, rel=1e-12)
    assert kernel_seconds(ROUND, 0, 1e12, 1e12) == pytest.approx(3.0 + 2e-6, rel=1e-12)


@pytest.mark.parametrize(
    ("lane", "pinned", "seconds"),
    [("copy in", True, 1.0), ("copy out", True, 2.0), ("copy in", False, 4.0), ("copy out", False, 4.0)],
)
def test_a_copy_takes_its_bytes_over_the_link(lane: str, pinned: bool, seconds: float) -> None:
    assert copy_seconds(ROUND, lane, 10**9, pinned=pinned) == pytest.approx(seconds + 2e-6, rel=1e-12)


def test_pageable_memory_is_never_faster_than_the_link() -> None:
    slow = replace(ROUND, pageable_bytes_per_second=1e12)
    assert copy_seconds(slow, "copy in", 10**9, pinned=False) == copy_seconds(slow, "copy in", 10**9, pinned=True)


@pytest.mark.parametrize("name", CARDS)
def test_each_card_is_slower_over_the_link_than_in_its_own_memory(name: str) -> None:
    found = card(name)
    assert found is CARDS[name]
    link = max(found.h2d_bytes_per_second, found.d2h_bytes_per_second)
    assert found.pageable_bytes_per_second < link < found.memory_bytes_per_second
    assert found.attention_flops < found.gemm_flops


def test_the_dock_differs_from_its_card_in_the_link_alone() -> None:
    dock, desk = card("usb-dock"), card("rtx4060")
    assert dock.h2d_bytes_per_second < desk.h2d_bytes_per_second / 4
    rest: dict[str, Any] = {
        "name": desk.name,
        "h2d_bytes_per_second": desk.h2d_bytes_per_second,
        "d2h_bytes_per_second": desk.d2h_bytes_per_second,
        "pageable_bytes_per_second": desk.pageable_bytes_per_second,
    }
    assert replace(dock, **rest) == desk


@pytest.mark.parametrize(("name", "nearest"), [("rtx4070", "rtx4070-laptop"), ("rtx5080", "rtx5090"), ("h100", "h200")])
def test_an_unknown_card_is_refused_with_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r}: did you mean {nearest!r}") as refusal:
        card(name)
    assert all(known in str(refusal.value) for known in CARDS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes", 0),
        ("gemm_flops", -1.0),
        ("queue_limit", 0),
        ("launch_seconds", -1e-9),
        ("kernel_seconds", -1.0),
    ],
)
def test_a_card_that_cannot_be_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"round: {field}={value!r} must be"):
        replace(ROUND, **{field: value})


def test_nothing_need_cost_time_beside_the_bytes() -> None:
    free = replace(ROUND, launch_seconds=0.0, kernel_seconds=0.0, copy_engine_seconds=0.0, copy_seen_seconds=0.0)
    assert isinstance(free, Card)
    assert copy_seconds(free, "copy in", 0, pinned=True) == kernel_seconds(free, 0) == 0.0
