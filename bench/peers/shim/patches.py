"""Attributes that are replaced for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

_ABSENT: Final = object()


class Patches:
    """Replaces attributes of modules, classes and objects, and puts back what was there, last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._undo:
            self._undo.pop()()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; one that ``owner`` only inherits is deleted again at the end."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self.at_end(lambda: delattr(owner, name) if before is _ABSENT else setattr(owner, name, before))

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a function by what ``make`` returns for it; it keeps the name and the docstring."""
        before = getattr(owner, name)
        self.set(owner, name, functools.wraps(before)(make(before)))

    def at_end(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` at the end."""
        self._undo.append(undo)
