"""The emulated card on which peers are compared, and its FLOP rate for a given balance of compute and link."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from bench.peers.model import Net, Shape, block_bytes, build, make_input
from fmstream import emulator
from fmstream.emulator.cards import Card

LINK_BYTES_PER_SECOND: Final = 13e9
"""PCIe 4.0 x8 with pinned memory."""

SEGMENT_BYTES: Final = 128 << 10
"""A sixteenth of what CUDA's allocator takes at a time: beside the weights of a large model its segments are small."""


@dataclass(frozen=True, slots=True)
class CopyCost:
    """What a copy costs beside its bytes: the engine's time, and how much later its completion is seen."""

    engine_seconds: float
    seen_seconds: float


TABLES: Final[Mapping[str, CopyCost]] = {"2us": CopyCost(2e-6, 10e-6), "0.2us": CopyCost(0.2e-6, 0.0)}
"""Costs of a copy; with the second, tensors count as if they were large ones of a large model."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What all contenders are given.

    Attributes:
        card: capacity aside, the machine.
        net, x: the model and its input, both on the CPU.
        expected: its output, computed on the CPU.
        weights_bytes: W, the bytes of the blocks.
    """

    card: Card
    net: Net
    x: Tensor
    expected: Tensor
    weights_bytes: int

    @property
    def stream_seconds(self) -> float:
        """S: all blocks' bytes over the link."""
        return self.weights_bytes / self.card.h2d_bytes_per_second


def make_ground(c_over_s: float, table: str, shape: Shape = Shape()) -> Ground:  # noqa: B008 - frozen
    """The model and a card on which a step of the resident model computes for ``c_over_s`` times S seconds."""
    net, x = build(shape), make_input(shape)
    with torch.no_grad():
        expected = net(x)
    ground = Ground(make_card(table, 1e12), net, x, expected, block_bytes(net))
    return replace(ground, card=calibrate(ground, c_over_s * ground.stream_seconds))


def make_card(table: str, flops: float) -> Card:
    """A card on which kernels and launches cost little, so that link and FLOPs decide.

    The host's own time is left out as far as it goes: 126 MB stand for a model of many gigabytes.
    """
    cost = TABLES[table]
    return Card(
        name=f"peers, {table} a copy",
        memory_bytes=1 << 30,
        h2d_bytes_per_second=LINK_BYTES_PER_SECOND,
        d2h_bytes_per_second=LINK_BYTES_PER_SECOND,
        pageable_bytes_per_second=0.4 * LINK_BYTES_PER_SECOND,
        copy_engine_seconds=cost.engine_seconds,
        copy_seen_seconds=cost.seen_seconds,
        launch_seconds=0.2e-6,
        copy_launch_seconds=0.2e-6,
        queue_limit=1024,
        kernel_seconds=0.5e-6,
        gemm_flops=flops,
        attention_flops=flops,
        memory_bytes_per_second=2e12,
        segment_bytes=SEGMENT_BYTES,
    )


def calibrate(ground: Ground, seconds: float) -> Card:
    """The card on which the resident model computes for that long, within 0.01 %.

    Compute time is a + b / rate, a being what does not depend on the rate, so the proportional step converges by the
    factor a / ``seconds``.
    """
    card = ground.card
    for _ in range(12):
        took = _resident_seconds(ground, card)
        if abs(took - seconds) <= 1e-4 * seconds:
            return card
        rate = card.gemm_flops * took / seconds
        card = replace(card, gemm_flops=rate, attention_flops=rate)
    raise ValueError(f"no FLOP rate gives {seconds * 1e3:.3g} ms of compute: launches and memory alone take longer")


def _resident_seconds(ground: Ground, card: Card) -> float:
    machine = emulator.reset(card, check=None)
    model = copy.deepcopy(ground.net).to("emu")
    before = machine.statistics().busy["compute"]
    with torch.no_grad():
        model(ground.x.to("emu")).cpu()
    return machine.statistics().busy["compute"] - before
