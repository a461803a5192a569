"""``fmstream validate --kv``: hit rates of a model that reads a text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fmstream.cli import main
from fmstream.errors import ConfigError
from fmstream.payloads.kv.hits import HitRates
from fmstream.validate import hits, kv
from fmstream.validate.models import Speaker
from fmstream.validate.outcome import Verdict
from fmstream.validate.place import find_place


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % kv.VOCABULARY for letter in text]}


def make_speaker() -> tuple[Any, Letters]:
    """What ``module:function`` is to return."""
    return kv.make_model(), Letters()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text, few steps, trials of the rest left out."""
    monkeypatch.setattr(hits, "TOKENS", 400)
    monkeypatch.setattr(hits, "LEAST_TOKENS", 300)
    monkeypatch.setattr(hits, "STEPS", 6)
    for name in ("try_weights", "try_kv"):
        monkeypatch.setattr(f"fmstream.validate.command.{name}", lambda place: iter(()))


def rates_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["trial"]: row for row in document["trials"]}


@pytest.mark.usefixtures("small")
def test_the_rates_of_a_model_from_a_function(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("some words and again some other words " * 20)
    arguments = ["validate", "--device", "cpu", "--kv", f"{__name__}:make_speaker", "--prompt", str(text), "--json"]
    status = main(arguments)
    document = json.loads(capsys.readouterr().out)
    rows = rates_of(document)
    assert list(rows) == ["importance", "position", "paging", "decisions"]
    assert status == document["status"] == int(any(row["verdict"] == "FAIL" for row in rows.values()))
    layers = kv.LAYERS - 2
    assert f"of {layers * 2 * 6} decisions" in rows["decisions"]["read"]
    assert "6 steps after 394 tokens" in rows["decisions"]["read"]
    assert document["about"]["read"] == f"{text}, by {__name__}:make_speaker"


@pytest.mark.parametrize(
    ("rates", "failed"),
    [
        (HitRates(0.92, 0.88, 0.95, 100, 0.05), []),
        (HitRates(0.919, 0.88, 0.95, 100, 0.0), ["importance"]),
        (HitRates(0.92, 0.879, 0.95, 100, 0.0), ["position"]),
        (HitRates(0.92, 0.88, 0.949, 100, 0.051), ["paging", "decisions"]),
    ],
)
def test_the_marks(rates: HitRates, failed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "measure", lambda model, ids: rates)
    with find_place("cpu") as place:
        speaker = Speaker(torch.nn.Linear(1, 1), Letters())
        outcomes = list(hits.try_hits(place, speaker, torch.zeros(1, 100, dtype=torch.long)))
    assert [outcome.trial for outcome in outcomes if outcome.verdict is Verdict.FAIL] == failed


def test_text_that_is_too_short() -> None:
    speaker = Speaker(SimpleNamespace(config=SimpleNamespace(max_position_embeddings=4096)), Letters())
    with pytest.raises(ConfigError, match=r"has 511 tokens .* at least 512 .* give a longer text"):
        hits.tokens_of(speaker, "x" * 511)
    assert hits.tokens_of(speaker, "x" * 512).shape == (1, 512)
    assert hits.tokens_of(speaker, "x" * 9999).shape == (1, hits.TOKENS)


def test_a_text_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--device", "cpu", "--prompt", "text"]) == 2
    assert "--kv" in capsys.readouterr().err
