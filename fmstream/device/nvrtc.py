"""CUDA kernels of this package, compiled for a card when they are first used."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

__all__ = ["compile_kernel"]


def compile_kernel(source: str, architecture: str, macros: Mapping[str, int]) -> Any:
    """Compile one of the sources in ``fmstream.cuda``; needs no card.

    Args:
        source: file name, such as "page_select.cu".
        architecture: such as "sm_89".
        macros: what the source is specialised for.

    Returns:
        A ``cuda.core.ObjectCode`` that holds a cubin for the architecture.

    Raises:
        ImportError: the packages of the extra ``cuda`` are not installed.
        cuda.core's CUDAError: the compiler refused; its message names the line.
    """
    return _compile(source, architecture, tuple(sorted(macros.items())))


@lru_cache(maxsize=64)
def _compile(source: str, architecture: str, macros: tuple[tuple[str, int], ...]) -> Any:
    from cuda.core import Program, ProgramOptions

    text = files("fmstream.cuda").joinpath(source).read_text(encoding="utf-8")
    options = ProgramOptions(
        name=source, std="c++17", arch=architecture, define_macro=[(name, str(value)) for name, value in macros]
    )
    return Program(text, "c++", options).compile("cubin")
