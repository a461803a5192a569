"""What versions of transformers differ in, as far as a cache sees it."""

from __future__ import annotations

from typing import Any, Final

import transformers

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} has no caches made of layers: PagedCache needs 5.0 or later"
    ) from error

__all__ = ["Cache", "CacheLayerMixin", "DynamicCache", "DynamicLayer", "length_of_query", "length_to_keep"]

_FIRST_THAT_ONLY_REMOVES: Final = (5, 24)
"""Before, a positive argument of ``crop`` was the length to keep."""


def _version() -> tuple[int, int]:
    major, minor = transformers.__version__.split(".")[:2]
    return int(major), int(minor)


def length_of_query(query: Any) -> int:
    """Tokens that come next: their number, or (5.0) a tensor of their positions."""
    return query if isinstance(query, int) else int(query.shape[0])


def length_to_keep(argument: int, length: int, version: tuple[int, int] | None = None) -> int:
    """Tokens that are left of ``length`` after ``crop(argument)``.

    Raises:
        ValueError: the argument is positive, in a version where it is the negative number of tokens to remove.
    """
    if argument > 0:
        if (version or _version()) >= _FIRST_THAT_ONLY_REMOVES:
            raise ValueError(f"crop({argument}): give the number of tokens to remove as a negative number")
        return min(argument, length)
    return max(0, length + argument)
