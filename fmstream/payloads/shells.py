"""Wrappers on another device than the host: a shell of the same class stands for each while it streams.

A wrapper has one device for good, so the user's own cannot show tensors of another one.  A `Shell` shows a wrapper that
the same class made around stand-ins on the device; these are exchanged as those in any module are.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bound, InGraph
from fmstream.payloads.kinds import Part, is_wrapper, parts_of, rebuilt

if TYPE_CHECKING:
    from fmstream.payloads.keeper import Keeper

_OURS = ("__deepcopy__", "__reduce_ex__", "detach", "shell")
"""What is put into a shell's own dict: ``copy``, ``pickle`` and ``state_dict`` find it before that of its class."""


def is_host(device: torch.device | None) -> bool:
    """Whether streamed modules execute where the masters lie."""
    return device is None or device.type == "cpu"


class _Hollow(torch.Tensor):
    """Says what a tensor on the device will be, before there is a stand-in for it.

    A class that computes with it when it makes a wrapper gets no shell (`_make`).
    """

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device) -> _Hollow:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
        )

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} has no values here")


class Shell:
    """What modules show in place of one of the user's wrappers, while its tensors come and go on a device.

    Attributes:
        wrapper: the user's own, which keeps its tensors.
        tensor: what is shown.
        outer: the shell that this one is in, where the user's wrapper is in another one.
        inside: the shells of wrappers within this one, by name.
    """

    def __init__(self, wrapper: torch.Tensor, tensor: torch.Tensor, outer: Shell | None = None) -> None:
        self.wrapper = wrapper
        self.tensor = tensor
        self.outer = outer
        self._names = _names(wrapper)
        self.inside = {
            name: Shell(wrapper.__dict__[name], tensor.__dict__[name], self)
            for name in self._names
            if is_wrapper(wrapper.__dict__[name])
        }
        self._shown: dict[str, Any] = {}

    def every(self) -> Iterator[Shell]:
        """This one, and those inside."""
        yield self
        for shell in self.inside.values():
            yield from shell.every()

    @property
    def keeps_more(self) -> bool:
        """Whether the class put a tensor that it was given in another place too, where none would be exchanged."""
        inside = self.tensor.__dict__  # its reference, and the call's
        return any(sys.getrefcount(inside[name]) > 2 for name in self._names if name not in self.inside)

    @property
    def is_held(self) -> bool:
        """Whether somebody else holds the user's wrapper, and so may write what is in it past the stand-ins."""
        if self.outer is None:
            return sys.getrefcount(self.wrapper) > 2  # this object's, and the call's
        return sys.getrefcount(self.wrapper) > 3 or self.outer.is_held

    def install(self) -> None:
        """Make it ready to be shown; the stand-ins are in it already."""
        for shell in self.every():
            shell._shown = {name: shell.tensor.__dict__[name] for name in shell._names}
        self.tensor.__dict__["shell"] = self
        _make_portable(self.tensor, self.tensor)

    @property
    def is_changed(self) -> bool:
        """Whether the user put something else into it, or wants its gradient."""
        present = self.tensor.__dict__
        return (
            self.tensor.requires_grad
            or any(present.get(name) is not tensor for name, tensor in self._shown.items())
            or any(shell.is_changed for shell in self.inside.values())
        )

    def give_back(self) -> None:
        """Bring to the user's wrapper what was put into the shell instead; its masters show their own tensors again."""
        if not self._shown:
            return  # it was not shown
        present, own = self.tensor.__dict__, self.wrapper.__dict__
        for name in self._names:
            shell, tensor = self.inside.get(name), present.get(name)
            if shell is not None and tensor is shell.tensor:
                shell.give_back()
                present[name] = shell.wrapper
            elif isinstance(tensor, torch.Tensor) and tensor is not own[name]:
                own[name] = _on_host(tensor)
        if self.tensor.requires_grad:
            self.wrapper.requires_grad_()
            if self.tensor.grad is not None:
                self.wrapper.grad = self.tensor.grad.to(self.wrapper.device)
        _strip(self.tensor)


