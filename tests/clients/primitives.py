"""Models made of plain torch.nn, and the odd ways in which modules are used."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from tests.clients.client import Built, Client, client, drawing, forward, noise, wake


class Recurrent(nn.Module):
    """Recurrent modules, one after another, between two linear ones."""

    def __init__(self, body: list[nn.RNNBase]) -> None:
        super().__init__()
        self.enter = nn.Linear(16, body[0].input_size)
        self.body = nn.ModuleList(body)
        self.leave = nn.Linear(body[-1].hidden_size * (2 if body[-1].bidirectional else 1), 64)

    def forward(self, x: Tensor) -> tuple[Tensor, list[object]]:
        hidden, states = self.enter(x), []
        for layer in self.body:
            hidden, state = layer(hidden)
            states.append(state)
        return self.leave(hidden), states


class Attentions(nn.Module):
    """Self-attention three times; the second returns its attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(48, 4, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        weights = []
        for i, layer in enumerate(self.layers):
            x, seen = layer(x, x, x, need_weights=i == 1)
            weights += [seen] if seen is not None else []
        return [x, *weights]


class Shortcut(nn.Module):
    """Calls its first layer again after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(96, 96)
        self.b = nn.Linear(96, 96)
        self.c = nn.Linear(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(torch.relu(self.b(torch.relu(self.a(x))))))


class Branches(nn.Module):
    """Takes another branch at each call: a, b, a, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(96, 96)
        self.a = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96))
        self.b = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.a if self.calls % 2 else self.b)(self.stem(x))


class Reader(nn.Module):
    """Reads the weights of its children without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 64)
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.first.weight, self.first.bias)
        return self.body(hidden.tanh() @ self.second.weight.T + self.second.bias)


class TwoDoors(nn.Module):
    """Is used through its methods, never through ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(32))
        self.down = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 32))
        self.up = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 96))

    def encode(self, x: Tensor) -> Tensor:
        return self.down(x) * self.scale

    def decode(self, z: Tensor) -> Tensor:
        return self.up(z / self.scale)


class Rotation(nn.Module):
    """A linear layer that multiplies by a table which it shares with others, as a buffer outside the state dict."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self.table


class Odd(nn.Module):
    """One parameter of any dtype and layout, doubled."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self) -> Tensor:
        return 2 * (self.weight.float() if self.weight.dtype == torch.float8_e4m3fn else self.weight)


class OddTensors(nn.Module):
    """Parameters that are empty, strided, a slice of a larger tensor, or of a rare dtype."""

    def __init__(self) -> None:
        super().__init__()
        odd = [
            torch.zeros(0),
            torch.zeros(2, 0),
            torch.randn(()),
            torch.randn(96, 128)[:, ::2],
            torch.randn(64, 96).t(),
            torch.randn(300, 64)[3:99],
            torch.randint(-100, 100, (96, 64), dtype=torch.int8),
            torch.randn(96, 64).to(torch.float16),
            torch.randn(96, 64).to(torch.float8_e4m3fn),
            torch.randn(96, 64, dtype=torch.complex64),
            torch.rand(96, 64) > 0.5,
        ]
        self.odd = nn.ModuleList(map(Odd, odd))
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.layers(x), *(odd() for odd in self.odd)]


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def transformer() -> Built:
    model = nn.Transformer(48, 4, 2, 2, 96, batch_first=True)
    return forward(model, noise(2, 7, 48), noise(2, 5, 48))


def attention() -> Built:
    x = noise(2, 7, 96)
    return forward(nn.MultiheadAttention(96, 4, batch_first=True), x, x, x)


def padded_encoder() -> Built:
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    return forward(encoder(), noise(2, 7, 48), src_key_padding_mask=padding)


def dropout() -> Built:
    """Train mode without state: each call draws the same masks."""
    model = wake(encoder()).train()
    return drawing(Built(model, model, (noise(2, 7, 48),)))


def lstm() -> Built:
    return forward(Recurrent([nn.LSTM(32, 32, batch_first=True) for _ in range(4)]), noise(2, 9, 16))


def gru() -> Built:
    """Both directions."""
    body = [nn.GRU(width, 32, bidirectional=True, batch_first=True) for width in (32, 64)]
    return forward(Recurrent(body), noise(2, 9, 16))


def convolutions() -> nn.Sequential:
    widths = [3, 16, 24, 32, 32]
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 4, 64))


def train_convolutions() -> Built:
    """Each call moves the running statistics."""
    model = wake(convolutions()).train()
    return Built(model, model, (noise(4, 3, 32, 32),))


def two_doors() -> Built:
    model = wake(TwoDoors()).eval()
    return Built(model, lambda x: model.decode(model.encode(x)), (noise(2, 96),))


def outside_read() -> Built:
    """The user looks at a weight between two calls."""
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), *(nn.Linear(96, 96) for _ in range(3)))
    wake(model).eval()
    return Built(model, lambda x: (model(x), model[2].weight[0] * 3, model(-x)), (noise(2, 64),))


def tied_parts() -> Built:
    """Three modules, two of which share a weight, handed over in a dict."""
    embed, head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
    head.weight = embed.weight
    body = nn.Sequential(nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 64))
    parts = {"embed": embed, "body": wake(body), "head": head}
    tokens = torch.arange(20).view(2, 10)
    return Built(parts, lambda tokens: parts["head"](parts["body"](parts["embed"](tokens))), (tokens,))


def bfloat16() -> Built:
    """One weight is transposed, one in the channels-last format."""
    convolve = [nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 32, 3)]
    model = nn.Sequential(*convolve, nn.Flatten(), nn.Linear(32 * 4, 128)).to(torch.bfloat16)
    model[1].to(memory_format=torch.channels_last)
    model[4].weight = nn.Parameter(model[4].weight.detach().t().contiguous().t())
    return forward(model, noise(2, 3, 8, 8).bfloat16())


def weight_norm() -> Built:
    """Weights that a parametrization computes from two parameters at each call."""
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(96, 96)) for _ in range(4)]
    return forward(nn.Sequential(*layers), noise(2, 96))


def shared_buffers() -> Built:
    table = noise(64).cos()
    return forward(nn.Sequential(*(Rotation(table) for _ in range(7))), noise(2, 64))


PRIMITIVES: list[Client] = [
    client("encoder_fast_path", lambda: forward(encoder(), noise(2, 7, 48)), "torch"),
    client("encoder_padded", padded_encoder, "torch"),
    client("encoder_dropout", dropout, "torch", "train"),
    client("transformer", transformer, "torch"),
    client("attention_alone", attention, "torch"),
    client("attentions", lambda: forward(Attentions(), noise(2, 7, 48)), "torch"),
    client("lstm", lstm, "torch"),
    client("gru", gru, "torch"),
    client("convolutions", lambda: forward(convolutions(), noise(4, 3, 32, 32)), "torch"),
    client("convolutions_train", train_convolutions, "torch", "train", "stateful"),
    client("shortcut", lambda: forward(Shortcut(), noise(2, 96)), "torch"),
    client("branches", lambda: forward(Branches(), noise(2, 96)), "torch", "stateful"),
    client("reader", lambda: forward(Reader(), noise(2, 64)), "torch"),
    client("two_doors", two_doors, "torch", "methods"),
    client("outside_read", outside_read, "torch"),
    client("tied_parts", tied_parts, "torch", "tied"),
    client("bfloat16", bfloat16, "torch"),
    client("odd_tensors", lambda: forward(OddTensors(), noise(2, 64)), "torch"),
    client("weight_norm", weight_norm, "torch"),
    client("shared_buffers", shared_buffers, "torch"),
]
