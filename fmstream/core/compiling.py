"""Functions as native code, compiled at once and kept on disk for the next process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def native(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for one signature, with options of ``numba.njit``.

    The code is kept where numba finds a folder that can be written to; elsewhere it is for this process only.
    """
    import numba

    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except (RuntimeError, OSError):  # no such folder
            return numba.njit(signature, **options)(function)

    return compile_now
