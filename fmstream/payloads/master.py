"""The master copy of one parameter: where its truth lies, and who shows it."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmstream.device.homes import FileHome
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import HOLD, InGraph, hand_over_grad, hide
from fmstream.payloads.kinds import dress, is_dressed
from fmstream.payloads.truth import Truth
from fmstream.payloads.views import View, alias, bytes_of, outline, same_view

if TYPE_CHECKING:
    from fmstream.payloads.keeper import Keeper
    from fmstream.payloads.shells import Shell


class Master(Truth):
    """One managed parameter.

    Attributes:
        index: id in traces and plans.
        slots: the dicts that hold the parameter, each with its key: one for each module that owns it.
        deep: other places: a module's dict, the name of a list or dict in it, and the key in that; looked up each time,
            for the module may make a new one (recurrent layers do).
        absent: the stand-in that modules show while the parameter is not bound.
        bound: what modules show while its bytes are in fast memory.
        bound_version: its count of in-place writes when it was bound.
        bound_address: where it was then.
        in_graph: what graphs are given for it, once there was one.
        look_up: what gives rows of a table that is not streamed as a whole; None for any other parameter.
        shell: what stands for the user's wrapper that has ``original`` in it, on another device than the host.
    """

    __slots__ = (
        "absent",
        "bound",
        "bound_address",
        "bound_version",
        "deep",
        "in_graph",
        "index",
        "keeper",
        "look_up",
        "name",
        "requires_grad",
        "seen_version",
        "shell",
        "slots",
    )

    def __init__(self, index: int, name: str, original: torch.Tensor, device: torch.device, keeper: Keeper) -> None:
        super().__init__(original, device)
        self.index = index
        self.name = name
        self.keeper = keeper
        self.bound: torch.Tensor | None = None
        self.bound_version = 0
        self.bound_address = 0
        self.in_graph: InGraph | None = None
        self.look_up: Callable[[Master, torch.Tensor], torch.Tensor | None] | None = None
        self.shell: Shell | None = None
        self.slots: list[tuple[dict[str, Any], str]] = []
        self.deep: list[tuple[dict[str, Any], str, Any]] = []
        self.seen_version = self.version()
        self.absent = Absent(self, is_param=True)
        self.requires_grad = False
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Let the stand-in require a gradient as the user's parameter does."""
        wanted = self.original.requires_grad
        if wanted == self.requires_grad or self.absent is None:
            return
        self.requires_grad = wanted
        with torch._C.DisableTorchFunctionSubclass():
            self.absent.requires_grad_(wanted)

    @property
    def loose(self) -> Absent:
        """A new stand-in that is detached and no parameter."""
        return Absent(self, is_param=False)

    @property
    def is_param(self) -> bool:
        """Whether the user's tensor is a parameter by itself."""
        return isinstance(self.original, nn.Parameter)

    def watch_grad(self) -> None:
        """Hand the gradient of what is shown now to the user's parameter, should there be one."""
        bound = self.bound
        if bound is not None and bound.is_leaf and bound.requires_grad and not bound._post_accumulate_grad_hooks:
            bound.register_post_accumulate_grad_hook(hand_over_grad)  # type: ignore[no-untyped-call]

    # Reading

    def present(self) -> Master:
        """The master of what the parameter is now; this one is that of what it was, should that be another.

        It is another one where the user's own parameter object was given other data, or an operation let what is bound
        have another shape or other memory.
        """
        if self._is_bound_reshaped:
            assert self.bound is not None
            return self.replace(torch.Tensor.detach(self.bound).clone()).master
        if self.is_outdated and not self.is_swapped:
            return self._succeed(self.former())
        return self

    def fault(self) -> torch.Tensor:
        """The value for a read outside the plan: fast memory's while bound, else the master's, counted."""
        bound = self.bound
        if bound is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                return bound.as_strided(self.size, self.stride)
        self.keeper.count_fault(self)
        return self.value()

    def keep_alias(self, value: torch.Tensor, shown: torch.Tensor) -> bool:
        """Whether a view of a faulted ``value`` may be handed out as it is; ``shown`` is what was given for it."""
        watched = alias(shown, value) if isinstance(shown, InGraph) else value
        return self.keeper.note_alias(self, watched)

    @property
    def is_held(self) -> bool:
        """Whether somebody else holds the user's parameter object, and so may write it past its stand-in."""
        ours = 2 if self.in_graph is None else 2 + HOLD  # this object's reference, the call's, and a graph's
        if self.shell is not None:
            return self.shell.is_held or sys.getrefcount(self.original) > ours + 1
        return sys.getrefcount(self.original) > ours

    def expose(self, *, as_array: bool = False, as_storage: bool = False) -> torch.Tensor:
        """A plain tensor over the master's memory for somebody who may write it unseen.

        An array may be written at once, so that within a pass the parameter is left in place.  A storage may be given
        other memory.
        """
        if as_array and self.keeper.is_in_pass and self.device.type == "cpu":
            self.leave_in_place()
        self.keeper.note_exposed(self)
        self._settle(moves=as_storage and not self.keeper.is_in_pass)
        self.bring()
        return self.memory()

    def _settle(self, *, moves: bool = False) -> None:
        """Let no device be reading the master's memory; nor a worker where that may move."""
        if moves or self.device.type != "cpu":
            self.keeper.settle()

    def plain(self, is_param: bool) -> torch.Tensor:
        """The value as an ordinary tensor or parameter, as it is pickled."""
        self.bring()
        value = self.host_value()
        if is_dressed(self.original):
            return dress(value, self.original)
        return nn.Parameter(value, self.original.requires_grad) if is_param else value

    def deepcopy(self, memo: dict[int, Any], is_param: bool) -> torch.Tensor:
        """An independent copy of the user's parameter (one for all stand-ins of it within one deepcopy)."""
        self.bring()
        if not is_param:
            return dress(self.host_value().clone(), self.original)
        if id(self.original) not in memo:
            with torch.inference_mode(False), torch.no_grad():
                value = self.host_value().clone()
                dressed = is_dressed(self.original)
                clone = dress(value, self.original) if dressed else nn.Parameter(value, self.original.requires_grad)
            if self.original.grad is not None:
                clone.grad = copy.deepcopy(self.original.grad, memo)
            memo[id(self.original)] = clone
        return memo[id(self.original)]  # type: ignore[no-any-return]

    # Writing

    def to_memory(self) -> None:
        """From now on the master's own memory is the truth; a file's bytes are brought there first."""
        self.present()
        if isinstance(self.home, FileHome):
            self.copy_to(self.original.data_ptr())
            self.home = self._memory_home()

    def prepare_write(self) -> None:
        """Called before the master's memory is written, from where it is then brought to copies in fast memory."""
        self._settle()
        self.to_memory()
        bound = self.bound
        if bound is not None and self.is_bound_written and self.differs(bound):
            ctypes.memmove(self.original.data_ptr(), bytes_of(bound, self.span).data_ptr(), self.span)

    def bring(self) -> None:
        """Let the master's memory have what was written to copies of it that are in use."""
        self.keeper.bring_aliases()
        self.present()
        if self.bound is not None and self.is_bound_written and self.differs(self.bound):
            self.write_back(bytes_of(self.bound, self.span))

    @property
    def is_bound_swapped(self) -> bool:
        """Whether ``torch.utils.swap_tensors`` made what is bound another tensor; that is the module's own now."""
        return self.bound is not None and self.bound.__dict__.get("master") is not self

    @property
    def _is_bound_reshaped(self) -> bool:
        """Whether an operation let what is bound have another shape or other memory."""
        return self.bound is not None and not self.is_bound_swapped and not self.is_shown_at(self.bound_address)

    @property
    def is_bound_written(self) -> bool:
        """Whether an in-place operation wrote what is bound, or what shares a part with it."""
        return self.bound is not None and self.bound._version != self.bound_version

    def is_shown_at(self, address: int) -> bool:
        """Whether what is bound still is all of the parameter, at ``address``."""
        assert self.bound is not None
        return self.span == 0 or outline(self.bound) == (address, self.dtype, self.size, self.stride)

    def may_hold_writes(self, value: torch.Tensor) -> bool:
        """Whether a faulted value that was written may hold what the master does not."""
        return value.data_ptr() == self.original.data_ptr() or self.differs(value)

    def writable(self) -> torch.Tensor:
        """The value on the execution device, to be written in place; `take` then makes it the truth."""
        return self.memory() if self.device.type == "cpu" else self.value()

    def take(self, value: torch.Tensor) -> None:
        """What `writable` gave was written."""
        if self.device.type != "cpu":
            with torch.inference_mode(False), torch.no_grad():
                self.memory().copy_(value)
        self.written()

    def written(self) -> None:
        """Called after the master's memory was written."""
        if not self.original.is_inference():
            torch.autograd.graph.increment_version(self.original)
        self.seen_version = self.version()
        self.keeper.changed(self)

    def write_back(self, truth: torch.Tensor) -> None:
        """Take bytes of host memory, from the first element's to the last one's, for the new truth."""
        self.prepare_write()
        ctypes.memmove(self.original.data_ptr(), truth.data_ptr(), self.span)
        self.written()

    def replace(self, value: torch.Tensor) -> Absent:
        """``parameter.data = value``: the master becomes another tensor.  Returns what stands for it then."""
        if isinstance(value, Absent) and value.master is self:
            return self.absent
        former = self.former() if self.is_outdated else self.memory()
        plain = value.master.memory() if isinstance(value, Absent) else value
        if plain.device == self.device and self.device.type != "cpu":
            plain = plain.detach().to("cpu")  # the truth lies on the host
        with torch.inference_mode(False):
            self.original.data = plain
        return self._succeed(former).absent

    def _succeed(self, former: torch.Tensor) -> Master:
        """The user's parameter holds other data than the ``former``, which this master goes on with."""
        shown = self.shown()
        successor = Master(self.index, self.name, self.original, self.device, self.keeper)
        successor.slots, successor.deep, self.slots, self.deep = self.slots, self.deep, [], []
        if shown:
            if (successor.size, successor.stride, successor.dtype) == (self.size, self.stride, self.dtype):
                successor.absent = self.absent
            self.absent.master = successor
            successor.show(shown, successor.absent)
        # Detached stand-ins that were handed out stand for the tensor that was there then, and keep this.
        self.absent = None  # type: ignore[assignment]
        self._unshow()
        self.original = nn.Parameter(former, requires_grad=False) if self.is_param else former
        self.take_memory()  # which outlives a file's handle
        if shown:
            self.keeper.succeeded(self, successor)
        else:  # the modules have been given back, or surveyed again
            successor.retire()
        return successor

    def shown(self) -> tuple[torch.Tensor, ...]:
        """The tensors that a slot of this parameter may show."""
        absent = None if self.is_swapped else self.absent
        return tuple(tensor for tensor in (absent, self.bound) if tensor is not None)

    @property
    def is_swapped(self) -> bool:
        """Whether ``torch.utils.swap_tensors`` made the stand-in another tensor; that is the module's own now."""
        return self.absent is not None and not isinstance(self.absent, Absent)

    def retire(self) -> None:
        """No module shows this parameter's stand-in any more: break the cycle between them.

        Stand-ins that somebody holds go on with the memory, which has every edit and outlives the file's handle.
        """
        self.take_memory()
        self._unshow()
        self.look_up = None
        self.absent = None  # type: ignore[assignment]
        self.slots, self.deep = [], []

    def share_memory(self) -> None:
        """Move the master's memory, and all of its storage, to memory that processes can share, and may write."""
        self.keeper.settle()
        self.keeper.note_exposed(self)
        sharing = self.keeper.sharing(self)
        for master in sharing:
            master.bring()
            master.to_memory()
        self.original.share_memory_()  # type: ignore[no-untyped-call]
        for master in sharing:
            master.take_memory()
            hide(master)
            self.keeper.changed(master)

    def leave_in_place(self) -> None:
        """Show the user's own parameter at once, and no longer stream it."""
        self.to_memory()
        if self.bound is not None and self.is_bound_written and self.differs(self.bound):
            self.write_back(bytes_of(self.bound, self.span))
        self.show(self.shown(), self.original)
        self.bound = None
        hide(self)
        self.keeper.left_in_place(self)

    def leave_view_in_place(self, view: View) -> torch.Tensor:
        """The same view of the user's own parameter, which is left in place."""
        if self.device.type != "cpu":
            return torch.Tensor.detach(view)
        offset = view.data_ptr() - view.start
        self.leave_in_place()
        return same_view(self.memory(), self.span, view.dtype, view.size(), view.stride(), offset)

    # Showing

    def bind(self, bound: torch.Tensor, address: int) -> None:
        """Show a view of fast memory, at ``address``, in every slot that still shows the stand-in."""
        absent = self.absent
        if not isinstance(absent, Absent):
            return  # it was swapped
        self.bound, self.bound_version, self.bound_address = bound, bound._version, address
        for holder, key in self.slots:
            if holder.get(key) is absent:
                holder[key] = bound
        if self.deep:
            self.show_deep((absent,), bound)

    def unbind(self) -> bool:
        """Show the stand-in again; False if a slot shows something else by now."""
        bound, self.bound = self.bound, None
        assert bound is not None
        if bound.__dict__.get("master") is not self:
            return False  # it was swapped
        absent, ours, present = self.absent, True, None
        for holder, key in self.slots:
            present = holder.get(key)
            if present is bound:
                holder[key] = absent
            elif present is not absent:
                ours = False
        if self.deep:
            self.show_deep((bound,), absent)
        if self.in_graph is not None:
            bound = present = None  # `hide` asks who refers to it
            hide(self)
        return ours

    def _unshow(self) -> None:
        """Nothing is bound any more, and graphs are given another tensor from now on."""
        self.bound = None
        hide(self)
        self.in_graph = None

    def show(self, instead_of: tuple[Any, ...], tensor: torch.Tensor) -> None:
        """Show ``tensor`` in every place that shows one of some others."""
        for holder, key in self.slots:
            if any(holder.get(key) is other for other in instead_of):
                holder[key] = tensor
        self.show_deep(instead_of, tensor)

    def show_deep(self, instead_of: tuple[Any, ...], tensor: torch.Tensor) -> None:
        """Show ``tensor`` in the deep places that show one of some others."""
        for holder, name, key in self.deep:
            container = holder.get(name)
            try:
                if any(container[key] is other for other in instead_of):  # type: ignore[index]
                    container[key] = tensor  # type: ignore[index]
            except (LookupError, TypeError):  # the module put something else there
                continue
