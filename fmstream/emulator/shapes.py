"""What an operator does, read off its schema, and what it will give, computed by its meta kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from fmstream.emulator.dry import is_dry
from fmstream.emulator.tensors import NAME

MAX_FORECASTS: Final = 100_000
"""Forecasts kept; a program that passes this many different arguments starts anew."""

aten = torch.ops.aten
FILLING: Final = frozenset({aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.random_, aten.exponential_})
INDEXING: Final = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index})

Operator = torch._ops.OpOverload
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """What the fallback must know of an operator.

    Attributes:
        name: with namespace and overload.
        tensors: positions whose numbers PyTorch does not make tensors of by itself.
        writes: of each positional argument, whether it is written.
        writes_by_name: the same by name.
        written: indices of the written arguments.
        makes: whether it gives tensors beside those that it writes.
        is_view: whether it gives another view of its argument and touches no data.
        is_random: whether it draws random numbers; ``takes_generator`` whether from an argument.
        overwrites: whether what it writes does not depend on what was there.
        indices: position of the argument whose tensors may lie on the CPU, as for CUDA's kernel; -1 for none.
        flops: counts its floating-point operations, None for those that are bound by memory.
        is_attention: whether they run at the rate of attention.
    """

    name: str
    tensors: tuple[int, ...]
    writes: tuple[bool, ...]
    names: tuple[str, ...]
    writes_by_name: Mapping[str, bool]
    written: tuple[int, ...]
    num_returns: int
    makes: bool
    is_view: bool
    is_random: bool
    takes_generator: bool
    overwrites: bool
    indices: int
    flops: Callable[..., int] | None
    is_attention: bool


@cache
def schema_of(op: Operator) -> Schema:
    """Read an operator's schema, once."""
    arguments, returns = op._schema.arguments, op._schema.returns
    name = str(op._name)
    writes = tuple(bool(a.alias_info and a.alias_info.is_write) for a in arguments)
    names = tuple(a.name for a in arguments)
    numbers_pass = torch._C._should_allow_numbers_as_tensors(op._schema.name.removeprefix("aten::"))
    return Schema(
        name=name,
        tensors=() if numbers_pass else tuple(i for i, a in enumerate(arguments) if str(a.type) == "Tensor"),
        writes=writes,
        names=names,
        writes_by_name=dict(zip(names, writes, strict=True)),
        written=tuple(i for i, write in enumerate(writes) if write),
        num_returns=len(returns),
        makes=any(r.alias_info is None for r in returns),
        is_view=any(r.alias_info and not r.alias_info.is_write for r in returns),
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        takes_generator="generator" in names,
        overwrites=any(a.kwarg_only and write for a, write in zip(arguments, writes, strict=True))
        or op._overloadpacket in FILLING,
        indices=1 if op._overloadpacket in INDEXING else -1,
        flops=flop_registry.get(op._overloadpacket),
        is_attention="attention" in name,
    )


def with_tensors(schema: Schema, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with tensors for numbers: PyTorch hands over a tensor that was a Python number as that number.

    It gets the dtype of the first tensor where that is of the same kind or a higher one, so that it stays the weaker.
    """
    places = [i for i in schema.tensors if i < len(args) and isinstance(args[i], (bool, int, float, complex))]
    if not places:
        return args
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    changed = list(args)
    for place in places:
        number = torch.tensor(args[place], device="cpu")
        if first is not None and torch.result_type(first, args[place]) == first.dtype:
            number = number.to(first.dtype)
        changed[place] = number
    return tuple(changed)


@dataclass(frozen=True, slots=True)
class Shape:
    """Size, stride and dtype of a tensor that an operator gives."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


Given = Shape | None | tuple[Any, ...]
"""One thing that an operator gives: a tensor, nothing, or a list of these."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a call gives: ``given`` one entry for each return value, and the work of it."""

    given: tuple[Given, ...]
    is_tuple: bool
    flops: int


_forecasts: dict[Key, Forecast | None] = {}


def forecast(op: Operator, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Forecast | None:
    """What a call of these arguments gives, None where only running it can tell."""
    try:
        named = ((name, _key(value)) for name, value in kwargs.items())
        key = (op, torch.get_default_dtype(), *map(_key, args), *named)
        return _forecasts[key]
    except KeyError:
        pass
    except TypeError:  # an argument that cannot be hashed, such as a generator of another kind
        return _compute(op, schema, args, kwargs)
    if len(_forecasts) >= MAX_FORECASTS:
        _forecasts.clear()
    found = _forecasts[key] = _compute(op, schema, args, kwargs)
    return found


def _key(value: Any) -> Any:
    """What of an argument the result's shape depends on.  Types count: 1, 1.0 and True give different dtypes."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and value.device.type == "cpu":
            return value.dtype
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, torch.Generator):
        return torch.Generator
    return type(value), value


def _compute(op: Operator, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Forecast | None:
    with torch._C.DisableTorchFunction():  # a default device set by the user is none of a meta kernel's business
        meta_args = [_to_meta(value) for value in args]
        meta_kwargs = {name: _to_meta(value) for name, value in kwargs.items()}
        try:
            result = op(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):  # no meta kernel, or one that needs values
            return None
    is_tuple = isinstance(result, (list, tuple))
    values = tuple(result) if is_tuple else (result,)
    if not all(map(_is_shaped, values)):
        return None
    return Forecast(tuple(map(_shape, values)), is_tuple, _count_flops(schema, meta_args, meta_kwargs, result))


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and value.device.type == "cpu" and not is_dry(value):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_to_meta(one) for one in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Generator):
        return None
    return value


def _is_shaped(value: Any) -> bool:
    """Whether a value is tensors only, so that it can be made before the kernel runs."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_shaped, value))
    return value is None or (isinstance(value, torch.Tensor) and value.device.type in ("meta", NAME))


def _shape(value: Any) -> Given:
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape, value))
    return None if value is None else Shape(value.size(), value.stride(), value.dtype)


def _count_flops(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    if schema.flops is None:
        return 0
    return schema.flops(*args, **kwargs, out_val=result)
