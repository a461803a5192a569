"""Parameters of other classes: wrappers around plain tensors, and subclasses over their own bytes.

A wrapper (torchao's quantised weights) holds plain tensors and says which, with ``__tensor_flatten__``: each is
streamed on its own, in the wrapper, or in the `Shell` that stands for it on another device.  A subclass (diffusers'
GGUF weights) has bytes of its own and a class and attributes that tell what they mean: what stands for it, or shows it,
is *dressed* as the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

T = TypeVar("T", bound=torch.Tensor)


class Part(NamedTuple):
    """A plain tensor in a wrapper: the dict that holds it, its key there, and its name below the wrapper's."""

    holder: dict[str, Any]
    key: str
    name: str
    tensor: torch.Tensor


def is_wrapper(param: torch.Tensor) -> bool:
    """Whether a parameter has no bytes of its own, but tensors that have."""
    return is_traceable_wrapper_subclass(param)


def parts_of(wrapper: Any, name: str = "") -> Iterator[Part]:
    """The plain tensors in a wrapper, and in wrappers within it.

    Raises:
        AttributeError: one does not lie where it could be exchanged.
    """
    names, _ = wrapper.__tensor_flatten__()
    for key in names:
        holder = wrapper.__dict__
        if key not in holder:
            raise AttributeError(key)
        inner, full = holder[key], f"{name}.{key}" if name else key
        if is_traceable_wrapper_subclass(inner):
            yield from parts_of(inner, full)
        else:
            yield Part(holder, key, full, inner)


def tensors_in(wrapper: Any) -> list[Any]:
    """The tensors that a wrapper holds, wherever it does."""
    return [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]


def num_bytes(param: torch.Tensor) -> int:
    """Bytes that a parameter takes: of the tensors in it where it is a wrapper."""
    if is_wrapper(param):
        return sum(map(num_bytes, tensors_in(param)))
    return 0 if nn.parameter.is_lazy(param) else param.numel() * param.element_size()


def rebuilt(wrapper: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A wrapper like another one, around what ``make`` makes of each plain tensor in that.

    Its class makes it, so that it has the device of its tensors; attributes that this leaves out are taken over.

    Raises:
        AttributeError: it does not hold the tensors that it was made of.
    """
    names, context = wrapper.__tensor_flatten__()
    inside = {name: wrapper.__dict__.get(name, wrapper) for name in names}
    made_of = {name: rebuilt(part, make) if is_wrapper(part) else make(part) for name, part in inside.items()}
    made = type(wrapper).__tensor_unflatten__(made_of, context, wrapper.size(), wrapper.stride())
    for name, part in made_of.items():
        if made.__dict__.get(name) is not part:
            raise AttributeError(name)
    for key, value in wrapper.__dict__.items():
        made.__dict__.setdefault(key, value)
    return made


def is_dressed(param: torch.Tensor) -> bool:
    """Whether a parameter is of a subclass of ``nn.Parameter`` over bytes of its own."""
    kind = type(param)
    return (
        issubclass(kind, nn.Parameter)
        and kind is not nn.Parameter
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not is_traceable_wrapper_subclass(param)
        and not nn.parameter.is_lazy(param)
    )


def moves_as_bytes(dressed: torch.Tensor) -> bool:
    """Whether a dressed parameter is the same on another device: it has no way of its own to go there."""
    holds_tensors = any(isinstance(value, torch.Tensor) for value in dressed.__dict__.values())
    return type(dressed).to is torch.Tensor.to and not holds_tensors


def dress(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same bytes with the class and the attributes of a dressed parameter; any other gives back ``tensor``."""
    if not is_dressed(like):
        return tensor
    dressed = torch.Tensor._make_subclass(type(like), tensor, False)
    dressed.__dict__.update(like.__dict__)
    return dressed


@functools.cache
def joined(base: type[T], kind: type[torch.Tensor]) -> type[T]:
    """A subclass of ``base`` whose instances are of ``kind`` as well."""
    return type(f"{base.__name__}{kind.__name__}", (base, kind), {"__doc__": base.__doc__})
