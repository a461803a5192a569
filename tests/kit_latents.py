"""What tests of latent loops share: the loop one after the other, and stages whose calls end in any order."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmstream.payloads.trips import Turn
from tests.kit_runtime import TIMEOUT


def step(frame: Tensor) -> Tensor:
    """A step whose result depends on every call before it."""
    return torch.tanh(frame * 1.5 + 0.25)


def stage(frame: Tensor, turn: Turn) -> Tensor:
    """A stage that is told its turn, and makes a new tensor."""
    return frame * 0.75 + turn.item * 0.5 + turn.round


def in_place(frame: Tensor, turn: Turn) -> Tensor:
    """The same in the memory that it is given."""
    return frame.mul_(0.75).add_(turn.item * 0.5).add_(turn.round)


def writes_and_returns_nothing(frame: Tensor) -> None:
    """A stage that says that it left the latents, and did not."""
    frame.mul_(2)


def failing_at(turn: Turn, times: int = 1) -> Callable[[Tensor, Turn], Tensor]:
    """A stage that fails in one turn, some times, before it does anything."""
    left = [times]

    def maybe(frame: Tensor, now: Turn) -> Tensor:
        if now == turn and left[0]:
            left[0] -= 1
            raise ValueError("too dark")
        return stage(frame, now)

    return maybe


def frames(number: int, device: str | torch.device = "cpu") -> list[Tensor]:
    """Frames that all differ."""
    return [torch.linspace(-1, 1, 24).reshape(4, 6).add(n).to(device) for n in range(number)]


def one_after_the_other(
    step: Callable[[Tensor], Tensor], stage: Callable[..., Any], items: Sequence[Tensor], rounds: int = 1
) -> list[Tensor]:
    """What a loop must return."""
    found = list(items)
    for round in range(rounds):
        for index, item in enumerate(found):
            made = step(item)
            staged = stage(made.cpu().clone(), Turn(index, round))
            found[index] = made if staged is None else staged.to(made.device)
    return found


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """All tensors hold the same bits, in the same order."""
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == right.dtype
        assert left.device == right.device
        assert torch.equal(left.cpu(), right.cpu())


class Shuffled:
    """A step and a stage; calls of the stage end in an order that a seed chooses among all that are under way.

    A call goes on only when every frame that was stepped waits in the stage, so the loop is as far ahead as it can be.
    """

    def __init__(self, seed: int, stage: Callable[[Tensor, Turn], Tensor | None] = stage) -> None:
        self.random = random.Random(seed)
        self.inner = stage
        self.changed = threading.Condition()
        self.num_stepped = self.num_ended = 0
        self.waiting: list[Turn] = []
        self.chosen: Turn | None = None
        self.ended: list[Turn] = []

    def step(self, frame: Tensor) -> Tensor:
        """Count a frame that is on its way."""
        with self.changed:
            self.num_stepped += 1
        return step(frame)

    def stage(self, frame: Tensor, turn: Turn) -> Tensor | None:
        """Wait to be chosen."""
        result = self.inner(frame, turn)
        with self.changed:
            self.waiting.append(turn)
            self._choose()
            assert self.changed.wait_for(lambda: self.chosen == turn, TIMEOUT), "no call was chosen"
            self.waiting.remove(turn)
            self.ended.append(turn)
            self.num_ended += 1
            self.chosen = None
            self._choose()
        return result

    def _choose(self) -> None:
        if self.chosen is None and self.waiting and len(self.waiting) == self.num_stepped - self.num_ended:
            self.chosen = self.random.choice(self.waiting)
            self.changed.notify_all()


def no_threads() -> bool:
    """Whether no thread of a loop is left, once what nobody holds is gone."""
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("fmstream")]
    for thread in left:
        thread.join(TIMEOUT)
    return not any(thread.is_alive() for thread in left)
