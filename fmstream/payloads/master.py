"""The master copy of one parameter: where its truth lies, and who shows it."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmstream.core.plan import ALIGNMENT
from fmstream.device.files import Staging
from fmstream.device.homes import FileHome, Home, MemoryHome
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import HOLD, InGraph, hand_over_grad, hide
from fmstream.payloads.kinds import dress, is_dressed
from fmstream.payloads.views import View, alias, bytes_of, outline, same_view

if TYPE_CHECKING:
    from fmstream.payloads.keeper import Keeper
    from fmstream.payloads.shells import Shell

STAGING_BYTES = 1 << 20
"""For reads on the calling thread."""


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last, gaps included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class Master:
    """One managed parameter.

    ``original`` is the user's own ``nn.Parameter``, or a plain tensor within one that is a wrapper. Its memory is the
    truth where ``home`` is a `MemoryHome`, and shows it (a private mapping of the file) where that is a `FileHome`.

    Attributes:
        index: id in traces and plans.
        slots: the dicts that hold the parameter, each with its key: one for each module that owns it.
        deep: other places: a module's dict, the name of a list or dict in it, and the key in that; looked up each time,
            for the module may make a new one (recurrent layers do).
        num_bytes: bytes in fast memory, a multiple of 64.
        absent: the stand-in that modules show while the parameter is not bound.
        bound: what modules show while its bytes are in fast memory.
        bound_version: its count of in-place writes when it was bound.
        in_graph: what graphs are given for it, once there was one.
        look_up: what gives rows of a table that is not streamed as a whole; None for any other parameter.
        shell: what stands for the user's wrapper that has ``original`` in it, on another device than the host.
    """

    __slots__ = (
        "absent",
        "address",
        "bound",
        "bound_version",
        "deep",
        "device",
        "dtype",
        "home",
        "in_graph",
        "index",
        "keeper",
        "look_up",
        "name",
        "num_bytes",
        "original",
        "requires_grad",
        "seen_version",
        "shell",
        "size",
        "slots",
        "span",
        "stride",
    )

    def __init__(self, index: int, name: str, original: torch.Tensor, device: torch.device, keeper: Keeper) -> None:
        self.index = index
        self.name = name
        self.original = original
        self.device = device
        self.keeper = keeper
        self.bound: torch.Tensor | None = None
        self.bound_version = 0
        self.in_graph: InGraph | None = None
        self.look_up: Callable[[Master, torch.Tensor], torch.Tensor | None] | None = None
        self.shell: Shell | None = None
        self.slots: list[tuple[dict[str, Any], str]] = []
        self.deep: list[tuple[dict[str, Any], str, Any]] = []
        self._describe()

    def _describe(self) -> None:
        """Take shape, strides and dtype from the user's parameter, whose memory is the truth, and make a stand-in."""
        original = self.original
        self.size = original.shape
        self.stride = original.stride()
        self.dtype = original.dtype
        self.span = span_bytes(original)
        self.num_bytes = -(-self.span // ALIGNMENT) * ALIGNMENT
        self.address = original.data_ptr()
        self.home: Home = self._memory_home()
        self.seen_version = self.version()
        self.absent = Absent(self, is_param=True)
        self.requires_grad = False
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Let the stand-in require a gradient as the user's parameter does."""
        wanted = self.original.requires_grad
        if wanted == self.requires_grad:
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

    def memory(self) -> torch.Tensor:
        """A plain tensor over the master's own memory."""
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return self.original.detach()

    def value(self) -> torch.Tensor:
        """The true value as a plain tensor on the execution device, aligned to 64 bytes.

        On the CPU it is the master's own memory where that is aligned.
        """
        if self.device.type == "cpu":
            return self.host_value()
        with torch.inference_mode(False), torch.no_grad():
            flat = self.host_bytes().to(self.device)
            return flat.view(self.dtype).as_strided(self.size, self.stride)

    def host_value(self) -> torch.Tensor:
        """The true value as a plain tensor of host memory, aligned to 64 bytes."""
        if self.absent is None:
            self.take_memory()  # retired: the user's parameter may hold other memory by now
        home = self.home
        if isinstance(home, MemoryHome) and home.address % ALIGNMENT == 0:
            return self.memory()
        with torch.inference_mode(False), torch.no_grad():
            buffer = torch.empty(self.span, dtype=torch.uint8, device="cpu")
            self.copy_to(buffer.data_ptr())
            return buffer.view(self.dtype).as_strided(self.size, self.stride)

    def value_like(
        self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], byte_offset: int
    ) -> torch.Tensor:
        """A view of the true value."""
        return same_view(self.value(), self.span, dtype, size, stride, byte_offset)

    def copy_to(self, address: int) -> None:
        """Bring the master's bytes to a host address, on the calling thread."""
        home = self.home
        if isinstance(home, MemoryHome):
            ctypes.memmove(address, home.address, self.span)
            return
        staging = Staging(STAGING_BYTES)
        try:
            home.file.read_into(address, home.offset, self.span, staging)
        finally:
            staging.close()

    def host_bytes(self) -> torch.Tensor:
        """The true bytes as a flat tensor of host memory: a view of the master's own where the truth lies there."""
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(self.home, MemoryHome):
                flat = self.memory().as_strided((self.span // self.dtype.itemsize,), (1,))
                return flat.view(torch.uint8)
            buffer = torch.empty(self.span, dtype=torch.uint8, device="cpu")
            self.copy_to(buffer.data_ptr())
            return buffer

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

    def expose(self, as_array: bool) -> torch.Tensor:
        """A plain tensor over the master's memory for somebody who may write it unseen.

        An array may be written at once, so that within a pass the parameter is left in place.
        """
        if as_array and self.keeper.is_in_pass and self.device.type == "cpu":
            self.leave_in_place()
        self.keeper.note_exposed(self)
        self._settle()
        return self.memory()

    def _settle(self) -> None:
        """Let no device be reading the master's memory."""
        if self.device.type != "cpu":
            self.keeper.settle()

    def plain(self, is_param: bool) -> torch.Tensor:
        """The value as an ordinary tensor or parameter, as it is pickled."""
        value = self.host_value()
        if is_dressed(self.original):
            return dress(value, self.original)
        return nn.Parameter(value, self.original.requires_grad) if is_param else value

    def deepcopy(self, memo: dict[int, Any], is_param: bool) -> torch.Tensor:
        """An independent copy of the user's parameter (one for all stand-ins of it within one deepcopy)."""
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

    def version(self) -> int:
        """Autograd's count of in-place writes to the user's parameter; 0 where it keeps none."""
        return 0 if self.original.is_inference() else self.original._version

    def to_memory(self) -> None:
        """From now on the master's own memory is the truth; a file's bytes are brought there first."""
        if isinstance(self.home, FileHome):
            self.copy_to(self.original.data_ptr())
            self.home = self._memory_home()

    def take_memory(self) -> None:
        """The master's own memory was written: it is the truth, and no file is read over it."""
        self.address = self.original.data_ptr()
        self.home = self._memory_home()

    def _memory_home(self) -> MemoryHome:
        # An alias keeps the memory, should the user's parameter come to hold other data.
        return MemoryHome(self.original.data_ptr(), self.span, self.memory())

    def prepare_write(self) -> None:
        """Called before the master's memory is written, from where it is then brought to copies in fast memory."""
        self._settle()
        self.to_memory()
        bound = self.bound
        if bound is not None and self.is_bound_written and self._differs(bound):
            ctypes.memmove(self.original.data_ptr(), bytes_of(bound, self.span).data_ptr(), self.span)

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
        return value.data_ptr() == self.original.data_ptr() or self._differs(value)

    def _differs(self, value: torch.Tensor) -> bool:
        return not torch.equal(bytes_of(value, self.span), self.host_bytes())

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
        plain = value.master.memory() if isinstance(value, Absent) else value
        if plain.device == self.device and self.device.type != "cpu":
            plain = plain.detach().to("cpu")  # the truth lies on the host
        before, shown = self.memory(), self.shown()
        with torch.inference_mode(False):
            self.original.data = plain
        if not shown:
            return self.absent  # the modules have been given back, or surveyed again
        successor = Master(self.index, self.name, self.original, self.device, self.keeper)
        successor.slots, successor.deep, self.slots, self.deep = self.slots, self.deep, [], []
        if (successor.size, successor.stride, successor.dtype) == (self.size, self.stride, self.dtype):
            successor.absent = self.absent
        self.absent.master = successor
        for holder, key in successor.slots:
            if any(holder.get(key) is tensor for tensor in shown):
                holder[key] = successor.absent
        successor.show_deep(shown, successor.absent)
        # Detached stand-ins that were handed out stand for the tensor that was there then.
        self.absent = Absent(self, is_param=False)
        self._unshow()
        self.original = nn.Parameter(before, requires_grad=False) if self.is_param else before
        if isinstance(self.home, MemoryHome):
            self.home = MemoryHome(before.data_ptr(), self.span, before)
        self.keeper.succeeded(self, successor)
        return successor.absent

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
        """Move the master's memory to memory that processes can share."""
        self.keeper.settle()
        self.to_memory()
        self.original.share_memory_()  # type: ignore[no-untyped-call]
        self.address = self.original.data_ptr()
        self.home = self._memory_home()
        hide(self)
        self.keeper.changed(self)

    def leave_in_place(self) -> None:
        """Show the user's own parameter at once, and no longer stream it."""
        self.to_memory()
        if self.bound is not None and self.is_bound_written and self._differs(self.bound):
            self.write_back(bytes_of(self.bound, self.span))
        shown = self.shown()
        for holder, key in self.slots:
            if any(holder.get(key) is tensor for tensor in shown):
                holder[key] = self.original
        self.show_deep(shown, self.original)
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

    def bind(self, bound: torch.Tensor) -> None:
        """Show a view of fast memory in every slot that still shows the stand-in."""
        self.bound, self.bound_version = bound, bound._version
        absent = self.absent
        for holder, key in self.slots:
            if holder.get(key) is absent:
                holder[key] = bound
        if self.deep:
            self.show_deep((absent,), bound)

    def unbind(self) -> bool:
        """Show the stand-in again; False if a slot shows something else by now."""
        bound, self.bound = self.bound, None
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

    def show_deep(self, instead_of: tuple[Any, ...], tensor: torch.Tensor) -> None:
        """Show ``tensor`` in the deep places that show one of some others."""
        for holder, name, key in self.deep:
            container = holder.get(name)
            try:
                if any(container[key] is other for other in instead_of):  # type: ignore[index]
                    container[key] = tensor  # type: ignore[index]
            except (LookupError, TypeError):  # the module put something else there
                continue
