"""Keys and values beyond the card: the paged cache, transformers' offloaded one and a resident one, modelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from fmstream.device.page_packing import packed_bytes
from fmstream.emulator.cards import card
from fmstream.emulator.checker import Check
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
"""What pools are given of it; the rest is for what a step computes with,"""
PACKING_SHARE: Final = 0.131
"""and beside exact ones for what packed pages come through."""
PAGE_TOKENS: Final = 32
BATCH: Final = 4
CARDS: Final = ("rtx4060", "rtx4090")
MODES: Final = ("exact", "selective")
SHORT: Final = 32 << 10
LONG: Final = 128 << 10


@dataclass(frozen=True, slots=True)
class Case:
    """A card and a context; ``also``: who decodes beside those that always do."""

    card: str
    shape: Shape
    also: tuple[str, ...] = ()


FULL: Final = tuple(
    Case(name, Shape(tokens), ("unpacked", *MODES) if tokens == SHORT else ("unpacked",))
    for name in CARDS
    for tokens in (SHORT, LONG)
)
QUICK: Final = (Case(CARDS[0], Shape(SHORT), ("exact",)), Case(CARDS[1], Shape(SHORT)))


@dataclass(frozen=True, slots=True)
class Contender:
    """A cache that a model decodes with.

    Attributes:
        name: as it stands in the table.
        make: an empty one for a configuration, a context and so many sequences.
        sequences: how many decode; they share the context.
        ample: on a card that holds whatever is asked for.
        around: what PyTorch must be told meanwhile.
    """

    name: str
    make: Callable[[Any, Shape, int], Any]
    sequences: int = 1
    ample: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _page(shape: Shape) -> PageShape:
    return PageShape(PAGE_TOKENS, shape.kv_heads, shape.head_dim, shape.head_dim, torch.bfloat16)


def _exact(config: Any, shape: Shape, sequences: int) -> Any:
    pages = int(PACKING_SHARE * sequences * shape.kv_bytes) // _page(shape).num_bytes
    return PagedCache(config, pages, page_tokens=PAGE_TOKENS, pack_pages=_all_fit)


def _as_they_are(config: Any, shape: Shape, sequences: int) -> Any:
    pages = int(POOL_SHARE * sequences * shape.kv_bytes) // _page(shape).num_bytes
    return PagedCache(config, pages, page_tokens=PAGE_TOKENS, pack_pages=False)


def _all_fit(pages: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Packs nothing, for there are no values: those of a real model fit (`kv_quality`: ``packed_share``)."""
    return torch.ones(len(pages), dtype=torch.bool)


def _selective(config: Any, shape: Shape, sequences: int) -> Any:
    return PagedCache(config, page_tokens=PAGE_TOKENS, kv_budget=POOL_SHARE, choose=SeededRecall())


def _offloaded(config: Any, shape: Shape, sequences: int) -> Any:
    return DynamicCache(config=config, offloading=True)


def _resident(config: Any, shape: Shape, sequences: int) -> Any:
    return DynamicCache(config=config)


def default_stream_of_cuda() -> Patches:
    """transformers asks `torch.cuda` for the default stream of whatever device: let the emulated one answer."""
    patches = Patches()
    patches.set(torch.cuda, "default_stream", torch.get_device_module("emu").default_stream)
    return patches


ALONE: Final = (
    Contender("resident", _resident, ample=True),
    Contender("offloaded", _offloaded, around=default_stream_of_cuda),
    Contender("exact", _exact),
    Contender("selective", _selective),
)
BESIDE: Final = {
    "unpacked": Contender("exact, not packed", _as_they_are),
    "exact": Contender("exact, batch 4", _exact, sequences=BATCH),
    "selective": Contender("selective, batch 4", _selective, sequences=BATCH),
}


@register("kv_pool", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Nothing is measured by a clock, so that two runs give the same digits."""
    emulator.install()
    try:
        # The checker of order takes a third of the time; the full run has it.
        return measure(QUICK, place.say, check=None) if place.quick else measure(FULL, place.say, check="record")
    finally:
        emulator.uninstall()


def measure(cases: Sequence[Case], say: Callable[[str], None], check: Check) -> Findings:
    """A row for each case and contender, and the worst of them as figures."""
    rows: list[Row] = []
    worst: dict[str, list[float]] = {}
    for case in cases:
        say(f"{case.shape.tokens} tokens on {case.card}")
        found: dict[str, Decoded] = {}
        for contender in (*ALONE, *(BESIDE[name] for name in case.also)):
            found[contender.name] = decoded = _played(case, contender, check)
            rows.append(_row(case, contender, decoded, check))
        for figure, value in _figures(case, found):
            worst.setdefault(figure, []).append(value)
    at_most = {name for name, bar in BARS.items() if bar.at_most is not None} | {"exact_over_recalled"}
    return Findings({name: (max if name in at_most else min)(values) for name, values in worst.items()}, rows)


def _played(case: Case, contender: Contender, check: Check) -> Decoded:
    with contender.around():
        return decode(
            card(case.card),
            case.shape,
            lambda config: contender.make(config, case.shape, contender.sequences),
            sequences=contender.sequences,
            ample=contender.ample,
            check=check,
        )


def _figures(case: Case, found: dict[str, Decoded]) -> Iterator[tuple[str, float]]:
    offloaded, exact, compute = found["offloaded"], found["exact"], found["resident"].compute_seconds
    kv_bytes, rate = case.shape.kv_bytes, card(case.card).h2d_bytes_per_second
    for mode in MODES:
        yield "device_share", found[mode].device_bytes / kv_bytes
        yield f"{mode}_vs_offloaded", offloaded.seconds / found[mode].seconds
    for mode in set(MODES).intersection(case.also):
        yield "batch4_vs_batch1", BATCH * found[mode].seconds / found[BESIDE[mode].name].seconds
    if "unpacked" in case.also:
        yield "packing_gain", found[BESIDE["unpacked"].name].seconds / exact.seconds
    yield "digest_share", found["selective"].digest_bytes / kv_bytes
    yield "exact_gap", exact.seconds / max(compute, kv_bytes / rate)
    yield "exact_over_recalled", exact.seconds / max(compute, exact.bytes_in / rate)
    yield (
        "exact_vs_offloaded_limit",
        offloaded.seconds / max(compute, (1 - SHARE) * _packed_share(case) * kv_bytes / rate),
    )


def _packed_share(case: Case) -> float:
    page = _page(case.shape)
    packed = packed_bytes(page.dtype, page.elements)
    assert packed is not None
    return packed / page.num_bytes


def _row(case: Case, contender: Contender, found: Decoded, check: Check) -> Row:
    kv_bytes = contender.sequences * case.shape.kv_bytes
    row: Row = {
        "card": case.card,
        "tokens": case.shape.tokens,
        "contender": contender.name,
        "tokens_per_s": contender.sequences / found.seconds,
        "step_ms": found.seconds * 1e3,
        "compute_ms": found.compute_seconds * 1e3,
        "in_gb": found.bytes_in / 1e9,
        "out_gb": found.bytes_out / 1e9,
        "device_gb": found.device_bytes / 1e9,
        "device_share": found.device_bytes / kv_bytes,
        "digest_share": found.digest_bytes / kv_bytes,
        "pinned_gb": found.host_bytes / 1e9,
        "fits": found.device_bytes <= card(case.card).memory_bytes,
    }
    return row if check is None else row | {"races": found.races}
