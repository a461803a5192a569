"""The text that is read, and the model that reads it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fmstream.errors import ConfigError
from fmstream.validate.models import find_speaker
from fmstream.validate.text import read_prompt, reference


def test_the_reference_is_prose() -> None:
    text = reference()
    words = text.split()
    assert len(words) > 20_000
    assert "A Python program is constructed from code blocks." in text
    assert not any(line.strip("=*-~^ ") == "" for line in text.splitlines())
    assert "====" not in text


def test_a_python_without_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ConfigError, match="give a text file of your own"):
        read_prompt(None)


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("Où ça?", encoding="utf-8")
    assert read_prompt(str(file)) == "Où ça?"


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), (b" \n", "holds no text"), (b"\xff\xfe\x00", "is no UTF-8 text")]
)
def test_a_text_that_cannot_be_read(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--prompt .*text.* {said}"):
        read_prompt(str(file))


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="neither the folder of a model nor module:function"):
        find_speaker(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no config.json, and 0 GGUF files"):
        find_speaker(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        find_speaker(str(tmp_path))
    monkeypatch.setitem(sys.modules, "made_up", SimpleNamespace(make=lambda: 3))
    with pytest.raises(ConfigError, match="returned no pair"):
        find_speaker("made_up:make")
    with pytest.raises(ConfigError, match="has no function"):
        find_speaker("made_up:other")
