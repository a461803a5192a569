"""Tensors that autograd saves during a pass: a view of fast memory is saved as its master."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
        whole = self.master.value()
        flat = whole.as_strided((self.master.span // whole.element_size(),), (1,))
        offset = self.byte_offset // self.dtype.itemsize
        if self.dtype == whole.dtype:
            return flat.as_strided(self.size, self.stride, whole.storage_offset() + offset)
        return flat.view(self.dtype).as_strided(self.size, self.stride, offset)


def hooks(
    slab: Callable[[], Slab | None], bound_at: Callable[[int], Master | None], on_graph: Callable[[], None]
) -> torch.autograd.graph.saved_tensors_hooks:
    """Context that packs views of fast memory as `SavedView`; other tensors go to the hooks that were set before.

    Args:
        slab: the slab in use.
        bound_at: gives the parameter that is shown at an address of it.
        on_graph: called whenever a tensor is saved, that is when a graph is being built.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        on_graph()
        memory = slab()
        if (
            memory is not None
            and tensor.layout is torch.strided
            and tensor.device.type != "meta"
            and 0 <= tensor.data_ptr() - memory.address < memory.num_bytes
        ):
            master = bound_at(tensor.data_ptr())
            if master is not None and master.bound is not None:
                offset = tensor.data_ptr() - master.bound.data_ptr()
                view = SavedView(master, tensor.dtype, tensor.shape, tensor.stride(), offset, master.version())
                return view if outer is None else (_OUTER, outer[0](view.load()))
        return tensor if outer is None else (_OUTER, outer[0](tensor))

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedView):
            return packed.load()
        if isinstance(packed, tuple) and packed[0] is _OUTER:
            assert outer is not None
            packed = outer[1](packed[1])
        assert isinstance(packed, torch.Tensor)
        return packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


_OUTER = object()
