"""Blocks of unlike sizes, some of which compute more than their bytes would have it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes; a block's feed-forward part is 1 to 7 times as wide as the model, by the seed."""

    num_blocks: int = 40
    width: int = 256
    num_heads: int = 4
    num_features: int = 64
    num_tokens: int = 64
    seed: int = 0


class Block(nn.Module):
    """Attention and a feed-forward part; ``more`` times the tokens attend, without parameters."""

    def __init__(self, width: int, num_heads: int, hidden: int, more: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.more = more
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(1, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        for _ in range(1 + self.more):
            q = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(q.transpose(1, 2).reshape(batch, tokens, width))
        hidden: Tensor = self.down(functional.gelu(self.up(x)))
        return x + hidden


class Net(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        numbers = random.Random(shape.seed)
        self.stem = nn.Linear(shape.num_features, shape.width)
        self.blocks = nn.ModuleList(
            Block(shape.width, shape.num_heads, shape.width * numbers.randint(1, 7), numbers.choice((0, 0, 0, 4, 12)))
            for _ in range(shape.num_blocks)
        )
        self.head = nn.Linear(shape.width, shape.num_features)

    def forward(self, x: Tensor) -> Tensor:
        """(1, tokens, features) to the same shape."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def build(shape: Shape) -> Net:
    """The model on the CPU, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(shape.seed)
        return Net(shape).eval().requires_grad_(False)
