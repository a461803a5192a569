"""The nouns of the zoo: a client, what it builds, and the tensors it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

SEED = 11


@dataclass(frozen=True)
class Built:
    """A tiny model with random weights and one way to run it.

    Attributes:
        modules: what a user would hand to ``fmstream.stream``: a module, a diffusers pipeline or a dict of modules.
        run: runs it on inputs.
        args, kwargs: the inputs, made on the CPU.
    """

    modules: Any
    run: Callable[..., object]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def call(self, device: str = "cpu") -> object:
        """Run it on the inputs, put on a device.

        Two calls of two fresh builds return equal tensors; if the client is tagged "stateful", the n-th calls agree.
        """
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (self.args, dict(self.kwargs)))
        return self.run(*args, **kwargs)


@dataclass(frozen=True)
class Client:
    """One row of the zoo: ``build`` seeds itself and leaves the global generator as it was."""

    name: str
    build: Callable[[], Built]
    tags: frozenset[str]


def client(name: str, build: Callable[[], Built], *tags: str) -> Client:
    """A row whose ``build`` runs with a seed of its own."""

    def seeded() -> Built:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return build()

    return Client(name, seeded, frozenset(tags))


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Built:
    """``module(*args, **kwargs)`` in eval mode."""
    wake(module).eval()
    return Built(module, module, args, kwargs)


def drawing(built: Built) -> Built:
    """The same client, where each call draws from the global generator with a seed of its own."""

    def run(*args: Any, **kwargs: Any) -> object:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return built.run(*args, **kwargs)

    return Built(built.modules, run, built.args, built.kwargs)


def wake(module: nn.Module) -> nn.Module:
    """Give parameters that start as zeros (biases, gates, output layers) small random values, so that they count."""
    with torch.no_grad():
        for param in module.parameters():
            if not param.any():
                param.normal_(0.0, 0.05)
    return module


def named_modules_of(modules: Any) -> dict[str, nn.Module]:
    """The top modules in what is handed to ``fmstream.stream``, by name; a single module has the name ""."""
    if isinstance(modules, nn.Module):
        return {"": modules}
    parts = modules if isinstance(modules, Mapping) else modules.components
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def parameters_of(modules: Any) -> list[nn.Parameter]:
    """All parameters, each once."""
    seen = {id(p): p for top in named_modules_of(modules).values() for p in top.parameters()}
    return list(seen.values())


def num_bytes(params: Iterable[Tensor]) -> int:
    """Sum of the sizes in bytes."""
    return sum(p.numel() * p.element_size() for p in params)


def flat(outputs: object) -> list[Tensor]:
    """All tensors in the outputs, in order; arrays and images are converted, caches and plain values are left out."""
    match outputs:
        case Tensor():
            return [outputs]
        case np.ndarray():
            return [torch.from_numpy(outputs)]
        case PIL.Image.Image():
            return [torch.from_numpy(np.array(outputs))]
        case Mapping():
            return [tensor for value in outputs.values() for tensor in flat(value)]
        case list() | tuple():
            return [tensor for value in outputs for tensor in flat(value)]
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return flat([getattr(outputs, field.name) for field in dataclasses.fields(outputs)])
    return []


def ids(batch: int = 2, length: int = 9) -> Tensor:
    """Token ids in [3, 90), the same at each call: int64 of shape (batch, length)."""
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(5))


def noise(*shape: int) -> Tensor:
    """Normal float32 numbers, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))
