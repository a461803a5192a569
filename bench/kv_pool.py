"""Keys and values beyond the card: the paged cache, transformers' offloaded one and a resident one, modelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import DynamicCache

from bench.contract import Bar, Findings, Row, Workplace, register
from bench.kv_decode import Decoded, Shape, decode
from bench.kv_recall import SeededRecall
from bench.peers.shim.patches import Patches
from fmstream import PagedCache, emulator
from fmstream.emulator.cards import card
from fmstream.payloads.kv.shape import PageShape

CLAIM: Final = (
    "With 13.5 % of the keys and values of a long context on the card, exact decoding takes no longer than these take "
    "over the link, and attending to selected pages is several times faster than offloading whole layers."
)
BARS: Final = {
    "device_share": Bar(at_most=0.135),
    "digest_share": Bar(at_most=0.035),
    "selective_vs_offloaded": Bar(at_least=2.8),
    "exact_vs_offloaded": Bar(at_least=1.5),
    "exact_gap": Bar(at_most=1.08),
    "batch4_vs_batch1": Bar(at_least=1.0),
}
SHARE: Final = 0.135
"""Part of the keys and values of one sequence that may be on the card, what a layer is put together in included."""
POOL_SHARE: Final = 0.134
"""What pools are given of it; the rest is for what a step computes with."""
PAGE_TOKENS: Final = 32
BATCH: Final = 4
CASES: Final = tuple((name, tokens) for name in ("rtx4060", "rtx4090") for tokens in (32 << 10, 128 << 10))


@dataclass(frozen=True, slots=True)
class Contender:
    """A cache that a model decodes with.

    Attributes:
        name: as it stands in the table.
        make: an empty one for a configuration and a context.
        sequences: how many decode; they share the context.
        ample: on a card that holds whatever is asked for.
        around: what PyTorch must be told meanwhile.
    """

    name: str
    make: Callable[[Any, Shape], Any]
    sequences: int = 1
    ample: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _exact(config: Any, shape: Shape) -> Any:
    page = PageShape(PAGE_TOKENS, shape.kv_heads, shape.head_dim, shape.head_dim, torch.bfloat16)
    return PagedCache(config, int(POOL_SHARE * shape.kv_bytes) // page.num_bytes, page_tokens=PAGE_TOKENS)


def _selective(config: Any, shape: Shape) -> Any:
    return PagedCache(config, page_tokens=PAGE_TOKENS, kv_budget=POOL_SHARE, choose=SeededRecall())


def _offloaded(config: Any, shape: Shape) -> Any:
    return DynamicCache(config=config, offloading=True)


def _resident(config: Any, shape: Shape) -> Any:
    return DynamicCache(config=config)


def default_stream_of_cuda() -> Patches:
    """transformers asks `torch.cuda` for the default stream of whatever device: let the emulated one answer."""
    patches = Patches()
    patches.set(torch.cuda, "default_stream", torch.get_device_module("emu").default_stream)
    return patches


CONTENDERS: Final = (
    Contender("resident", _resident, ample=True),
    Contender("offloaded", _offloaded, around=default_stream_of_cuda),
    Contender("exact", _exact),
    Contender("exact, batch 4", _exact, sequences=BATCH),
    Contender("selective", _selective),
    Contender("selective, batch 4", _selective, sequences=BATCH),
)


@register("kv_pool", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Nothing is measured by a clock, so that two runs give the same digits, with ``--quick`` or without."""
    emulator.install()
    try:
        return measure([(name, Shape(tokens)) for name, tokens in CASES], place.say)
    finally:
        emulator.uninstall()


def measure(cases: list[tuple[str, Shape]], say: Callable[[str], None]) -> Findings:
    """A row for each case and contender, and the worst of them as figures."""
    rows: list[Row] = []
    worst: dict[str, list[float]] = {name: [] for name in BARS}
    for name, shape in cases:
        say(f"{shape.tokens} tokens on {name}")
        found = {contender.name: _played(name, shape, contender) for contender in CONTENDERS}
        rows += [_row(name, shape, contender, found[contender.name]) for contender in CONTENDERS]
        for figure, value in _figures(name, shape, found):
            worst[figure].append(value)
    return Findings({name: _worst(BARS[name], values) for name, values in worst.items() if values}, rows)


def _worst(bar: Bar, values: list[float]) -> float:
    return max(values) if bar.at_most is not None else min(values)


def _played(name: str, shape: Shape, contender: Contender) -> Decoded:
    with contender.around():
        return decode(
            card(name),
            shape,
            lambda config: contender.make(config, shape),
            sequences=contender.sequences,
            ample=contender.ample,
        )


def _figures(name: str, shape: Shape, found: dict[str, Decoded]) -> Iterator[tuple[str, float]]:
    offloaded, resident = found["offloaded"], found["resident"]
    link = shape.kv_bytes / card(name).h2d_bytes_per_second
    for mode in ("exact", "selective"):
        one, four = found[mode], found[f"{mode}, batch 4"]
        yield "device_share", one.device_bytes / shape.kv_bytes
        yield "batch4_vs_batch1", BATCH * one.seconds / four.seconds
        yield f"{mode}_vs_offloaded", offloaded.seconds / one.seconds
    yield "digest_share", found["selective"].digest_bytes / shape.kv_bytes
    yield "exact_gap", found["exact"].seconds / max(resident.compute_seconds, link)


def _row(name: str, shape: Shape, contender: Contender, found: Decoded) -> Row:
    fits = found.device_bytes <= card(name).memory_bytes
    return {
        "card": name,
        "tokens": shape.tokens,
        "contender": contender.name,
        "tokens_per_s": contender.sequences / found.seconds,
        "step_ms": found.seconds * 1e3,
        "compute_ms": found.compute_seconds * 1e3,
        "in_gb": found.bytes_in / 1e9,
        "out_gb": found.bytes_out / 1e9,
        "device_gb": found.device_bytes / 1e9,
        "device_share": found.device_bytes / shape.kv_bytes,
        "digest_share": found.digest_bytes / shape.kv_bytes,
        "host_gb": found.host_bytes / 1e9,
        "races": found.races,
        "fits": fits,
    }
