"""How much of an accelerator's memory the weights may take beside what the pass itself needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fmstream.device.accelerator import Accelerator

MARGIN = 1.05
"""Room for activations, as a multiple of what they were seen to need: the allocator's blocks do not fit exactly."""
MARGIN_SHARE = 0.002
"""More room, as a part of the device's memory, for what others on the card may take."""


@dataclass
class Room:
    """Learns what each kind of pass needs for activations, from the allocator's count of the most bytes in use.

    That count is the user's as well, so it is never reset: where a pass does not raise it, its need is known to be no
    more than was needed before.
    """

    device: Accelerator
    needs: dict[Any, int] = field(default_factory=dict)
    """Bytes by kind of pass."""
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

    def fail(self) -> None:
        """The pass that began was given up: what it needs is not known."""
        self._key = None

    def allowed(self, key: Any, held: int) -> int:
        """Bytes for weights with which a kind of pass has the room it needs; ``held`` of them they have now."""
        need = int(self.needs.get(key, 0) * MARGIN + self.device.total_bytes() * MARGIN_SHARE)
        return self.device.available_bytes() + held - need
