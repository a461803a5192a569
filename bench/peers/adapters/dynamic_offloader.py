"""diffusers-dynamic-offloader: linear layers that copy their weights when called, with a budget of resident blocks."""

from __future__ import annotations

import importlib
from typing import Final

from bench.peers.contract import AMPLE, MIDDLE, TIGHT, Adapter, Peer, Running
from bench.peers.model import Net

WORK: Final = 0.05
"""The share of the weights that is left of the device's memory for a layer on its way and for activations."""


def build(model: Net, budget: int, *, execution_mode: str) -> Running:
    """`enable_offload` by its route ``dynamic_offload``, from pinned weights."""
    package = importlib.import_module("diffusers_dynamic_offloader")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    config = package.DynamicOffloadConfig(
        execution_mode=execution_mode,
        pin_cpu_memory=True,
        resident_module_budget_gb=(budget - WORK * weights) / (1 << 30),
        resident_module_patterns=(r"^blocks\.\d+$",),
        show_profile=False,
    )
    result = package.enable_offload(model, route="dynamic_offload", use_environment=False, config=config)
    return Running(result.module, lambda: package.remove_dynamic_offload(result.module))


def _peer(share: float) -> Peer:
    packages = ("diffusers_dynamic_offloader",)
    options = {"execution_mode": "linear_runtime"}
    return Adapter("diffusers-dynamic-offloader", "diffusers-dynamic-offloader", share, build, options, packages)


PEERS: Final[list[Peer]] = [_peer(TIGHT), _peer(MIDDLE), _peer(AMPLE)]
