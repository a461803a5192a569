"""block-streamer: whole blocks in buffers, a given number of them ahead."""

from __future__ import annotations

import importlib
from typing import Final

from bench.peers.contract import MIDDLE, TIGHT, Adapter, Peer, Running
from bench.peers.model import Net
from bench.peers.wrapped import Between


def build(model: Net, budget: int, *, prefetch_ahead: int) -> Running:
    """`StreamedModel` over the blocks; stem and head stay on the device."""
    package = importlib.import_module("streamer")
    streamed = package.StreamedModel(model.blocks, device="cuda:0", prefetch_ahead=prefetch_ahead)
    return Running(Between(model, streamed), streamed.close)


def _peer(share: float, ahead: int) -> Peer:
    packages = ("streamer", "memory_pool", "block_streamer")
    return Adapter("block-streamer", "block-streamer", share, build, {"prefetch_ahead": ahead}, packages)


PEERS: Final[list[Peer]] = [_peer(TIGHT, 1), _peer(MIDDLE, 2), _peer(MIDDLE, 4)]
