"""accelerate: hooks that copy a module's parameters before its forward and drop them after."""

from __future__ import annotations

import importlib
from typing import Final

import torch

from bench.peers.contract import TIGHT, Adapter, Peer, Running
from bench.peers.model import Net


def build(model: Net, budget: int) -> Running:
    """`accelerate.cpu_offload`; it takes no budget: one module at a time is on the device."""
    package = importlib.import_module("accelerate")
    return Running(package.cpu_offload(model, execution_device=torch.device("emu:0")))


PEERS: Final[list[Peer]] = [Adapter("accelerate cpu_offload", "accelerate", TIGHT, build)]
