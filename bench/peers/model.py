"""The model that peers stream: equal transformer blocks in many small tensors, between a stem and a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes; the default has 126 MB of float32 in 480 tensors of blocks."""

    num_blocks: int = 40
    width: int = 256
    num_heads: int = 4
    num_features: int = 64
    num_tokens: int = 64


class Block(nn.Module):
    """Attention and a feed-forward part, both with LayerNorm before and a residual path."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(1, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + hidden


class Net(nn.Module):
    """A stem, blocks that ``make_block`` makes, and a head."""

    def __init__(self, shape: Shape, make_block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        make_block = make_block or (lambda: Block(shape.width, shape.num_heads))
        self.stem = nn.Linear(shape.num_features, shape.width)
        self.blocks = nn.ModuleList(make_block() for _ in range(shape.num_blocks))
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
        torch.default_generator.manual_seed(0)
        return Net(shape).eval().requires_grad_(False)


def make_input(shape: Shape) -> Tensor:
    """(1, tokens, features) on the CPU, the same at every call."""
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(1, shape.num_tokens, shape.num_features, generator=numbers)


def block_bytes(net: Net) -> int:
    """Bytes of all blocks' parameters: what is streamed."""
    return sum(p.numel() * p.element_size() for p in net.blocks.parameters())
