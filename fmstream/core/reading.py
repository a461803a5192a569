"""Reading what may be absent, forbidden or garbled, without raising."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_CHARACTERS: Final = 1 << 20
"""More than any file of the kernel that is read here has."""

_INTEGER: Final = re.compile(r"[+-]?(0x[0-9a-f]{1,32}|[0-9]{1,32})", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a value that could not be read, and says why; ``code`` is the error's number if it has one."""

    why: str
    code: int | None = None

    def __str__(self) -> str:
        return self.why


def read_text(path: Path) -> str | Unread:
    """The text of a file without blanks at its ends."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CHARACTERS).strip()
    except OSError as error:
        return Unread(f"{path.name}: {error.strerror or type(error).__name__}", error.errno)
    except ValueError as error:  # a path that no file can have
        return Unread(f"{path.name}: {error}")


def read_int(path: Path) -> int | Unread:
    """The integer in a file, decimal or with 0x."""
    text = read_text(path)
    return text if isinstance(text, Unread) else parse_int(text, path.name)


def parse_int(text: str, name: str) -> int | Unread:
    """The integer that a text is, decimal or with 0x."""
    text = text.strip()
    if not _INTEGER.fullmatch(text):
        return Unread(f"{name}: {text[:40]!r} is no number")
    return int(text, 16 if "x" in text.lower() else 10)


def names_in(folder: Path) -> list[str]:
    """Sorted names in a folder; none if it cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def parse_cpu_list(text: str) -> frozenset[int]:
    """Numbers in a list of the kernel such as "0-3,8"; what is no number in it is left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and first.isascii() and len(first) < 6):
            continue
        end = int(last) if last.isdecimal() and last.isascii() and len(last) < 6 else int(first)
        found.update(range(int(first), end + 1))
    return frozenset(found)
