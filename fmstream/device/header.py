"""The header of a safetensors file: which tensors lie where.

Format: 8 bytes little-endian length, that many bytes of JSON, then the data that its offsets refer to
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, Final, NamedTuple

import torch

from fmstream.device.files import Identity
from fmstream.errors import CheckpointError

MAX_HEADER_BYTES: Final = 100_000_000
_LENGTH_BYTES: Final = 8

_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}


class Entry(NamedTuple):
    """A tensor in a file; ``offset`` counts from the beginning of the file."""

    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Header(NamedTuple):
    """The tensors of one file by name, and what the file was when they were listed."""

    path: str
    identity: Identity
    entries: dict[str, Entry]


def read_header(path: str) -> Header:
    """List the tensors of a safetensors file; reads no more than its header.

    Raises:
        CheckpointError: there is no such file, or it is damaged or cut short.
    """
    try:
        with open(path, "rb") as file:
            identity = Identity.of(os.fstat(file.fileno()))
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            start = _LENGTH_BYTES + length
            if identity.num_bytes < _LENGTH_BYTES or length > MAX_HEADER_BYTES:
                raise _damaged(path, f"it does not begin with a header of at most {MAX_HEADER_BYTES} bytes")
            if start > identity.num_bytes:
                raise _cut_short(path, start, identity.num_bytes)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise _damaged(path, "its header is not a table of tensors")
    table.pop("__metadata__", None)
    entries = {name: _entry(path, name, described, start) for name, described in table.items()}
    end = max((entry.offset + entry.num_bytes for entry in entries.values()), default=start)
    if end > identity.num_bytes:
        raise _cut_short(path, end, identity.num_bytes)
    return Header(path, identity, entries)


def _entry(path: str, name: str, described: Any, start: int) -> Entry:
    try:
        kind, shape, (begin, end) = described["dtype"], described["shape"], described["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _damaged(path, f"its header describes {name!r} as {described!r}") from None
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise CheckpointError(f"{path}: {name!r} has dtype {kind!r}; known are {', '.join(_DTYPES)}")
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise _damaged(path, f"its header describes {name!r} as {described!r}")
    if dtype is torch.float4_e2m1fn_x2 and shape:
        shape = [*shape[:-1], shape[-1] // 2]  # two values in one element
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise _damaged(path, f"its header gives {name!r} {end - begin} bytes for {kind} of shape {described['shape']}")
    return Entry(start + begin, end - begin, dtype, tuple(shape))


def _damaged(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a sound safetensors file: {why}; fetch or save it again")


def _cut_short(path: str, wanted: int, found: int) -> CheckpointError:
    return CheckpointError(f"{path} is cut short: {wanted} bytes are listed, {found} are there; fetch it again")
