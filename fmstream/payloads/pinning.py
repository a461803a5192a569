"""Masters in pinned memory, so that the device copies them without the host's help, many at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fmstream.core.arena import pack
from fmstream.device.homes import FileHome
from fmstream.device.memory import return_free_memory
from fmstream.device.pinned import PinnedBlock, Pins, pinned_size
from fmstream.payloads.master import Master
from fmstream.payloads.truth import span_bytes

BLOCK_BYTES = 256 << 20
"""Masters are moved by blocks of about this size, so that no more than that exists twice at a time."""


class _Moved(NamedTuple):
    """A parameter that was moved; ``before`` is the data of one that showed a file.

    It is referred to weakly: a parameter that somebody holds counts as one that may be written unseen.
    """

    original: weakref.ref[torch.Tensor]
    address: int
    before: torch.Tensor | None

    def present(self) -> torch.Tensor | None:
        """The parameter, if it is where it was moved to."""
        original = self.original()
        return original if original is not None and original.data_ptr() == self.address else None


class PinnedHomes:
    """Moves masters to pinned memory and, where they came from a file, back again.

    Masters lie there in the order of their ids and at multiples of 64 bytes, as they do in fast memory: what is
    adjacent in both is one copy.
    """

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._blocks: list[PinnedBlock] = []
        self._moved: list[_Moved] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are pinned for masters."""
        return sum(block.num_bytes for block in self._blocks)

    def take(self, masters: Iterable[Master], num_bytes: int) -> int:
        """Move masters, and pin at most ``num_bytes`` more; returns the bytes for which the driver refused to pin.

        Masters already there stay where they are.  No copy may be on its way.
        """
        self._drop_unused()
        outside = [m for m in masters if m.span and self._pins.find(m.original.data_ptr(), m.span) is None]
        groups = list(_groups(outside, num_bytes))
        for index, group in enumerate(groups):
            if not self._move(group):
                return sum(master.num_bytes for left in groups[index:] for master in left)
        return 0

    def _drop_unused(self) -> None:
        """Unpin blocks whose parameters have all been replaced."""
        self._moved = [moved for moved in self._moved if moved.present() is not None]
        used = [self._pins.find(moved.address, 1) for moved in self._moved]
        for block in [block for block in self._blocks if block not in used]:
            self._blocks.remove(block)
            self._pins.free(block)

    def _move(self, group: Sequence[Master]) -> bool:
        sizes = [master.num_bytes for master in group]
        block = self._pins.allocate(sum(sizes))
        if not block.pinned:
            return False
        self._blocks.append(block)
        for master, offset in zip(group, pack(sizes), strict=True):
            self._move_one(master, block, offset)
        return_free_memory()
        return True

    def _move_one(self, master: Master, block: PinnedBlock, offset: int) -> None:
        original = master.original
        # What was made in inference mode stays so: a tensor of one kind with data of the other can be used for neither.
        with torch.inference_mode(original.is_inference()), torch.no_grad():
            # A storage of its own: how many tensors share it tells whether somebody looks into the master.
            flat = block.part(offset, master.span)
            if isinstance(master.home, FileHome):
                master.copy_to(flat.data_ptr())
                before = original.data
            else:
                flat.copy_(master.host_bytes())
                before = None
            moved = flat.view(master.dtype).as_strided(master.size, master.stride)
            # Noted first, lest an interrupt between the two leave it there.
            self._moved.append(_Moved(weakref.ref(original), moved.data_ptr(), before))
            original.data = moved
            master.take_memory()
            master.seen_version = master.version()

    def give_back(self) -> None:
        """Show files again where nothing was written, and give up the registration.

        The masters must have been retired, and no copy may be on its way.  Other parameters stay where they are, in
        memory that is now like any other.
        """
        for moved in self._moved:
            original = moved.present()
            if moved.before is None or original is None:
                continue
            with torch.inference_mode(original.is_inference()), torch.no_grad():
                # Who was given raw memory may have written it without raising the version: so the bytes decide.
                if _same_bytes(original.data, moved.before):
                    original.data = moved.before
        self._moved.clear()
        for block in self._blocks:
            self._pins.free(block)
        self._blocks.clear()


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are of one dtype, size and stride, and hold the same bits in their spans."""
    if (left.dtype, left.size(), left.stride()) != (right.dtype, right.size(), right.stride()):
        return False
    span = (span_bytes(left) // left.element_size(),)
    return torch.equal(left.as_strided(span, (1,)).view(torch.uint8), right.as_strided(span, (1,)).view(torch.uint8))


def _groups(masters: Iterable[Master], num_bytes: int) -> Iterator[list[Master]]:
    """Runs of masters of about `BLOCK_BYTES`, as many as can be pinned with ``num_bytes``."""
    group: list[Master] = []
    size = 0
    for master in masters:
        if group and size + master.num_bytes > BLOCK_BYTES:
            yield group
            num_bytes -= pinned_size(size)
            group, size = [], 0
        if pinned_size(size + master.num_bytes) <= num_bytes:
            group.append(master)
            size += master.num_bytes
    if group:
        yield group
