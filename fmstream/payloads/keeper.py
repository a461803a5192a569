"""What masters ask of the one who shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from fmstream.payloads.master import Master


class Keeper(Protocol):
    """Who must know when a master is read outside a plan, or changed."""

    def count_fault(self, master: Master) -> None:
        """A read outside any plan."""

    def note_alias(self, master: Master, value: torch.Tensor) -> bool:
        """A view of a faulted value escapes; True if it may be of that value, False if it must be of the master."""

    def note_exposed(self, master: Master) -> None:
        """Somebody holds an alias of the master's own memory and may write it unseen."""

    @property
    def is_in_pass(self) -> bool:
        """Whether a module is being called."""

    def is_watched(self, master: Master) -> bool:
        """Whether somebody may write the master unseen, so that it is looked at before every pass."""

    def changed(self, master: Master) -> None:
        """The master's bytes changed: copies of them are stale."""

    def settle(self) -> None:
        """Let no copy of any master be on its way: memory is about to move."""

    def left_in_place(self, master: Master) -> None:
        """The user's own parameter is shown from now on."""

    def bring_aliases(self) -> None:
        """Bring to the masters what was written through views of faulted values."""

    def sharing(self, master: Master) -> list[Master]:
        """The masters in the same storage, this one among them."""

    def succeeded(self, master: Master, successor: Master) -> None:
        """The parameter is another tensor now, with another master; the old one stands for the old tensor."""
