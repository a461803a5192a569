"""For peers that take only the blocks: the stem and the head stay on the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bench.peers.model import Net


class Between:
    """A step of the model in which a peer runs the blocks."""

    def __init__(self, model: Net, blocks: Callable[[Tensor], Tensor]) -> None:
        self._stem = model.stem.to("emu")
        self._head = model.head.to("emu")
        self._blocks = blocks

    def __call__(self, x: Tensor) -> Tensor:
        """(1, tokens, features) on the device to the same shape."""
        out: Tensor = self._head(self._blocks(self._stem(x)))
        return out
