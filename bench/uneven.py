"""Blocks of unlike sizes, some of which compute more than their bytes would have it."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.peers.model import Net, Shape


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


def build(shape: Shape, seed: int = 0) -> Net:
    """The model on the CPU, the same at every call: feed-forward parts are 1 to 7 times as wide, by the seed."""
    numbers = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = Net(
            shape,
            lambda: Block(
                shape.width, shape.num_heads, shape.width * numbers.randint(1, 7), numbers.choice((0, 0, 0, 4, 12))
            ),
        )
    return net.eval().requires_grad_(False)
