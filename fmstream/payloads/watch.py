"""What may be written without notice: bytes that are bound, views of values that were read, memory under aliases."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fmstream.device.device import Part
from fmstream.device.homes import MemoryHome
from fmstream.payloads.master import Master


class Watch:
    """Remembers within a pass how bytes were, to find out later which were written."""

    def __init__(self) -> None:
        self.checksums: dict[int, int] = {}
        """Of parameters that are bound."""
        self.aliases: list[tuple[Master, torch.Tensor, int]] = []
        """Values that stand for parameters, each with its count of in-place writes."""

    def clear(self) -> None:
        """The pass is over."""
        self.checksums.clear()
        self.aliases.clear()

    # Bytes that are bound

    def take(self, param: int, part: Part, offset: int, span: int) -> None:
        """Remember the bytes of a parameter."""
        self.checksums[param] = _checksum(part, offset, span)

    def forget(self, param: int) -> None:
        """Its bytes were changed in a way that is known."""
        self.checksums.pop(param, None)

    def has_changed(self, param: int, part: Part, offset: int, span: int) -> bool:
        """Whether its bytes are others than those remembered, which are forgotten."""
        before = self.checksums.pop(param, None)
        return before is not None and before != _checksum(part, offset, span)

    # Views of values that were read

    def note(self, master: Master, value: torch.Tensor) -> None:
        """A view of a value that stands for a parameter was handed out."""
        self.aliases.append((master, value, value._version))

    def written_aliases(self) -> list[tuple[Master, torch.Tensor]]:
        """Values that were written since the last look."""
        moved = [(master, value) for master, value, version in self.aliases if value._version != version]
        if moved:
            self.aliases = [(master, value, value._version) for master, value, _ in self.aliases]
        # Some share a count, so ask before any is brought back: that makes the others differ.
        return [(master, value) for master, value in moved if master.may_hold_writes(value)]


def _checksum(part: Part, offset: int, span: int) -> int:
    # For want of a second copy in fast memory; that two differ and have the same one, nobody will see.
    with torch.inference_mode(False), torch.no_grad():
        return zlib.crc32(part.read(offset, span).numpy().data)


def aliased(masters: Sequence[Master], roots: Iterable[nn.Module]) -> set[int]:
    """Masters whose memory somebody looks into beside their modules (``.data``, an array, a flat buffer, a process).

    Their writes leave no trace in the parameter.
    """
    known: Counter[int] = Counter()
    for master in masters:
        known[_storage_of(master.original)] += 1 + isinstance(master.home, MemoryHome)
    own = {id(master.original) for master in masters}
    for root in roots:
        for tensor in (*root.buffers(), *root.parameters()):
            if type(tensor) in (torch.Tensor, nn.Parameter) and id(tensor) not in own:
                known[_storage_of(tensor)] += 1
    found = set()
    for master in masters:
        storage = master.original.untyped_storage()  # counts itself
        is_shared = isinstance(master.home, MemoryHome) and storage.is_shared()
        if is_shared or torch._C._storage_Use_Count(storage._cdata) - 1 > known[storage._cdata]:
            found.add(master.index)
    return found


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
