"""Operators that use some rows of a tensor by index: which ones, so that the checker need not take it for all."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from fmstream.emulator.tensors import Span, num_elements_spanned

_picked = threading.local()


@contextmanager
def picked_rows(tensor: torch.Tensor, rows: Iterable[int]) -> Iterator[None]:
    """Within the body, operators on ``tensor`` use these rows (of its first dimension) and no others.

    The checker knows bytes, and the values of an index it does not know before the operator runs.
    """
    row = num_elements_spanned(tensor.size()[1:], tensor.stride()[1:]) * tensor.element_size()
    step = tensor.stride(0) * tensor.element_size()
    before = getattr(_picked, "spans", None)
    _picked.spans = _key(tensor), _spans(tensor.data_ptr(), step, row, sorted(set(map(int, rows))))
    try:
        yield
    finally:
        _picked.spans = before


def _key(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.size(), tensor.stride()


def _spans(address: int, step: int, row: int, rows: list[int]) -> list[Span]:
    """One for each row; where rows lie side by side, one for each run."""
    if step != row:
        return [(address + number * step, row) for number in rows]
    cuts = [0, *(at + 1 for at, (one, other) in enumerate(pairwise(rows)) if other != one + 1), len(rows)]
    return [(address + rows[low] * step, (high - low) * step) for low, high in pairwise(cuts) if high > low]


def spans_used(tensor: torch.Tensor) -> list[Span] | None:
    """What an operator uses of a tensor, None if nothing was said of it."""
    found: tuple[object, list[Span]] | None = getattr(_picked, "spans", None)
    return found[1] if found is not None and found[0] == _key(tensor) else None
