"""A parameter that is not resident, and one that is: two stand-ins for the tensor in ``module._parameters``.

``Absent`` answers shape, dtype and device without touching memory.  Any operation that reads it gets the true value
(a *fault*, counted), any operation that writes it reaches the master.  ``Bound`` is a view of fast memory; what it
hands out beyond the forward pass (``.data``, ``.detach()``, copies) is the master's, for its own bytes will be
overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from fmstream.payloads.master import Master

_DisableTorchFunction = torch._C.DisableTorchFunctionSubclass


class Absent(torch.Tensor):
    """Stands for a parameter whose bytes are not in fast memory.

    Shape, stride and dtype are the master's, the device is the one that the module executes on.  It is an
    ``nn.Parameter`` to ``isinstance`` where ``is_param`` is set, and a detached tensor otherwise.
    """

    master: Master
    stands_for_parameter: bool
    """Whether it stands for the user's parameter object, whatever that holds, or for a tensor that it once held."""

    @staticmethod
    def __new__(cls, master: Master, is_param: bool) -> Absent:
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
        tensor.master = master
        tensor.stands_for_parameter = is_param
        if is_param:
            tensor._is_param = True
        return tensor

    def __init__(self, master: Master, is_param: bool) -> None:
        super().__init__()

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
            return func(*tree_map_only(Absent, lambda a: a.master.expose(), args), **kwargs)
        if func in _AUTOGRAD:
            args, kwargs = tree_map_only(Absent, lambda a: a.master.original, (args, kwargs))
            return func(*args, **kwargs)
        return _read(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DETACHES:
            return args[0].master.loose
        written = _written_arguments(func, args, kwargs)
        if not written:
            return _read(func, args, kwargs)
        masters = {id(a.master): a.master for a in written}
        for master in masters.values():
            master.prepare_write()
        plain = {id(a): a.master.memory() for a in written}

        def replace(a: Absent) -> torch.Tensor:
            return plain[id(a)] if id(a) in plain else a.master.fault()

        result = func(*tree_map_only(Absent, replace, args), **tree_map_only(Absent, replace, kwargs))
        for master in masters.values():
            master.written()
        back = {id(t): a for a in written for t in (plain[id(a)],)}
        return tree_map_only(torch.Tensor, lambda t: back.get(id(t), t), result)


class _OfMaster(torch.Tensor):
    """What bound tensors have in common: what they hand out beyond the pass comes from the master."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    master: Master

    @property
    def data(self) -> torch.Tensor:
        """The master's data, as a tensor that faults: writes reach the master and this copy."""
        return self.master.loose

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.master.replace(value)

    def detach(self) -> torch.Tensor:
        """The master's data, detached: a state dict taken during a pass stays true after it."""
        return self.master.loose

    def numpy(self, **kwargs: Any) -> Any:
        """The user's parameter as an array; it is left in place from now on, for writes to an array leave no trace."""
        self.master.leave_in_place()
        return self.master.original.numpy(**kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Change the user's parameter; what is shown follows at the next pass."""
        self.master.original.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.master.deepcopy(memo, is_param=True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.master.plain(is_param=True).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Bound(_OfMaster, nn.Parameter):
    """A parameter while its bytes are in fast memory and no graph is built."""


class InGraph(_OfMaster):
    """A parameter while its bytes are in fast memory and a graph is built: its gradient goes to the user's parameter.

    It shares the storage of fast memory without being a view of it, for autograd lets no view that a function returned
    be written.  ``version`` is its count of in-place writes as it was made.
    """

    version: int


class Bind(torch.autograd.Function):
    """Identity from the user's parameter to its bytes in fast memory, so that gradients reach it."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``make`` makes; ``original`` is the leaf of the graph."""
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Hand the gradient to the parameter."""
        return grads[0], None


def make_bound(master: Master, view: torch.Tensor) -> torch.Tensor:
    """The tensor to put into ``module._parameters`` for a view of fast memory."""
    requires_grad = master.original.requires_grad
    if requires_grad and torch.is_grad_enabled():

        def make() -> torch.Tensor:
            alias = torch.empty(0, dtype=view.dtype, device=view.device)
            alias.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
            return torch.Tensor._make_subclass(InGraph, alias)

        shown = Bind.apply(master.original, make)  # type: ignore[no-untyped-call]
        shown.master = master
        shown.version = shown._version
        shown._is_param = True
        return shown  # type: ignore[no-any-return]
    bound = torch.Tensor._make_subclass(Bound, view, requires_grad)
    bound.master = master
    return bound


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` may write an argument; the dispatcher then tells which one."""
    if kwargs.get("out") is not None:
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _INPLACE_DUNDERS
    return name.endswith("_") and not name.endswith("__")


def _read(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with true values; a result that is, or shares memory with, a parameter stays a faithful one."""
    loaded: dict[int, tuple[Absent, torch.Tensor]] = {}

    def load(absent: Absent) -> torch.Tensor:
        if id(absent) not in loaded:
            value = absent.master.fault()
            if absent.requires_grad and torch.is_grad_enabled():
                value = Bind.apply(absent.master.original, partial(_same, value))  # type: ignore[no-untyped-call]
            loaded[id(absent)] = (absent, value)
        return loaded[id(absent)][1]

    args_loaded, kwargs_loaded = tree_map_only(Absent, load, (args, kwargs))
    result = func(*args_loaded, **kwargs_loaded)
    outputs = [t for t in tree_leaves(result) if type(t) is torch.Tensor or isinstance(t, nn.Parameter)]
    if not outputs or not loaded:
        return result
    same = {id(value): absent for absent, value in loaded.values()}
    if any(id(t) in same for t in outputs):
        return tree_map_only(torch.Tensor, lambda t: same.get(id(t), t), result)
    storages = {_storage(t) for t in outputs}
    aliased = [(absent, value) for absent, value in loaded.values() if _storage(value) in storages]
    if not aliased or all(absent.master.keep_alias(value) for absent, value in aliased):
        return result
    exposed = {id(absent): absent.master.expose() for absent, _ in loaded.values()}
    again, again_kwargs = tree_map_only(Absent, lambda a: exposed[id(a)], (args, kwargs))
    return func(*again, **again_kwargs)


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


def _set_data(absent: Absent, value: torch.Tensor) -> None:
    absent.master.replace(value)


def _set_requires_grad(absent: Absent, value: bool) -> None:
    absent.master.original.requires_grad_(value)
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
_RAW = {
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.tolist,
}
_AUTOGRAD = {torch.Tensor.backward, torch.autograd.grad, torch.autograd.backward}
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _tensor_property("data", "__get__"): lambda absent: absent.master.loose,
    _tensor_property("data", "__set__"): _set_data,
    _tensor_property("grad", "__get__"): lambda absent: absent.master.original.grad,
    _tensor_property("grad", "__set__"): lambda absent, grad: setattr(absent.master.original, "grad", grad),
    _tensor_property("grad", "__delete__"): lambda absent: setattr(absent.master.original, "grad", None),
    _tensor_property("requires_grad", "__set__"): _set_requires_grad,
    _tensor_property("_backward_hooks", "__get__"): lambda absent: absent.master.original._backward_hooks,
    _tensor_property("_version", "__get__"): lambda absent: absent.master.version(),
    torch.Tensor.requires_grad_: _requires_grad_,
    torch.Tensor.register_hook: lambda absent, hook: absent.master.original.register_hook(hook),
    torch.Tensor.register_post_accumulate_grad_hook: lambda absent, hook: (
        absent.master.original.register_post_accumulate_grad_hook(hook)
    ),
    torch.Tensor.detach: lambda absent: absent.master.loose,
    torch.Tensor.share_memory_: _share_memory,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.__reduce_ex__: _reduce_ex,
}
_DETACHES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}
_INPLACE_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
_INPLACE_DUNDERS = {"__setitem__", *(f"__i{name}__" for name in _INPLACE_OPERATORS.split())}
