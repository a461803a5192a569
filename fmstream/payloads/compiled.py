"""Modules under ``torch.compile``: which are compiled, and what the compiler may look into.

The compiler traces a module together with everything that it calls, and takes no notice of a `Seam` on the way.  So a
compiled module is one unit, whose weights are all shown at its entry, and nothing that streams may be traced from
outside: calls of streamed modules and stand-ins end what is being traced.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch._C._dynamo.eval_frame as eval_frame
from torch import nn

from fmstream.errors import ConfigError
from fmstream.payloads import views
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bind, Bound, InGraph
from fmstream.payloads.master import Master
from fmstream.payloads.placement import OnDevice

if TYPE_CHECKING:
    from fmstream.payloads.sites import Site

REMEDY = (
    "compile its repeated blocks instead: model.compile_repeated_blocks() in diffusers, or block.compile() for each "
    "block; each is then streamed as one unit"
)
_IN_GRAPH = f"fmstream streams this module, whose weights come and go between graphs; {REMEDY}"
Call = Callable[..., Any]
F = TypeVar("F", bound=Call)


def untraced(function: F) -> F:
    """Keep the compiler out of a function and of all that it calls, but for what is compiled on its own.

    Does what ``torch.compiler.disable`` does, without a wrapper around every call and without importing the compiler.
    Where that breaks the promise of ``fullgraph=True``, the compiler's error gives the remedy.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function.__dict__.update(
        _torchdynamo_disable=True, _torchdynamo_disable_recursive=True, _torchdynamo_disable_msg=_IN_GRAPH
    )
    return function


untraced(Absent.__torch_function__.__func__)  # type: ignore[attr-defined]
for _method in (*views.METHODS.values(), *views.PROPERTIES.values()):
    untraced(_method)


def begin(module: nn.Module) -> None:
    """Called before a pass: tell the compiler, if it is there, what it cannot trace.

    Raises:
        ConfigError: the pass is part of a call that was compiled with ``fullgraph=True``, and has no graph so far.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None and Bound not in config.nontraceable_tensor_subclasses:
        config.nontraceable_tensor_subclasses |= {Absent, Bound, InGraph, views.View}
    exchange = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)
    if exchange is None:  # the compiler does not count graphs before PyTorch 2.13
        return
    count = exchange(-1)
    exchange(count)
    if count == 0:
        raise ConfigError(
            f"{type(module).__name__} streams, so it cannot be one graph, but it was compiled with fullgraph=True: "
            f"{REMEDY}, or leave fullgraph=True out, and it runs without the compiler"
        )


def refuse_recording(module: nn.Module) -> None:
    """Called before a pass of a module whose weights come and go.

    Raises:
        ConfigError: ``torch.export`` or ``torch.jit.trace`` is recording the call: the program would look into memory
            that holds other weights by then.
    """
    if torch.compiler.is_exporting() or torch._C._is_tracing():
        raise ConfigError(
            f"{type(module).__name__} streams, so no program of it can be recorded by torch.export or torch.jit.trace: "
            "close the handle first"
        )


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled: with its own ``compile()``, or by ``torch.compile`` of it or its ``forward``."""
    call = module.__dict__.get("_compiled_call_impl")
    return _is_compiled(getattr(call, "plain", call)) or _is_compiled(getattr(module, "forward", None))


def _is_compiled(function: Any) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable") and not hasattr(function, "_torchdynamo_disable")


