"""Views of a parameter in fast memory: what is written through them is seen as written to the parameter.

``.data`` of a plain tensor counts in-place writes on its own, and an array counts none.  So the methods of a parameter
that is shown hand out `View`s, whose ``.data`` is counted with the parameter's.  Functions (``torch.t(weight)``) hand
out plain tensors: catching these, too, would turn off fused operators, which give other last bits.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from fmstream.payloads import transforms

if TYPE_CHECKING:
    from fmstream.device.device import Part
    from fmstream.payloads.master import Master

_METHODS = (
    "__getitem__ adjoint as_strided broadcast_to chunk contiguous detach diagonal dsplit expand expand_as flatten "
    "hsplit movedim moveaxis narrow permute positive ravel reshape reshape_as select split split_with_sizes squeeze "
    "swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view view_as vsplit"
)
_PROPERTIES = "H T mH mT imag real"


class Followed(torch.Tensor):
    """A tensor over the bytes of a parameter, of which methods hand out `View`s."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    master: Master


class View(Followed):
    """A view of a parameter in fast memory.

    ``start`` is the address of the parameter's first byte there.
    """

    start: int

    @property
    def data(self) -> torch.Tensor:
        """The same view without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def numpy(self, **kwargs: Any) -> Any:
        """An array over the user's parameter, which is left in place from now on: such writes leave no trace."""
        return self.master.leave_view_in_place(self).numpy(**kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.master.leave_view_in_place(self).__dlpack__(**kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(torch.Tensor.detach(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.Tensor.detach(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(torch.Tensor.detach(self))


def follow(master: Master, start: int, result: Any) -> Any:
    """Let what an operation on a parameter returned be a `View` where it is a view at all; returns it.

    Args:
        master: the parameter.
        start: address of its first byte in the memory that was given to the operation.
        result: a tensor, several, or anything else.
    """
    if type(result) is torch.Tensor:
        # By address, for torch does not call all of them views.
        if not transforms.are_active() and start <= result.data_ptr() < start + master.span:
            # Setting the class spares a dispatched operation, and leaves the tensor where it is in a graph.
            result.__class__ = View
            view = cast(View, result)
            view.master, view.start = master, start
    elif isinstance(result, tuple | list):
        for item in result:
            follow(master, start, item)
    return result


def _following(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Followed, *args: Any, **kwargs: Any) -> Any:
        start = self.start if isinstance(self, View) else self.data_ptr()
        return follow(self.master, start, plain(self, *args, **kwargs))

    return call


def _as_strided(self: Followed, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    """An offset counts from the start of the user's storage, which is not that of the memory that is shown."""
    if storage_offset is not None:
        start = self.start if isinstance(self, View) else self.data_ptr()
        first = (start - self.untyped_storage().data_ptr()) // self.element_size()
        storage_offset += first - int(self.master.original.storage_offset())
    return torch.as_strided(self, size, stride, storage_offset)


METHODS = {name: _following(getattr(torch.Tensor, name)) for name in _METHODS.split()}
METHODS["as_strided"] = _following(_as_strided)
PROPERTIES = {name: _following(getattr(torch.Tensor, name).__get__) for name in _PROPERTIES.split()}
for _name, _method in METHODS.items():
    setattr(Followed, _name, _method)
for _name, _method in PROPERTIES.items():
    setattr(Followed, _name, property(_method))


def same_view(
    whole: torch.Tensor, span: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], byte_offset: int
) -> torch.Tensor:
    """The view of ``whole``, a parameter of ``span`` bytes, that begins ``byte_offset`` bytes into it."""
    flat = torch.as_strided(whole, (span // whole.element_size(),), (1,))
    typed = flat if dtype == flat.dtype else flat.view(dtype)
    return torch.as_strided(typed, size, stride, typed.storage_offset() + byte_offset // dtype.itemsize)


def outline(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.Size, tuple[int, ...]]:
    """Where a tensor's elements lie: its address (0 where it has none), dtype, shape and strides in elements."""
    return tensor.data_ptr() if tensor.numel() else 0, tensor.dtype, tensor.size(), tensor.stride()


def bytes_of(tensor: torch.Tensor, span: int) -> torch.Tensor:
    """The bytes of a parameter, gaps included."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (span,), (1,)).cpu()


def alias(counting: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of ``value`` that shares the count of in-place writes of another tensor."""
    tensor = torch.Tensor.detach(counting)
    tensor.data = value
    return tensor


def looks_into(tensor: torch.Tensor, part: Part) -> bool:
    """Whether a tensor looks into the part, other than through the part's own views."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or part.owns(tensor):
            return False
        try:
            return part.is_under(tensor)
        except (RuntimeError, NotImplementedError):  # a tensor that has no storage
            return False


def point_at(master: Master, tensor: torch.Tensor, byte_offset: int) -> None:
    """Make a tensor that looks into fast memory a view of the master's, with the size and strides that it has."""
    master.to_memory()
    storage = master.memory().untyped_storage()
    offset = (master.original.data_ptr() - storage.data_ptr() + byte_offset) // tensor.element_size()
    # A tensor that a graph depends on cannot be moved; it keeps the fast memory that it looks into.
    with contextlib.suppress(RuntimeError), torch.inference_mode(False), torch.no_grad():
        tensor.set_(storage, offset, tensor.size(), tensor.stride())
    if type(tensor) is View:
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]
