"""Frozen dataclasses from JSON values, with every type checked."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def decode(kind: Any, value: Any, where: str) -> Any:
    """Turn a JSON value into ``kind``: a dataclass, tuple[X, ...], dict[str, X], X | None, a Literal or a scalar.

    Raises ``ValueError`` that names the place (``where``) and what stands there.
    """
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin is UnionType:
        inner = next(arg for arg in get_args(kind) if arg is not NoneType)
        return None if value is None else decode(inner, value, where)
    if origin is Literal:
        return _check(value in get_args(kind), value, f"one of {', '.join(get_args(kind))}", where)
    if origin is tuple:
        _check(isinstance(value, list | tuple), value, "a list", where)
        return tuple(decode(get_args(kind)[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        _check(isinstance(value, dict), value, "an object", where)
        return {str(key): decode(get_args(kind)[1], item, f"{where}.{key}") for key, item in value.items()}
    accepted = (int, float) if kind is float else (kind,)
    return _check(type(value) in accepted, value, kind.__name__, where)


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    _check(isinstance(value, dict), value, "an object", where)
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    missing, unknown = sorted(set(names) - set(value)), sorted(set(value) - set(names))
    if missing or unknown:
        raise ValueError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    return kind(**{name: decode(hints[name], value[name], f"{where}.{name}") for name in names})


def _check(good: bool, value: Any, expected: str, where: str) -> Any:
    if not good:
        raise ValueError(f"{where} is {str(value)[:40]!r}, expected {expected}")
    return value
