"""The benchmark of caches beyond the card, with a small model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench import kv_pool
from bench.contract import Findings
from bench.kv_decode import Shape
from bench.kv_pool import BARS, Case, measure
from bench.kv_recall import AHEAD, MISSING, SeededRecall
from fmstream import emulator
from fmstream.payloads.page_select import Digests, Limits

SMALL = Shape(1024, layers=16, heads=4, kv_heads=2, head_dim=32, width=64, inner=96, vocabulary=128)


def played(case: Case) -> Findings:
    emulator.install()
    try:
        return measure([case], lambda line: None, check="record")
    finally:
        emulator.uninstall()


def test_figures_are_the_same_in_every_run() -> None:
    case = Case("rtx4060", SMALL, ("unpacked", "exact"))
    findings = played(case)
    assert set(BARS) <= set(findings.figures)
    assert findings == played(case)
    rows = {row["contender"]: row for row in findings.rows}
    assert list(rows) == ["resident", "offloaded", "exact", "selective", "exact, not packed", "exact, batch 4"]
    assert all(row["races"] == 0 for row in rows.values())
    whole = SMALL.kv_bytes / 1e9
    assert rows["resident"]["in_gb"] == rows["resident"]["out_gb"] == 0
    assert rows["offloaded"]["in_gb"] == pytest.approx(whole, rel=0.01)
    assert rows["offloaded"]["out_gb"] == pytest.approx(whole, rel=0.01)
    assert (1 - kv_pool.SHARE) * whole < rows["exact, not packed"]["in_gb"] < 1.05 * whole
    assert 0.7 < rows["exact"]["in_gb"] / rows["exact, not packed"]["in_gb"] < 0.8
    assert rows["exact"]["out_gb"] < 0.1 * whole
    assert 1 / SMALL.layers * whole < rows["selective"]["in_gb"] < 0.5 * whole
    assert rows["exact, batch 4"]["in_gb"] < 1.05 * whole  # a shared page comes once


def test_what_is_drawn_is_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, pages, rows = Limits(40, 44, 4, 1, 1), 200, 6
    chooser = SeededRecall(3)
    monkeypatch.setattr(chooser, "_charge", lambda *args: None)
    resident = np.zeros((rows, pages), np.bool_)
    resident[:, :44] = True
    zeros = torch.zeros(1, rows, pages, 8)
    digests = Digests(zeros, zeros, torch.from_numpy(resident).view(1, rows, pages), (zeros[0, 0, 0],) * 2, 1.0, pages)
    missing = ahead = fallbacks = 0
    for _ in range(100):
        found = chooser(torch.zeros(1, rows, 8), digests, limits, resident)
        fallbacks += int(found.left_out.max() > 0.5)
        for row in range(rows):
            chosen, coming = set(found.chosen[row].tolist()), set(found.ahead[row].tolist()) - {-1}
            victims, there = set(found.victims[row].tolist()) - {-1}, set(np.flatnonzero(resident[row]).tolist())
            assert len(chosen) == 40
            assert {0, pages - 1} <= chosen
            assert not coming & (there | chosen)
            assert victims <= there - chosen
            assert len((there | chosen | coming) - victims) <= 44
            missing, ahead = missing + len(chosen - there), ahead + len(coming)
            for page in range(pages):
                resident[row, page] = page in ((there | chosen | coming) - victims)
    assert fallbacks == 5
    assert 0.95 * MISSING <= missing / (100 * rows * 40) < MISSING + 0.05
    assert 0 < ahead / (100 * rows * 40) <= 1.05 * AHEAD
