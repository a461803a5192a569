"""mmgp: blocks that it finds by name, as many of them resident as a budget allows."""

from __future__ import annotations

import importlib
from typing import Final

import torch

from bench.peers.contract import AMPLE, MIDDLE, TIGHT, Adapter, Peer, Running
from bench.peers.model import Net

WORK: Final = 0.02
"""The share of the weights that is left of the device's memory for activations."""


def build(model: Net, budget: int, *, asyncTransfers: bool) -> Running:
    """`offload.all` with pinned weights and a budget for the blocks (a number alone would be ignored)."""
    offload = importlib.import_module("mmgp.offload")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        offloaded = offload.all(
            {"transformer": model},
            pinnedMemory=True,
            quantizeTransformer=False,
            convertWeightsFloatTo=None,
            verboseLevel=0,
            budgets={"transformer": (budget - WORK * weights) / (1 << 20)},
            asyncTransfers=asyncTransfers,
        )
    finally:
        torch.set_default_device("cpu")  # the package makes its device the default for the whole process
    return Running(model, offloaded.release)


def _peer(share: float) -> Peer:
    return Adapter("mmgp", "mmgp", share, build, {"asyncTransfers": True}, ("mmgp",))


PEERS: Final[list[Peer]] = [_peer(TIGHT), _peer(MIDDLE), _peer(AMPLE)]
