"""Call sites: which lines of the user's code an operation came from."""

from __future__ import annotations

import itertools
import os
import sys
from types import CodeType, FrameType
from typing import Final

MAX_FRAMES: Final = 3
"""Frames kept of each operation."""
MAX_DEPTH: Final = 60
"""Frames looked at before giving up."""

Site = tuple[tuple[CodeType, int], ...]
"""Code and index of the instruction; lines are worked out when a report is written."""

_HERE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_outside: dict[int, bool] = {}
"""By the id of a code object: to hash one takes as long as all the rest of a look at a frame."""
_kept: list[CodeType] = []
"""Those code objects, lest an id be used again."""


def _is_outside(code: CodeType) -> bool:
    """Whether code is in a file that is neither the emulator's nor PyTorch's."""
    name = code.co_filename
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    rooms = (_HERE, os.path.dirname(torch) + os.sep) if torch else (_HERE,)
    # The standard library's context managers and wrappers stand between the two.
    between = ("contextlib.py", "functools.py")
    outside = not name.startswith(("<", *rooms)) and os.path.basename(name) not in between
    _kept.append(code)
    _outside[id(code)] = outside
    return outside


def here() -> Site:
    """The nearest frames outside the emulator and PyTorch, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    site: Site = ()
    for _ in range(MAX_DEPTH):
        if frame is None:
            break
        code = frame.f_code
        outside = _outside.get(id(code))
        if outside or (outside is None and _is_outside(code)):
            site = (*site, (code, frame.f_lasti))
            if len(site) == MAX_FRAMES:
                break
        frame = frame.f_back
    return site


def describe(site: Site) -> str:
    """``file:line in function``, the innermost first."""
    if not site:
        return "an unknown place"
    return ", called from ".join(f"{code.co_filename}:{_line(code, last)} in {code.co_name}" for code, last in site)


def _line(code: CodeType, last: int) -> int:
    position = next(itertools.islice(code.co_positions(), last // 2, None), (None,))
    return position[0] or code.co_firstlineno
