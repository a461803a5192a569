"""A real text to read: the reference of the language, which every Python brings along for its ``help()``."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Final

from fmstream.errors import ConfigError

CHAPTERS: Final = ("execmodel", "objects", "naming", "import", "calls", "compound", "types", "specialnames", "debugger")
"""Topics of ``help()`` that are mostly prose."""
RULES: Final = re.compile(r"^[-=*~^+| ]{3,}$", re.MULTILINE)
"""Lines below headings and in tables."""


def read_prompt(file: str | None, option: str = "--prompt") -> str:
    """The text of a file, or the reference of the language.

    Raises:
        ConfigError: the file is none, holds nothing or no UTF-8 text, or this Python came without the reference.
    """
    if file is None:
        return reference()
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}: give a text file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {file} is no UTF-8 text ({error.reason}): give a text file") from error
    if not text.strip():
        raise ConfigError(f"{option} {file} holds no text: give one of some thousand words")
    return text


def reference() -> str:
    """Some 30,000 words of English prose, a paragraph a line; raises `ConfigError` where they did not come along."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ConfigError("this Python came without the texts of help(): give a text file of your own") from error
    whole = "\n\n".join(topics[name] for name in CHAPTERS if name in topics)
    paragraphs = re.split(r"\n\s*\n", RULES.sub("", whole))
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())
