"""Tensors that autograd saves during a pass: a view of fast memory is saved as its master."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fmstream.device.device import Slab
    from fmstream.payloads.master import Master


@dataclass(frozen=True, slots=True)
class SavedView:
    """A view of a parameter, to be taken again from its master when the gradient needs it."""

    master: Master
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    byte_offset: int
    version: int

    def load(self) -> torch.Tensor:
        """The same view, over the master's value.

        Raises:
            RuntimeError: the parameter was modified in place since (as autograd raises it).
        """
        if self.master.version() != self.version:
            raise RuntimeError(
                f"parameter {self.master.name!r} needed for gradient computation has been modified by an inplace "
                f"operation: it is at version {self.master.version()}, expected {self.version}"
            )
        return self.master.value_like(self.dtype, self.size, self.stride, self.byte_offset)


class _Pack:
    """Packs tensors that ``find`` knows as `SavedView`; the others go to the hooks that were set before."""

    def __init__(self, find: Callable[[torch.Tensor], SavedView | None], on_graph: Callable[[], None]) -> None:
        self.find = find
        self.on_graph = on_graph
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def __call__(self, tensor: torch.Tensor | SavedView) -> Any:
        self.on_graph()
        outer = self.outer
        if not isinstance(tensor, SavedView) and tensor.layout is torch.strided and tensor.device.type != "meta":
            tensor = self.find(tensor) or tensor
        if outer is None:
            # What a node packs of its own result must not refer to the node: nothing would ever free the two.
            return tensor if isinstance(tensor, SavedView) or tensor.grad_fn is None else tensor.detach()
        if isinstance(tensor, SavedView) and not isinstance(outer[0], _Pack):
            tensor = tensor.load()
        return (_OUTER, outer[0](tensor))  # type: ignore[arg-type]

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor again."""
        if isinstance(packed, SavedView):
            return packed.load()
        if isinstance(packed, tuple) and packed[0] is _OUTER:
            assert self.outer is not None
            packed = self.outer[1](packed[1])
        assert isinstance(packed, torch.Tensor)
        return packed


def hooks(
    slab: Callable[[], Slab | None], bound_at: Callable[[int], Master | None], on_graph: Callable[[], None]
) -> torch.autograd.graph.saved_tensors_hooks:
    """Context that packs views of fast memory as `SavedView`; other tensors go to the hooks that were set before.

    Args:
        slab: the slab in use.
        bound_at: gives the parameter that is shown at an address of it.
        on_graph: called whenever a tensor is saved, that is when a graph is being built.
    """

    def find(tensor: torch.Tensor) -> SavedView | None:
        memory, address = slab(), tensor.data_ptr()
        if memory is None or not 0 <= address - memory.address < memory.num_bytes:
            return None
        master = bound_at(address)
        if master is None or master.bound is None:
            return None
        return _saved(tensor, master, master.bound.data_ptr())

    pack = _Pack(find, on_graph)
    return torch.autograd.graph.saved_tensors_hooks(pack, pack.unpack)


def faults(read: Sequence[tuple[Master, torch.Tensor]]) -> AbstractContextManager[Any]:
    """Context that packs views of values that were read outside any plan as `SavedView`.

    Args:
        read: parameters and the values that an operation is given for them.
    """
    if not read or not torch.is_grad_enabled() or _are_disabled():
        return nullcontext()

    def find(tensor: torch.Tensor) -> SavedView | None:
        address = tensor.data_ptr()
        for master, value in read:
            start = value.data_ptr()
            if start <= address < start + master.span:
                return _saved(tensor, master, start)
        return None

    pack = _Pack(find, lambda: None)
    return torch.autograd.graph.saved_tensors_hooks(pack, pack.unpack)


def _are_disabled() -> bool:
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def _saved(tensor: torch.Tensor, master: Master, start: int) -> SavedView:
    """A view of a parameter whose first byte is at ``start``."""
    offset = tensor.data_ptr() - start
    return SavedView(master, tensor.dtype, tensor.shape, tensor.stride(), offset, master.version())


_OUTER = object()
