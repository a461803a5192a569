"""Whether ``fmstream bandwidth`` measures the links that emulated cards were given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.contract import Bar, Findings, Row, Workplace, register
from fmstream import emulator
from fmstream.doctor.bandwidth import BandwidthResult, run_bandwidth
from fmstream.doctor.timed_copies import BOTH_IN, BOTH_OUT, PAGEABLE_IN, PAGEABLE_OUT, PINNED_IN, PINNED_OUT
from fmstream.emulator.cards import CARDS, Card

CLAIM: Final = (
    "On every card that can be emulated, copies to and from it, pinned, pageable and both ways at once, are measured "
    "within 2 % of the link that the card was given."
)
BARS: Final = {"error_max": Bar(at_most=0.02)}


@register("bandwidth_emulated", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Measure each card dry, in its own time; a quick run does the same, with copies of 64 MiB at most."""
    copies: list[Row] = []
    latencies: list[Row] = []
    emulator.install()
    try:
        for name, card in CARDS.items():
            result = measure(card, "64MiB" if place.quick else "512MiB")
            copies += compare(name, card, result)
            latencies.append({"card": name, "latency_s": card.copy_engine_seconds, "measured_s": result.costs[0]})
            place.say(f"{name} measured")
    finally:
        emulator.uninstall()
    return Findings({"error_max": max(row["error"] for row in copies)}, [*copies, *latencies])


def measure(card: Card, largest: str) -> BandwidthResult:
    """What the command finds out about a card."""
    emulator.reset(card, execution="dry", check=None, keep_timeline=False)
    with emulator.dry_host():
        return run_bandwidth("emu", largest=largest, host=False)


def compare(name: str, card: Card, result: BandwidthResult) -> Iterator[Row]:
    """Each kind of copy at its largest size, beside what the card was given."""
    for what, given in expected(card).items():
        rate = result.largest(what)
        assert rate is not None
        error = abs(rate.median / given - 1)
        yield {
            "card": name,
            "copy": what,
            "given_gb_s": given / 1e9,
            "measured_gb_s": rate.median / 1e9,
            "error": error,
        }


def expected(card: Card) -> dict[str, float]:
    """Bytes a second by kind of copy."""
    return {
        PINNED_IN: card.h2d_bytes_per_second,
        PINNED_OUT: card.d2h_bytes_per_second,
        BOTH_IN: card.h2d_bytes_per_second,
        BOTH_OUT: card.d2h_bytes_per_second,
        PAGEABLE_IN: card.pageable_bytes_per_second,
        PAGEABLE_OUT: card.pageable_bytes_per_second,
    }
