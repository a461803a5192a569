"""Modules that use their parameters in many ways, and the steps that are taken with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from tests.accelerator.kit import here
from tests.kit import mlp, noise

WIDTH = 64


@dataclass(frozen=True)
class Case:
    """A module (or a dict of them), and a step: what is done with it in its n-th call, on a device.

    ``plain`` says that each call is one pass that uses every parameter once, ``edited`` that steps exchange parameters.
    """

    name: str
    build: Callable[[], Any]
    step: Callable[[Any, int], Any]
    plain: bool = False
    edited: bool = False


def x(*shape: int, seed: int = 3) -> Tensor:
    """Noise on the device."""
    return noise(*shape, seed=seed).to(here.name)


def call(module: nn.Module, number: int) -> Tensor:
    """One call with other numbers each time."""
    return module(x(3, WIDTH, seed=number))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(gate.sigmoid() * value)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """An embedding whose weight is the head's, with layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layers = nn.Embedding(96, WIDTH), mlp(6, WIDTH)
        self.head = nn.Linear(WIDTH, 96, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.emb(ids)))  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Buffers that change in the forward: running statistics, a count, one replaced by a new tensor."""

    total: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(6, WIDTH)[::2])
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(6))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        self.total = self.total + x.detach().sum(0)
        self.calls += 1
        return x + self.total


class Rotated(nn.Module):
    """One table for all layers, which no state dict holds."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(6, WIDTH)[::2])
        table = noise(WIDTH, seed=9)
        for layer in self.layers:
            layer.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * layer.table))
        return x


def convolutions() -> nn.Module:
    """Convolutions whose weights lie channels last."""
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(8)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]


class Odd(nn.Module):
    """Parameters that are transposed, expanded, a part of another tensor, empty, one number, or of a small type."""

    def __init__(self) -> None:
        super().__init__()
        base = noise(5 * WIDTH, WIDTH, seed=1) / 8
        self.turned = nn.Parameter(noise(WIDTH, WIDTH, seed=2).t() / 8)
        self.spread = nn.Parameter(noise(1, WIDTH, seed=4).expand(8, WIDTH))
        self.part = nn.Parameter(base[WIDTH : 2 * WIDTH])
        self.every = nn.Parameter(noise(WIDTH, 2 * WIDTH, seed=5)[:, ::2] / 8)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.small = nn.Parameter(noise(WIDTH, WIDTH, seed=6).to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.turned, self.part, self.every):
            x = torch.tanh(linear(x, weight))
        return x * self.number + self.spread[0] + self.empty.sum() + linear(x.bfloat16(), self.small).float()


def odd() -> nn.Module:
    """Some of those in a row."""
    return nn.Sequential(*(Odd() for _ in range(4)))


def pipeline() -> dict[str, nn.Module]:
    """A small root beside large ones."""
    return {"text": mlp(1, WIDTH, 1), "unet": mlp(8, WIDTH, 2), "decoder": mlp(4, WIDTH, 3)}


def denoise(parts: dict[str, nn.Module], number: int) -> Tensor:
    """The text once, a step of guidance, the decoder."""
    text = parts["text"](x(2, WIDTH, seed=number))
    state = x(2, WIDTH, seed=number + 50)
    for _ in range(2):
        state = state + parts["unet"](state + text) - 0.5 * parts["unet"](state)
    return parts["decoder"](state)  # type: ignore[no-any-return]


def guided(module: nn.Module, number: int) -> list[Tensor]:
    """Two calls a step."""
    return [module(x(2, WIDTH, seed=number)), module(torch.zeros(2, WIDTH, device=here.name))]


