"""diffusers: group offloading, a group being a block or a leaf module."""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch

from bench.peers.contract import MIDDLE, TIGHT, Adapter, Peer, Running
from bench.peers.model import Net


def build(model: Net, budget: int, *, offload_type: str, **options: bool) -> Running:
    """`apply_group_offloading`; it takes no budget: with streams, one group is copied while the one before computes."""
    package = importlib.import_module("diffusers.hooks")
    more: dict[str, Any] = {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
    more |= {"onload_device": torch.device("emu:0"), "offload_type": offload_type, **options}
    package.apply_group_offloading(model, **more)
    return Running(model)


def _peer(offload_type: str, share: float, **options: bool) -> Peer:
    name = f"diffusers {offload_type.removesuffix('_level')}"
    return Adapter(name, "diffusers", share, build, {"offload_type": offload_type, **options})


PEERS: Final[list[Peer]] = [
    _peer("block_level", TIGHT, use_stream=False),
    _peer("block_level", TIGHT, use_stream=True, record_stream=False),
    # The host runs ahead of the device here, and what it has copied piles up.
    _peer("block_level", MIDDLE, use_stream=True, record_stream=True),
    _peer("leaf_level", TIGHT, use_stream=False),
    _peer("leaf_level", TIGHT, use_stream=True, record_stream=False),
    _peer("leaf_level", TIGHT, use_stream=True, record_stream=True),
]
