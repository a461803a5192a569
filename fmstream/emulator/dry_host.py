"""CPU operators on dry host tensors: by shapes alone, for touching one's bytes would end the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmstream.emulator.dry import SMALL_BYTES, DryValueError, empty_dry, is_dry
from fmstream.emulator.shapes import Forecast, Operator, Schema, Shape, aten, forecast, schema_of
from fmstream.emulator.tensors import is_device, num_elements_spanned

THROUGH: Final = frozenset({aten.is_pinned, aten._pin_memory, aten.set_, aten.detach, aten.alias})
"""Operators that touch no bytes of a host tensor, or know dry ones."""
ASKING: Final = frozenset({aten._local_scalar_dense, aten.equal, aten.is_nonzero})
"""Operators that give values of their arguments."""


class DryHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes what a dry tensor is computed into dry, and every large new tensor on the CPU.

    Of this thread only; plain Python and numpy code must not touch dry tensors.  No host time is charged, as the
    machine charges none for operators on the CPU that really run.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        tensors = list(_tensors([*args, *kwargs.values()]))
        if schema.is_view or func._overloadpacket in THROUGH or any(map(is_device, tensors)):
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return func(*args, **kwargs)
        if not tensors:
            return _make(func, schema, args, kwargs)
        if not any(map(is_dry, tensors)):
            return func(*args, **kwargs)
        return _compute(func, schema, args, kwargs)


def dry_host() -> DryHost:
    """A context for dry runs in which CPU operators on dry host tensors give dry tensors.

    Raises `DryValueError` where a value is needed.
    """
    return DryHost()  # type: ignore[no-untyped-call]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _make(op: Operator, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A new tensor on the CPU: a dry one if it is large."""
    expected = forecast(op, schema, args, {**kwargs, "device": torch.device("meta"), "pin_memory": None})
    if expected is None or len(expected.given) != 1 or not isinstance(shape := expected.given[0], Shape):
        return op(*args, **kwargs)
    if num_elements_spanned(shape.size, shape.stride) * shape.dtype.itemsize <= SMALL_BYTES:
        return op(*args, **kwargs)
    return empty_dry(shape.size, shape.stride, shape.dtype)


def _compute(op: Operator, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if schema.written:
        return _write(op, schema, args, kwargs)
    asks = op._overloadpacket in ASKING
    expected = None if asks else forecast(op, schema, args, kwargs)
    if expected is None:
        raise DryValueError(
            f"{schema.name} needs values of a dry host tensor, which has only a shape: run for real, or keep what "
            "decides something out of dry tensors"
        )
    return _results(expected)


def _results(expected: Forecast) -> Any:
    made = [_result(given) for given in expected.given]
    return tuple(made) if expected.is_tuple else made[0]


def _result(given: Any) -> Any:
    if isinstance(given, Shape):
        return empty_dry(given.size, given.stride, given.dtype)
    return [_result(one) for one in given] if given is not None else None


def _write(op: Operator, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Nothing is written; a tensor that has values would lose them, which is refused."""
    named = {**dict(zip(schema.names, args, strict=False)), **kwargs}
    written = [named[schema.names[i]] for i in schema.written]
    for tensor in _tensors(written):
        if not is_dry(tensor):
            raise DryValueError(
                f"{schema.name} would write unknown values into a host tensor of shape {tuple(tensor.shape)} that has "
                "known ones: make that one dry too (create it within emulator.dry_host())"
            )
    if not schema.num_returns:
        return None
    return written[0] if schema.num_returns == 1 else tuple(written)
