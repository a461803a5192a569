"""A parameter while its bytes are in fast memory: what its module shows, and what graphs are given for it.

What these tensors hand out beyond the pass (``.data``, ``.detach()``, copies) is the master's, for their own bytes will
be overwritten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmstream.payloads.kinds import dress, is_dressed
from fmstream.payloads.views import Followed

if TYPE_CHECKING:
    from fmstream.payloads.master import Master

_FIRST = 2**64 - 1
"""The sequence number that autograd gives to the nodes of leaves: of those that may run, the highest runs first."""


class _OfMaster(Followed):
    """What bound tensors have in common: what they hand out beyond the pass comes from the master."""

    @property
    def data(self) -> torch.Tensor:
        """The master's data, as a tensor that faults: writes reach the master and this copy."""
        return self.master.present().loose

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.master.present().replace(value)

    def detach(self) -> torch.Tensor:
        """The master's data, detached: a state dict taken during a pass stays true after it."""
        return self.master.present().loose

    def numpy(self, **kwargs: Any) -> Any:
        """The user's parameter as an array; it is left in place from now on, for writes to an array leave no trace."""
        self.master.leave_in_place()
        return self.master.original.numpy(**kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.master.leave_in_place()
        return self.master.original.__dlpack__(**kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Change the user's parameter; what is shown follows at the next pass."""
        self.master.original.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.master.present().deepcopy(memo, is_param=self.master.is_param)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.master.present().plain(is_param=self.master.is_param)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Bound(_OfMaster, nn.Parameter):
    """A parameter while its bytes are in fast memory and no graph is built."""


class InGraph(_OfMaster):
    """A parameter while a graph is built: its gradient goes to the user's parameter.

    There is one for a parameter.  It is pointed at fast memory while the parameter is bound there, and away from it the
    rest of the time (see `Master.hide`).  So all uses of the parameter have one edge in the graph, and autograd sums
    their gradients in the same order as for a parameter that stays where it is.  It shares storages without being a
    view, for autograd lets no view that a function returned be written.

    ``node`` is what autograd calls for its gradient, unless an in-place operation took its place.
    """

    node: Any

    def show(self, value: torch.Tensor) -> None:
        """Point it at other memory; what autograd knows of it stays."""
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    @property
    def is_as_made(self) -> bool:
        """Whether its gradient still goes straight to the user's parameter."""
        return self.grad_fn is self.node


class Bind(torch.autograd.Function):
    """Identity from the user's parameter to its bytes in fast memory, so that gradients reach it."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``make`` makes; ``original`` is the leaf of the graph."""
        ctx.set_materialize_grads(False)
        ctx.home = original.device
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Hand the gradient to the parameter, where that lies."""
        return (None if grads[0] is None else grads[0].to(ctx.home)), None


def make_bound(master: Master, view: torch.Tensor) -> torch.Tensor:
    """The tensor to put into ``module._parameters`` for a view of fast memory where no graph is built."""
    if is_dressed(master.original):
        dressed = dress(view, master.original)
        dressed.__dict__["master"] = master
        return dressed
    bound = torch.Tensor._make_subclass(Bound, view, master.original.requires_grad)
    bound.master = master
    return bound


def make_in_graph(master: Master, value: torch.Tensor) -> InGraph:
    """A tensor over the memory of ``value`` that is a function of the user's parameter to autograd."""

    def make() -> torch.Tensor:
        alias = torch.empty(0, dtype=value.dtype, device=value.device)
        alias.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())
        return torch.Tensor._make_subclass(InGraph, alias)

    with torch.enable_grad():
        shown: InGraph = Bind.apply(master.original, make)  # type: ignore[no-untyped-call]
    node = shown.grad_fn
    # Run it as soon as the last use has its gradient, as autograd does with the leaf itself.
    node._set_sequence_nr(_FIRST)  # type: ignore[union-attr]
    shown.master, shown.node = master, node
    shown._is_param = True
    return shown


def show_in_graph(master: Master, value: torch.Tensor) -> InGraph:
    """What a graph is given for this parameter, pointed at ``value``; it stays there until `hide`."""
    shown = master.in_graph
    if shown is None or not shown.is_as_made:
        shown = master.in_graph = make_in_graph(master, value)
    shown.show(value)
    return shown


def hide(master: Master) -> None:
    """What graphs were given looks at the truth from now on, should somebody have kept it; not into fast memory.

    An accelerator cannot look at the master's memory.  There it looks at nothing, or if somebody kept it, graphs are
    given another one.
    """
    shown = master.in_graph
    if shown is None or shown is master.bound:
        return
    if master.device.type == "cpu":
        shown.show(master.memory())
    # References: the master's, the part's (it remembers what it showed), this frame's, and that of `getrefcount`.
    # It is no argument of a call: such a one counts once more where a compiler follows the calls of this thread.
    elif shown._use_count() == 1 and sys.getrefcount(shown) <= 4:  # type: ignore[attr-defined]
        shown.show(torch.empty(0, dtype=master.dtype, device=master.device))
    else:
        master.in_graph = None


def hand_over_grad(leaf: Any) -> None:
    """A leaf that was shown has a gradient: it belongs to the user's parameter, and so do the user's hooks."""
    with torch.no_grad():
        grad, leaf.grad = leaf.grad, None
    if grad is None:
        return
    original = leaf.master.original
    grad = grad.to(original.device)
    for hook in (original._backward_hooks or {}).values():
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    if original.grad is None or torch.is_grad_enabled():
        original.grad = grad if original.grad is None else original.grad + grad
    else:
        original.grad.add_(grad)
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        hook(original)


def _graph_holds() -> int:
    leaf = torch.zeros(1, requires_grad=True)
    before = sys.getrefcount(leaf)
    graph = leaf * 1
    held = sys.getrefcount(leaf) - before
    del graph
    return held


HOLD = _graph_holds()
"""References to the Python object of a leaf that a graph holds."""
