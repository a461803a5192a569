"""What tests of the paged cache share: tiny models, places to run them, and the comparison with a plain cache."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from bench.scenarios import SLOW
from fmstream import PagedCache, emulator
from fmstream.emulator.backlog import Execution
from fmstream.payloads.kv.cache import KvStatistics

ORDERS: tuple[Execution, ...] = ("eager", "late", 1, 2)
PAGE_TOKENS = 8
VOCABULARY = 96
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


def llama() -> nn.Module:
    """Grouped heads."""
    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS))


def qwen() -> nn.Module:
    """Biases in the projections, and a layer that slides."""
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, **HEADS))


def gemma() -> nn.Module:
    """Layers with a window of 12 tokens between those that see everything."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, **HEADS, head_dim=8, sliding_window=12, layer_types=kinds))


def t5() -> nn.Module:
    """An encoder and a decoder, whose cross-attention reads a layer's keys without an update."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


MODELS: tuple[Callable[[], nn.Module], ...] = (llama, qwen, gemma, t5)


@lru_cache
def _made(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return build().eval()


def model_on(build: Callable[[], nn.Module], device: str) -> Any:
    """A model of its own, always with the same weights."""
    return copy.deepcopy(_made(build)).to(device)


def prompt(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Token ids on the CPU, none of them a padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def fresh(execution: Execution = "eager", **options: Any) -> emulator.Machine:
    """A new machine that raises at the first access out of order; free memory holds NaN."""
    options = {"capacity": 64 << 20, "poison": True, "check": "raise"} | options
    gc.collect()  # what an error still holds of a cache gives its memory back to the machine that it is of
    return emulator.reset("rtx4070-laptop", execution=execution, **options)


def plain_cache(model: Any) -> Any:
    """What ``generate`` would make."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    return DynamicCache(config=model.config)


def paged_cache(model: Any, pages: int, **options: Any) -> Any:
    """The same in pages."""
    options = {"page_tokens": PAGE_TOKENS} | options
    made = [PagedCache(model.config, pages, **options) for _ in range(1 + model.config.is_encoder_decoder)]
    return EncoderDecoderCache(*made) if model.config.is_encoder_decoder else made[0]


def parts(cache: Any) -> list[PagedCache]:
    """The paged caches in a cache."""
    return [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]


def generate(model: Any, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """New tokens on the CPU."""
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | options
    options = {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in options.items()}
    options |= {"eos_token_id": None}
    if options["do_sample"]:
        torch.manual_seed(5)
    return model.generate(ids.to(model.device), cache=cache, **options).cpu()


class Outcome(NamedTuple):
    """Tokens with either cache, and what the paged one did."""

    plain: Tensor
    paged: Tensor
    did: KvStatistics
    also: KvStatistics
    """Of the cross-attention, where there is one."""


@contextmanager
def checked(cache: Any) -> Iterator[Any]:
    """Afterwards the cache's laws hold, and nothing of it is left on the device or pinned."""
    yield cache
    for part in parts(cache):
        part.check()
        part.close()
    gc.collect()
    if emulator.machine().pinned.charged_bytes:
        raise AssertionError("host memory is still pinned")


def compare(model: Any, ids: Tensor, pages: int, times: int = 1, cache_options: Any = None, **options: Any) -> Outcome:
    """Generate with a plain cache and with a paged one, ``times`` on the same cache; tokens must be equal."""
    plain = plain_cache(model)
    expected = [generate(model, ids, plain, **options)]
    with checked(paged_cache(model, pages, **(cache_options or {}))) as paged:
        found = [generate(model, ids, paged, **options)]
        for _ in range(times - 1):
            expected.append(generate(model, expected[-1], plain, **options))
            found.append(generate(model, found[-1], paged, **options))
        did = [part.statistics() for part in parts(paged)]
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)
    return Outcome(expected[-1], found[-1], did[0], did[-1])


def reports(scenario: Callable[[], None], execution: Execution = "eager") -> list[emulator.Report]:
    """What the checker says of a scenario on a card that the host runs far ahead of."""
    machine = emulator.reset(SLOW, execution=execution, check="record", capacity=64 << 20, poison=True)
    with torch.no_grad():
        scenario()
    machine.synchronize()
    return list(machine.reports)
