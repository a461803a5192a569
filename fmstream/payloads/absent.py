"""A parameter that is not in fast memory: the stand-in for the tensor in ``module._parameters``.

``Absent`` answers shape, dtype and device without touching memory.  Any operation that reads it gets the true value
(a *fault*, counted), any operation that writes it reaches the master.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fmstream.payloads import saved, transforms
from fmstream.payloads.bound import Bind, Bound, InGraph, hide, show_in_graph
from fmstream.payloads.kinds import dress, is_dressed, joined
from fmstream.payloads.views import follow, outline

if TYPE_CHECKING:
    from fmstream.payloads.keeper import Keeper
    from fmstream.payloads.master import Master

_DisableTorchFunction = torch._C.DisableTorchFunctionSubclass


class Absent(torch.Tensor):
    """Stands for a parameter whose bytes are not in fast memory.

    Shape, stride and dtype are the master's, the device is the one that the module executes on.  It is an
    ``nn.Parameter`` to ``isinstance`` where ``is_param`` is set, and a detached tensor otherwise.
    """

    stands_for_parameter: bool
    """Whether it stands for the user's parameter object, whatever that holds, or for a tensor that it once held."""

    @staticmethod
    def __new__(cls, master: Master, is_param: bool) -> Absent:
        if cls is Absent and is_dressed(master.original):
            cls = joined(Absent, type(master.original))
        return cls._make(master, is_param)

    @classmethod
    def _make(cls, master: Master, is_param: bool) -> Absent:
        # Never an inference tensor: it may be the leaf of a graph later.
        with torch.inference_mode(False):
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                master.size,
                strides=master.stride,
                dtype=master.dtype,
                device=master.device,
                requires_grad=is_param and master.original.requires_grad,
            )
        if cls is not Absent:
            tensor.__dict__.update(master.original.__dict__)
        tensor.master = master
        tensor.stands_for_parameter = is_param
        if is_param and isinstance(master.original, nn.Parameter):
            tensor._is_param = True
        return tensor

    def __init__(self, master: Master, is_param: bool) -> None:
        torch.Tensor.__init__(self)

    @property
    def master(self) -> Master:
        """The master of what it stands for, should the user's own parameter object hold other data by now."""
        known: Master = self.__dict__["master"]
        present = known.present()
        if not self.stands_for_parameter:
            return known  # which goes on with what it was, if it has just been succeeded
        if present is not known:
            self.__dict__["master"] = present
        return present

    @master.setter
    def master(self, master: Master) -> None:
        self.__dict__["master"] = master

    # Also where it is of another class as well, which has its own.
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return _deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce_ex(self, protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in _AS_IS or _writes(func, kwargs):
            with _DisableTorchFunction():
                return func(*args, **kwargs)
        if func in _RAW:
            how = {"as_array": func in _ARRAYS, "as_storage": func in _STORAGES}
            return func(*tree_map_only(Absent, lambda a: a.master.expose(**how), args), **kwargs)
        if func in _AUTOGRAD:
            args, kwargs = tree_map_only(Absent, _leaf, (args, kwargs))
            is_own = any(isinstance(leaf, Absent) for leaf in tree_leaves((args, kwargs)))
            with _DisableTorchFunction() if is_own else nullcontext():
                return func(*args, **kwargs)
        return _read(func, args, kwargs, dressed=True)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DETACHES:
            return Absent._make(args[0].master, False)  # below its class there are only bytes
        written = _written_arguments(func, args, kwargs)
        if not written:
            return _read(func, args, kwargs)
        masters = {id(a.master): a.master for a in written}
        for master in masters.values():
            master.prepare_write()
        values = {key: master.writable() for key, master in masters.items()}
        plain = {id(a): values[id(a.master)] for a in written}
        outlines = {key: outline(value) for key, value in values.items()}

        def replace(a: Absent) -> torch.Tensor:
            return plain[id(a)] if id(a) in plain else a.master.fault()

        result = func(*tree_map_only(Absent, replace, args), **tree_map_only(Absent, replace, kwargs))
        back = {id(t): a for a in written for t in (plain[id(a)],)}
        for key, master in masters.items():
            if outline(values[key]) == outlines[key]:
                master.take(values[key])
            else:
                back[id(values[key])] = _reshaped(func, master, values[key], written)
        return tree_map_only(torch.Tensor, lambda t: back.get(id(t), t), result)


def _reshaped(func: Any, master: Master, value: torch.Tensor, written: list[Absent]) -> Absent:
    """An operation let what stood for a parameter have another shape, or other memory: so does the parameter."""
    if any(a.master is master and not a.stands_for_parameter for a in written):
        raise RuntimeError(
            f"{func} would change the shape or the memory of a detached tensor of {master.name}, which is streamed: "
            f"clone the tensor first, or change the parameter itself"
        )
    return master.replace(value)


def restore(holder: dict[str, Any], keeper: Keeper) -> None:
    """Replace stand-ins that the user moved to other places by what they stand for."""
    for key, value in holder.items():
        master = getattr(value, "master", None) if isinstance(value, Absent | Bound | InGraph) else None
        if master is None or master.keeper is not keeper:
            continue
        if not isinstance(value, Absent) or value.stands_for_parameter:
            holder[key] = master.original
        else:
            plain = master.memory()
            holder[key] = nn.Parameter(plain, value.requires_grad) if isinstance(value, nn.Parameter) else plain


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` may write an argument; the dispatcher then tells which one."""
    if kwargs.get("out") is not None:
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _INPLACE_DUNDERS
    return name.endswith("_") and not name.endswith("__")


def _read(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], *, dressed: bool = False) -> Any:
    """Call ``func`` with true values; a result that is, or shares memory with, a parameter stays a faithful one."""
    absents = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Absent)}
    with transforms.outside():
        values = {key: absent.master.fault() for key, absent in absents.items()}
    result, shown = _call_with(func, args, kwargs, absents, values, dressed)
    outputs = [t for t in tree_leaves(result) if type(t) is torch.Tensor or isinstance(t, nn.Parameter)]
    if not outputs or not absents:
        return result
    same = {id(tensor): absents[key] for key, tensor in shown.items()}
    if any(id(t) in same for t in outputs):
        return tree_map_only(torch.Tensor, lambda t: same.get(id(t), t), result)
    storages = {_storage(t) for t in outputs}
    aliased = [key for key, value in values.items() if _storage(value) in storages]
    if not aliased:
        return result
    if all(absents[key].master.keep_alias(values[key], shown[key]) for key in aliased):
        first = absents[aliased[0]].master
        return follow(first, values[aliased[0]].data_ptr(), result) if first.keeper.is_in_pass else result
    with transforms.outside():
        exposed = {key: absent.master.expose() for key, absent in absents.items()}
    return _call_with(func, args, kwargs, absents, exposed, dressed)[0]


def _call_with(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    absents: dict[int, Absent],
    values: dict[int, torch.Tensor],
    dressed: bool,
) -> tuple[Any, dict[int, torch.Tensor]]:
    """Call ``func`` with values in place of stand-ins; returns its result, and what it was given for each."""
    shown = dict(values)
    try:
        with transforms.outside():
            for key, absent in absents.items():
                in_graph = absent.requires_grad and torch.is_grad_enabled()
                if in_graph and not absent.stands_for_parameter:
                    shown[key] = Bind.apply(absent, partial(_same, values[key]))  # type: ignore[no-untyped-call]
                elif dressed and type(absent) is not Absent:
                    shown[key] = value = dress(values[key], absent.master.original)
                    if in_graph:
                        shown[key] = Bind.apply(absent.master.original, partial(_same, value))  # type: ignore[no-untyped-call]
                elif in_graph:
                    shown[key] = show_in_graph(absent.master, values[key])
        with saved.faults([(absents[key].master, value) for key, value in values.items()]):
            given = tree_map_only(Absent, lambda a: shown[id(a)], (args, kwargs))
            return func(*given[0], **given[1]), shown
    finally:
        with transforms.outside():
            for absent in absents.values():
                hide(absent.master)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)


def _written_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Absent]:
    written: list[Absent] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Absent)]
    return written


def _embedding(ids: torch.Tensor, weight: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """Rows of a table; where it is not streamed as a whole, only these are brought."""
    if isinstance(weight, Absent) and not isinstance(ids, Absent) and weight.master.look_up is not None:
        found = weight.master.look_up(weight.master, ids)
        if found is not None:
            return found
    return _read(torch.nn.functional.embedding, (ids, weight, *rest), named, dressed=True)


def _set_data(absent: Absent, value: torch.Tensor) -> None:
    absent.master.replace(value)


def _leaf(absent: Absent) -> torch.Tensor:
    """What has the gradient: the user's parameter, or a detached tensor itself."""
    return absent.master.original if absent.stands_for_parameter else absent


def _on_leaf(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method or property that is the leaf's own affair."""

    def call(absent: Absent, *args: Any, **kwargs: Any) -> Any:
        leaf = _leaf(absent)
        with _DisableTorchFunction():
            return method(leaf, *args, **kwargs)

    return call


def _set_requires_grad(absent: Absent, value: bool) -> None:
    leaf = _leaf(absent)
    with _DisableTorchFunction():
        leaf.requires_grad_(value)
    absent.master.follow_requires_grad()


def _requires_grad_(absent: Absent, value: bool = True) -> Absent:
    _set_requires_grad(absent, value)
    return absent


def _share_memory(absent: Absent) -> Absent:
    absent.master.share_memory()
    return absent


def _reduce_ex(absent: Absent, protocol: Any) -> Any:
    plain = absent.master.plain(is_param=getattr(absent, "_is_param", False))
    return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _deepcopy(absent: Absent, memo: dict[int, Any]) -> torch.Tensor:
    return absent.master.deepcopy(memo, is_param=getattr(absent, "_is_param", False))


def _tensor_property(name: str, kind: str) -> Any:
    return getattr(getattr(torch.Tensor, name), kind)


_METADATA = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn names itemsize nbytes output_nr retains_grad "
    "is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_mkldnn is_nested is_mps is_xpu is_ipu is_maia "
    "is_mtia is_vulkan is_xla"
)
_AS_IS = {
    *(_tensor_property(name, "__get__") for name in _METADATA.split() if hasattr(torch.Tensor, name)),
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.ndimension,
    torch.Tensor.element_size,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_signed,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
    torch.Tensor.is_inference,
    torch.Tensor.get_device,
    torch.Tensor.storage_offset,
    torch.Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_inference,
    torch.is_same_size,
    torch.numel,
    torch.result_type,
}
_ARRAYS = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
_STORAGES = {torch.Tensor.untyped_storage, torch.Tensor.storage}
_RAW = {torch.Tensor.data_ptr, torch.Tensor.tolist, *_ARRAYS, *_STORAGES}
_AUTOGRAD = {torch.Tensor.backward, torch.autograd.grad, torch.autograd.backward}
_ACCESS = ("__get__", "__set__", "__delete__")
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _tensor_property("data", "__get__"): lambda absent: absent.master.loose,
    _tensor_property("data", "__set__"): _set_data,
    **{_tensor_property("grad", kind): _on_leaf(_tensor_property("grad", kind)) for kind in _ACCESS},
    _tensor_property("requires_grad", "__set__"): _set_requires_grad,
    _tensor_property("_backward_hooks", "__get__"): _on_leaf(_tensor_property("_backward_hooks", "__get__")),
    _tensor_property("_version", "__get__"): lambda absent: absent.master.version(),
    torch.Tensor.requires_grad_: _requires_grad_,
    torch.Tensor.register_hook: _on_leaf(torch.Tensor.register_hook),
    torch.Tensor.register_post_accumulate_grad_hook: _on_leaf(torch.Tensor.register_post_accumulate_grad_hook),
    torch.Tensor.detach: lambda absent: absent.master.loose,
    torch.Tensor.share_memory_: _share_memory,
    torch.nn.functional.embedding: _embedding,
}
_DETACHES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}
_INPLACE_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
_INPLACE_DUNDERS = {"__setitem__", *(f"__i{name}__" for name in _INPLACE_OPERATORS.split())}