class Wandering(nn.Module):
    """Calls the layers that it is told to, some of them within another one's call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(8, WIDTH)[::2])
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.inner: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor, steps: list[int], depth: int = 0) -> Tensor:
        for step in steps:
            x = torch.tanh(self.layers[step](x))
        if depth:
            x = x + self(x, steps[:2], depth - 1)
        return self.inner(x) + self.outer(x)  # type: ignore[no-any-return]


def wander(module: nn.Module, number: int) -> Tensor:
    """Layers in order, then some skipped, then some repeated, then recursively."""
    steps = [[*range(8)], [0, 2, 3, 7], [0, 1, 1, 5, 4, 4, 0], [*range(8)], [7, 6, 0]][number % 5]
    return module(x(3, WIDTH, seed=number), steps, number % 3)  # type: ignore[no-any-return]


def grow(module: nn.Module, number: int) -> Tensor:
    """A stack at several lengths."""
    return module(x(1 + number % 2, (4, 4, 16, 16, 8, 4)[number % 6], WIDTH, seed=number))  # type: ignore[no-any-return]


def edit(module: nn.Sequential, number: int) -> Tensor:
    """Parameters that are replaced, written, filled and set between calls."""
    layer = module[2 * number]
    value = noise(WIDTH, WIDTH, seed=70 + number) / 8
    if type(layer.weight) is nn.Parameter:
        value = value.to(layer.weight.device)  # the twin's; streamed modules keep theirs on the CPU
    if number == 1:
        layer.weight = nn.Parameter(value)
    elif number == 2:
        layer.weight.copy_(value)
    elif number == 3:
        layer.weight.data = value
    elif number == 4:
        module[6].weight[3] = 0.25
        module.load_state_dict({"4.bias": value[0]}, strict=False)
    return call(module, number)


class Adapted(nn.Module):
    """A linear layer with two low-rank factors that can be merged into it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.weight.data = noise(WIDTH, WIDTH, seed=seed) / 8
        self.down = nn.Parameter(noise(4, WIDTH, seed=seed + 1) / 8)
        self.up = nn.Parameter(noise(WIDTH, 4, seed=seed + 2) / 8)
        self.merged = False

    def merge(self, sign: int) -> None:
        """Add the factors' product to the weight, or take it away again."""
        self.base.weight.add_(sign * (self.up @ self.down))
        self.merged = sign > 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return torch.tanh(y if self.merged else y + linear(linear(x, self.down), self.up))


def adapted() -> nn.Module:
    """Some of those in a row."""
    return nn.Sequential(*(Adapted(10 * n) for n in range(6))).eval()


def adapt(module: nn.Sequential, number: int) -> Tensor:
    """Merge some after the first calls, and take it back."""
    for at in range(0, 6, 2):
        if number in (2, 4):
            module[at].merge(1 if number == 2 else -1)
    return call(module, number)


class Writing(nn.Module):
    """Writes its own parameter in the forward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(WIDTH, WIDTH, seed=seed) / 8)
        self.layer = mlp(1, WIDTH, seed)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.mul_(0.75)
        return self.layer(linear(x, self.weight))  # type: ignore[no-any-return]


class Keeping(nn.Module):
    """Keeps views of weights until the end of its call, or longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(6, WIDTH)[::2])
        self.longer = False

    def forward(self, x: Tensor) -> Any:
        rows = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            rows.append(layer.weight[0].view(-1))
        return (x, rows[1]) if self.longer else x + torch.stack(rows).sum(0)


def keeping_longer() -> nn.Module:
    """One that hands a view out."""
    module = Keeping()
    module.longer = True
    return module


CASES = (
    Case("mlp", lambda: mlp(8, WIDTH), call, plain=True),
    Case("blocks", lambda: nn.Sequential(*(Block() for _ in range(4))).eval(), grow, plain=True),
    Case("tied", Tied, lambda module, n: module(torch.arange(n, n + 12, device=here.name).view(2, 6))),
    Case("buffers", Counting, call),
    Case("table", Rotated, call, plain=True),
    Case("channels_last", convolutions, lambda m, n: m(x(2, 8, 6, 6, seed=n).to(memory_format=torch.channels_last))),
    Case("odd", odd, call),
    Case("pipeline", pipeline, denoise),
    Case("guided", lambda: mlp(8, WIDTH), guided),
    Case("wandering", Wandering, wander),
    Case("edited", lambda: mlp(8, WIDTH), edit, edited=True),
    Case("adapted", adapted, adapt),
    Case("writing", lambda: nn.Sequential(*(Writing(n) for n in range(6))), call),
    Case("keeping", Keeping, call),
    Case("keeping_longer", keeping_longer, call),
)
