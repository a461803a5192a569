"""cache-dit: leaf modules offloaded one by one, the next ones copied ahead, some kept on the device."""

from __future__ import annotations

import importlib
from typing import Final

from bench.peers.contract import AMPLE, MIDDLE, TIGHT, Adapter, Peer, Running
from bench.peers.model import Net


def build(model: Net, budget: int, *, persistent_buckets: int, persistent_bins: int, transfer_buckets: int) -> Running:
    """`layerwise_cpu_offload`; the number of persistent modules is chosen by hand to fit the budget."""
    package = importlib.import_module("cache_dit.offload")
    package.layerwise_cpu_offload(
        model,
        onload_device="cuda",
        async_transfer=True,
        transfer_buckets=transfer_buckets,
        prefetch_limit=True,
        persistent_buckets=persistent_buckets,
        persistent_bins=persistent_bins,
    )
    return Running(model, lambda: package.remove_layerwise_offload(model))


def _peer(share: float, buckets: int, bins: int) -> Peer:
    options = {"transfer_buckets": 2, "persistent_buckets": buckets, "persistent_bins": bins}
    return Adapter("cache-dit layerwise", "cache-dit", share, build, options, ("cache_dit",))


# The second of either setting has about the least memory in which its modules fit: copies wait for room.
PEERS: Final[list[Peer]] = [
    _peer(TIGHT, 0, 1),
    _peer(MIDDLE, 60, 10),
    _peer(0.31, 60, 10),
    _peer(AMPLE, 120, 20),
    _peer(0.56, 120, 20),
]
