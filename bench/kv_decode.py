"""A language model that decodes on an emulated card, dry, with its keys and values in whatever cache it is given."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fmstream import PagedCache, emulator
from fmstream.doors.dry_run import AMPLE_BYTES, unknown_values, without_memory
from fmstream.emulator.cards import Card
from fmstream.emulator.checker import Check

WARM_TOKENS: Final = 2
"""Tokens before those that count: frames have found their pages by then."""
TOKENS: Final = 4
"""Tokens that count."""

Make = Callable[[Any], Any]
"""An empty cache for a model's configuration."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its context; the defaults are those of Llama 3.1 8B, in bfloat16."""

    tokens: int
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    width: int = 4096
    inner: int = 14336
    vocabulary: int = 128256

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one layer."""
        return 2 * self.kv_heads * self.tokens * self.head_dim * torch.bfloat16.itemsize

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one sequence."""
        return self.layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Decoded:
    """Steady decoding.

    Attributes:
        seconds: of one step, which gives every sequence a token.
        compute_seconds: how long the card computed in it.
        bytes_in, bytes_out: over the link, in it.
        device_bytes: the most that was allocated on the card beside the weights and digests.
        digest_bytes: digests of pages.
        host_bytes: the most that was pinned on the host, as PyTorch rounds what it pins.
        races: accesses out of order that the checker found.
    """

    seconds: float
    compute_seconds: float
    bytes_in: float
    bytes_out: float
    device_bytes: int
    digest_bytes: int
    host_bytes: int
    races: int


@cache
def _model(shape: Shape) -> nn.Module:
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.tokens + 64,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def weight_bytes(shape: Shape) -> int:
    """Bytes of the weights, which are resident and count for nothing but the time to read them."""
    return sum(parameter.nbytes for parameter in _model(shape).parameters())


class Decoder:
    """The model on a machine of its own, with weights and all on the card."""

    def __init__(self, machine: emulator.Machine, shape: Shape) -> None:
        self.machine = machine
        self.shape = shape
        self.model: Any = without_memory(_model(shape)).to("emu")
        self._weights = machine.statistics().allocated

    def fill(self, cache: Any) -> None:
        """Put a context into a cache, a layer at a time, as a prefill would."""
        shape = self.shape
        for layer in range(shape.layers):
            size = (1, shape.kv_heads, shape.tokens, shape.head_dim)
            keys, values = (torch.empty(size, dtype=torch.bfloat16, device="emu") for _ in range(2))
            cache.update(keys, values, layer)

    def step(self, cache: Any, sequences: int) -> None:
        """A token for every sequence; the host waits for it, as whoever samples it does."""
        ids = torch.ones((sequences, 1), dtype=torch.long, device="emu")
        self.model(input_ids=ids, use_cache=True, cache=cache)
        torch.get_device_module("emu").current_stream().synchronize()

    def measure(self, cache: Any, sequences: int) -> Decoded:
        """Steady steps."""
        machine = self.machine
        for _ in range(WARM_TOKENS):
            self.step(cache, sequences)
        machine.reset_statistics()
        before, began = machine.statistics(), machine.now
        for _ in range(TOKENS):
            self.step(cache, sequences)
        seconds, after = machine.now - began, machine.statistics()
        digests = cache.statistics().digest_bytes if isinstance(cache, PagedCache) else 0
        return Decoded(
            seconds=seconds / TOKENS,
            compute_seconds=(after.busy["compute"] - before.busy["compute"]) / TOKENS,
            bytes_in=after.bytes_in / TOKENS,
            bytes_out=after.bytes_out / TOKENS,
            device_bytes=after.peak_allocated - self._weights - digests,
            digest_bytes=digests,
            host_bytes=after.peak_pinned_bytes,
            races=after.num_reports,
        )


@contextmanager
def decoder(card: Card, shape: Shape, *, ample: bool = False, check: Check = "record") -> Iterator[Decoder]:
    """A decoder on a card whose memory is for keys and values alone; ``ample``: as much as is asked for."""
    capacity = AMPLE_BYTES if ample else weight_bytes(shape) + card.memory_bytes
    machine = emulator.reset(
        card, execution="dry", check=check, capacity=capacity, pinned_rounding="power2", keep_timeline=False
    )
    with unknown_values(), torch.no_grad():
        yield Decoder(machine, shape)
    gc.collect()


def decode(
    card: Card, shape: Shape, make: Make, *, sequences: int = 1, ample: bool = False, check: Check = "record"
) -> Decoded:
    """Decode with a cache.  Sequences beyond the first are copies of it: they share all that they were given."""
    with decoder(card, shape, ample=ample, check=check) as playing:
        cache = make(playing.model.config)
        with cache.selecting(playing.model) if isinstance(cache, PagedCache) else nullcontext():
            playing.fill(cache)
            if sequences > 1:
                cache.batch_repeat_interleave(sequences)
            found = playing.measure(cache, sequences)
        if isinstance(cache, PagedCache):
            cache.close()
        return found
