"""``fmstream validate``: what it prints, its exit status, and that it finds what is broken."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fmstream.cli import main
from fmstream.core.order import Places
from fmstream.device import page_packing
from fmstream.payloads.kv import packing
from fmstream.payloads.kv.filereads import FileReads, Reading
from fmstream.policies import names
from fmstream.validate import emulated, kv, weights
from fmstream.validate.outcome import Mismatch, Outcome, Validation, Verdict, carry_out
from fmstream.validate.page import render_validation
from fmstream.validate.place import find_place

WEIGHTS = [*(f"policy {name}" for name in names()), "from a file"]
KV = ["pages in host memory", "pages in a file", "beams", "with streamed weights"]


def trials(document: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    """The rows of one part, by trial."""
    return {row["trial"]: row for row in document["trials"] if row["part"] == part}


def test_everything_passes_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["status"]) == (1, 0)
    assert document["counts"] == {"PASS": len(WEIGHTS) + len(KV), "FAIL": 0, "NOT RUN": 0}
    assert document["about"]["device"].startswith("cpu, ")
    assert list(trials(document, "weights")) == WEIGHTS
    assert list(trials(document, "keys and values")) == KV
    assert all(row["seconds"] > 0 for row in document["trials"])
    assert "read from a file" in trials(document, "keys and values")["pages in a file"]["read"]


def test_the_table_of_the_emulated_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(emulated, "ORDERS", ("late",))
    assert main(["validate", "--device", "emu"]) == 0
    text = capsys.readouterr().out
    assert "emu, emulated rtx4070-laptop, in 1 orders of execution" in text
    with_pins = ["without pinned memory", "packed pages"]
    for name in [*WEIGHTS, *with_pins, *KV]:
        assert f"\n{name} " in text
    assert text.splitlines()[-1] == f"{len(WEIGHTS) + len(with_pins) + len(KV)} PASS"
    assert max(map(len, text.splitlines())) <= 110


def test_without_transformers_weights_are_tried_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "fmstream.payloads.kv.compat", raising=False)
    monkeypatch.setattr(kv, "make_model", lambda: pytest.fail("there is no such model"))
    assert main(["validate", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["counts"] == {"PASS": len(WEIGHTS), "FAIL": 0, "NOT RUN": 1}
    assert "transformers is not installed: pip install" in trials(document, "keys and values")["pages"]["read"]


@pytest.mark.parametrize("device", ["tpu:9", "nonsense"])
def test_a_device_that_is_not_here(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--device", device]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fmstream: device=")
    assert error.count("\n") == 1


def test_a_page_that_comes_back_wrong_from_the_file_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    land = FileReads.land

    def wrong(self: FileReads, reading: Reading, target: torch.Tensor) -> None:
        self.workers.wait(reading.ticket)
        self._rows(reading.begin, reading.count)[0, 0] ^= 1
        land(self, reading, target)

    monkeypatch.setattr(FileReads, "land", wrong)
    monkeypatch.setattr("fmstream.validate.command.try_weights", lambda place: iter(()))
    assert main(["validate", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^pages in a file +FAIL +.* of 256 values .by up to [0-9.e+-]+. differ", text, re.MULTILINE)
    assert "cache gave the same as the first" in " ".join(text.split())
    assert "3 PASS, 1 FAIL" in text


def test_a_page_that_is_unpacked_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(packed: torch.Tensor, pages: torch.Tensor) -> None:
        page_packing.unpack_pages(packed, pages)
        pages[0, 0] ^= 1

    monkeypatch.setattr(packing, "unpack_pages", wrong)
    monkeypatch.setattr(emulated, "ORDERS", ("eager",))
    with find_place("emu") as place:
        *_, outcome = kv.try_kv(place)
    assert (outcome.trial, outcome.verdict) == ("packed pages", Verdict.FAIL)
    assert "differ" in outcome.read


def test_where_pages_cannot_be_unpacked_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_packing, "why_not_unpacked", lambda device, elements: "no compiler")
    monkeypatch.setattr(emulated, "ORDERS", ("eager",))
    with find_place("emu") as place:
        *_, outcome = kv.try_kv(place)
    assert outcome.verdict is Verdict.NOT_RUN
    assert "no compiler" in outcome.read


def test_a_copy_that_waits_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Places, "claim", lambda *_: None)
    monkeypatch.setattr(emulated, "ORDERS", ("eager",))
    with find_place("emu") as place:
        outcome = next(kv.try_kv(place))
    assert outcome.verdict is Verdict.FAIL
    assert "out of order" in outcome.read


class Counting(nn.Module):
    """Its third call and all after it give something else; copies begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weights.make_model()
        self.calls = 2

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return weights.make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) + self.calls // 3


def test_an_output_that_differs_is_found() -> None:
    with pytest.raises(Mismatch, match=r"call 1: \d+ of 1024 values .by up to 1. differ from the unstreamed run's"):
        weights.compare(Counting(), "cpu")


def test_a_trial_in_which_nothing_moved_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "STREAMED_SHARE", 2.0)
    with find_place("cpu") as place:
        outcome = next(weights.try_weights(place))
    assert outcome.verdict is Verdict.FAIL
    assert "less than the" in outcome.read


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Mismatch("3 of 4 values differ"), "3 of 4 values differ"),
        (torch.OutOfMemoryError("no memory\nfor this"), "OutOfMemoryError: no memory"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (AssertionError(), "AssertionError: without a message"),
    ],
)
def test_what_a_trial_raises_is_its_outcome(error: BaseException, said: str) -> None:
    def trial() -> str:
        raise error

    outcome = carry_out("weights", "one", trial)
    assert (outcome.verdict, outcome.read) == (Verdict.FAIL, said)


def test_an_interrupt_ends_the_command() -> None:
    def trial() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out("weights", "one", trial)


def test_what_was_not_run_has_no_time_and_fails_nothing() -> None:
    outcomes = (Outcome("keys and values", "pages", Verdict.NOT_RUN, "transformers is not installed"),)
    validation = Validation({"device": "cpu"}, outcomes)
    assert validation.status == 0
    line = render_validation(validation).splitlines()[4]
    assert line.split() == ["pages", "NOT", "RUN", "transformers", "is", "not", "installed", "-"]


def test_the_cpu_is_tried_with_one_thread_and_has_its_threads_back() -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        with find_place("cpu") as place:
            outcome = place.carry_out("weights", "any", lambda device: f"{seen.append(torch.get_num_threads())}")
        assert (outcome.verdict, seen, torch.get_num_threads()) == (Verdict.PASS, [1], 2)
    finally:
        torch.set_num_threads(before)
