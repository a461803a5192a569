"""How much of an accelerator's memory the weights may take beside what the passes themselves need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fmstream.device.accelerator import Accelerator

MARGIN = 1.05
"""Room for activations, as a multiple of what they were seen to need: the allocator's blocks do not fit exactly."""
MARGIN_SHARE = 0.002
"""More room, as a part of the device's memory, for what others on the card may take."""
GIVEN_BACK = 0.7
"""Part of the memory that is still held for weights after the user's own tensors did not fit beside it."""


@dataclass
class Room:
    """Learns what each kind of pass needs for activations, from the allocator's count of the most bytes in use.

    That count is the user's as well, so it is never reset: where a pass does not raise it, its need is known to be no
    more than was needed before.
    """

    device: Accelerator
    floor: int = 0
    """Bytes of the device that are to stay free."""
    smallest: int = 0
    """The least for weights that works, in bytes."""
    limit: int | None = None
    """Bytes for weights that there was seen to be room for; None where none was missing."""
    needs: dict[Any, int] = field(default_factory=dict)
    """Bytes of activations by kind of pass."""
    _key: Any = None
    _before: int = 0

    def begin(self, key: Any) -> None:
        """A pass of a kind begins."""
        self._key = key
        self._before = self.device.allocated_bytes()

    def end(self) -> None:
        """The pass that began is over on the host."""
        if self._key is not None:
            need = max(0, self.device.peak_bytes() - self._before)
            self.needs[self._key] = min(need, self.needs[self._key]) if self._key in self.needs else need
            self._key = None

    def grant(self, key: Any, wanted: int, held: int) -> int:
        """Bytes for weights of those ``wanted`` that a kind of pass leaves; ``held`` of them they have now."""
        if key in self.needs or self.floor:
            left = self._left(key, held)
            if left < wanted:
                self.limit = left if self.limit is None else min(self.limit, left)
        if self.limit is None or wanted <= self.limit:
            return wanted
        return max(self.smallest, self.limit)

    def allowed(self, key: Any, held: int) -> int:
        """Bytes for weights for which plans may be made."""
        left = self._left(key, held)
        return max(self.smallest, left if self.limit is None else min(left, self.limit))

    def _left(self, key: Any, held: int) -> int:
        need = int(self.needs.get(key, 0) * MARGIN + self.device.total_bytes() * MARGIN_SHARE)
        return self.device.available_bytes() + held - need - self.floor

    @property
    def is_short(self) -> bool:
        """Whether less is free than should be."""
        return self.floor > 0 and self.device.available_bytes() < self.floor

    def fail(self, error: BaseException, held: int) -> bool:
        """The pass that began was given up; whether it was for want of memory, of which less is held from now on.

        The error then says what would help.
        """
        self._key = None
        if not isinstance(error, torch.OutOfMemoryError):
            return False
        self.limit = max(self.smallest, int(held * GIVEN_BACK))
        error.add_note(
            f"{held} bytes of the device were held for streamed weights; the next call gets by with {self.limit}. "
            f"To leave more room from the start give a smaller memory= (the smallest that works is {self.smallest})"
        )
        return True
