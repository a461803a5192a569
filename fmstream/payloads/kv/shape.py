"""What a page of a layer's keys and values looks like in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PageShape(NamedTuple):
    """A page: ``tokens`` positions of one sequence in one layer, [heads, tokens, key_dim], then the same of values."""

    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def key_elements(self) -> int:
        """Elements of the keys; those of the values lie behind them."""
        return self.heads * self.tokens * self.key_dim

    @property
    def elements(self) -> int:
        """Elements of keys and values."""
        return self.key_elements + self.heads * self.tokens * self.value_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of a page."""
        return self.elements * self.dtype.itemsize

    def pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-num_tokens // self.tokens)

    def views(self, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of pages, [n, heads, tokens, dim] each, of a tensor [n, elements]."""
        keys, values = frames[:, : self.key_elements], frames[:, self.key_elements :]
        return (
            keys.view(len(frames), self.heads, self.tokens, self.key_dim),
            values.view(len(frames), self.heads, self.tokens, self.value_dim),
        )