def calls(site: Site, plain: Call, masters: Sequence[Master]) -> tuple[Call, Call]:
    """What a streamed module calls where all its weights are there, and where they come and go."""
    if site.is_unit:
        shown = PlainlyShown(plain, masters, site.params, site.module)
        return shown, shown
    if not site.is_whole:
        return plain, plain
    followed = _without_compiler(site.module)
    if _is_wrapper(site.module):
        return followed, followed  # what it wraps has a seam, of which no graph can be made
    return PlainlyShown(plain, masters, site.members, site.module), followed


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` made of another module."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def _without_compiler(module: nn.Module) -> Call:
    """How to call a module that was compiled, without compiling it."""
    if _is_wrapper(module):
        # The wrapper's own hooks are called by it alone; it then compiles the call of a seam, which gives no graph.
        hooked = module._forward_hooks or module._forward_pre_hooks
        return module._call_impl if hooked else cast(nn.Module, module._modules["_orig_mod"])
    forward: Any = module.forward
    if not _is_compiled(forward):
        return module._call_impl
    plain = forward._torchdynamo_orig_callable
    if inspect.ismethod(forward):
        plain = types.MethodType(plain, module)

    def call(*args: Any, **kwargs: Any) -> Any:
        attributes = module.__dict__
        before = attributes.get("forward")
        attributes["forward"] = plain
        try:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            if before is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = before

    return call


class PlainlyShown:
    """Calls a compiled module with plain tensors in place of those that it shows otherwise.

    The compiler's runtime takes parameters of exactly the type ``nn.Parameter``, and buffers of that of tensors.
    Tensors are made anew for each call: kept ones would look like somebody who holds the fast memory.
    """

    __slots__ = ("_buffers", "_call", "_masters", "_params")

    def __init__(self, call: Call, masters: Sequence[Master], params: Sequence[int], module: nn.Module) -> None:
        self._call = call
        self._masters = masters
        self._params = params
        self._buffers = [each._buffers for each in module.modules() if each._buffers]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        swapped: list[_Swap] = []
        buffers: list[_BufferSwap] = []
        try:
            for holder in self._buffers:
                _show_plain_buffers(holder, buffers)
            for param in self._params:
                master = self._masters[param]
                shown = master.bound
                if isinstance(shown, Bound | InGraph):
                    plain = _plain(master, shown)
                    swapped.append((master, shown, plain, plain._version))
                    _show(master, shown, plain)
            return self._call(*args, **kwargs)
        finally:
            try:
                _put_back(swapped)
                _put_buffers_back(buffers)
            except KeyboardInterrupt:  # no plain tensor may be left behind, for nobody would know it for one of ours
                _put_back(swapped)
                _put_buffers_back(buffers)
                raise


_BufferSwap = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]
"""Where a buffer is, what was shown, and what is shown instead."""
_Swap = tuple[Master, torch.Tensor, torch.Tensor, int]
"""What was shown, what is shown instead, and the version that it had at first."""


def _plain(master: Master, shown: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor of no class of ours; a graph goes on through what is shown."""
    if not (shown.requires_grad and torch.is_grad_enabled()):
        return torch.Tensor._make_subclass(
            nn.Parameter if master.is_param else torch.Tensor, shown, shown.requires_grad
        )

    def make() -> torch.Tensor:
        alias = torch.empty(0, dtype=shown.dtype, device=shown.device)
        return alias.set_(shown.untyped_storage(), shown.storage_offset(), shown.size(), shown.stride())

    return Bind.apply(shown, make)  # type: ignore[no-any-return, no-untyped-call]


def _show_plain_buffers(holder: dict[str, Any], swapped: list[_BufferSwap]) -> None:
    for key, shown in holder.items():
        if type(shown) is OnDevice:
            swapped.append((holder, key, shown, torch.Tensor._make_subclass(torch.Tensor, shown)))
            holder[key] = swapped[-1][-1]


def _put_buffers_back(swapped: list[_BufferSwap]) -> None:
    while swapped:
        holder, key, shown, plain = swapped[-1]
        if holder.get(key) is plain:
            holder[key] = shown
        swapped.pop()


def _put_back(swapped: list[_Swap]) -> None:
    while swapped:
        master, shown, plain, version = swapped[-1]
        _show(master, plain, shown)
        if plain._version != version and plain._version != shown._version:
            torch.autograd.graph.increment_version(shown)  # it has a count of its own
        swapped.pop()


def _show(master: Master, old: torch.Tensor, new: torch.Tensor) -> None:
    for holder, key in master.slots:
        if holder.get(key) is old:
            holder[key] = new
    if master.deep:
        master.show_deep((old,), new)