class Wrappers:
    """How the wrappers in some modules are taken apart.

    On the host the tensors in a wrapper are exchanged where they are.  On another device a shell is made for it; it is
    left whole if that cannot be done, or if it needs a gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._shells: dict[int, Shell | None] = {}
        self._at: dict[int, Shell] = {}

    def parts(self, holder: dict[str, Any], key: str, name: str) -> list[Part]:
        """The parameter that ``holder`` has, or the plain tensors in it, each with where it is exchanged."""
        shown = _user_wrapper(holder[key])
        whole = [Part(holder, key, name, shown)]
        if not is_wrapper(shown) or shown.device.type != "cpu":
            return whole
        try:
            parts = list(parts_of(shown, name))
        except AttributeError:
            return whole
        if is_host(self.device):
            return parts
        shell = self._shell(shown)
        if shell is None:
            return whole
        shells = parts_of(shell.tensor)
        return [own._replace(holder=other.holder) for own, other in zip(parts, shells, strict=True)]

    def _shell(self, wrapper: torch.Tensor) -> Shell | None:
        if id(wrapper) not in self._shells:
            self._shells[id(wrapper)] = shell = None if wrapper.requires_grad else _make(wrapper, self.device)
            for each in shell.every() if shell is not None else ():
                self._at[id(each.tensor.__dict__)] = each
        return self._shells[id(wrapper)]

    def shell_at(self, holder: dict[str, Any]) -> Shell | None:
        """The shell whose dict this is."""
        return self._at.get(id(holder))

    def leave_whole(self, shell: Shell) -> None:
        """Make no use of a shell."""
        while shell.outer is not None:
            shell = shell.outer
        self._shells[id(shell.wrapper)] = None
        for each in shell.every():
            self._at.pop(id(each.tensor.__dict__), None)

    def shells(self) -> list[Shell]:
        """Those that are to be shown."""
        return [shell for shell in self._shells.values() if shell is not None]


def _make(wrapper: torch.Tensor, device: torch.device) -> Shell | None:
    """A shell, None where the wrapper's class does more than to hold the tensors that it is given."""
    try:
        shell = Shell(wrapper, rebuilt(wrapper, partial(_Hollow, device=device)))
    except (AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    return None if any(each.keeps_more for each in shell.every()) else shell


def _names(wrapper: Any) -> list[str]:
    return list(wrapper.__tensor_flatten__()[0])


def _user_wrapper(shown: torch.Tensor) -> torch.Tensor:
    """The user's wrapper for a shell, else what is shown."""
    shell = shown.__dict__.get("shell")
    return shell.wrapper if type(shell) is Shell else shown


def show(shells: Iterable[Shell], roots: Iterable[nn.Module]) -> None:
    """Put shells into modules, in the place of the user's wrappers."""
    tensors = {}
    for shell in shells:
        shell.install()
        tensors[id(shell.wrapper)] = shell.tensor
    for holder in _parameters(roots) if tensors else ():
        for key, value in holder.items():
            if id(value) in tensors:
                holder[key] = tensors[id(value)]


def put_back(shells: Iterable[Shell], roots: Iterable[nn.Module], keeper: Keeper) -> None:
    """Put the user's wrappers in the place of shells, and host memory in that of what was detached from one."""
    wrappers = {}
    for shell in shells:
        shell.give_back()
        wrappers[id(shell.tensor)] = shell.wrapper
    for holder in _parameters(roots):
        for key, value in holder.items():
            if id(value) in wrappers:
                holder[key] = wrappers[id(value)]
            elif value is not None and "__reduce_ex__" in value.__dict__ and _stands_for(value, keeper):
                holder[key] = _strip(rebuilt(value, _on_host))


def _parameters(roots: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    return (module._parameters for root in roots for module in root.modules())


def _stands_for(wrapper: Any, keeper: Keeper) -> bool:
    """Whether a tensor with a `Shell`'s ways has a stand-in of this keeper's in it."""
    inside = (wrapper.__dict__.get(name) for name in _names(wrapper))
    return any(isinstance(part, Absent) and part.master.keeper is keeper for part in inside)


# What a shell does for itself.  Its class stays what it is, for packages ask for that.


def _make_portable(tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Let copies and pickles be wrappers of host memory, and what is detached stand for the master.

    ``like`` has the same tensors in it.  Where it is another one, ``tensor`` does not refer to itself.
    """
    tensor.__dict__.update(
        __deepcopy__=partial(_deepcopy, like), __reduce_ex__=partial(_reduce_ex, like), detach=partial(_detach, like)
    )


def _deepcopy(like: Any, memo: dict[int, Any]) -> Any:
    copied = _strip(rebuilt(like, lambda part: copy.deepcopy(part, memo)))
    names = _names(like)
    for key, value in copied.__dict__.items():
        if key not in names:
            copied.__dict__[key] = copy.deepcopy(value, memo)
    return copied


def _reduce_ex(like: Any, protocol: Any) -> Any:
    return _strip(rebuilt(like, _on_host)).__reduce_ex__(protocol)


def _detach(like: Any) -> Any:
    inside = _strip(rebuilt(like, lambda part: part.detach()))
    inside.__dict__.pop("_is_param", None)
    detached = rebuilt(inside, lambda part: part)
    _make_portable(detached, inside)
    return detached


def _strip(tensor: Any) -> Any:
    for key in _OURS:
        tensor.__dict__.pop(key, None)
    return tensor


def _on_host(part: torch.Tensor) -> torch.Tensor:
    """A tensor of host memory for one that is in a shell: the master's own where it stands for one."""
    if isinstance(part, Absent | Bound | InGraph):
        return part.master.memory()
    return rebuilt(part, _on_host) if is_wrapper(part) else part.detach().to("cpu")
