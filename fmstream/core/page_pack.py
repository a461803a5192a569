"""Pages of bfloat16 numbers in about three quarters of their bytes, without loss, in native code.

Numbers that a model computes lie close together in size: of the eight bits of an exponent, four say all for nearly
every number.  So an element is stored as a byte with its sign and fraction, and a code of four bits:

    0        the exponent is 0: zero, or a subnormal number
    1 to 14  the exponent is the base of its block of 512 elements and so much
    15       neither: the exponent is listed

A block's base is its largest exponent less 14, at least 0.  A packed page of n elements, n a multiple of 512:

    0                n bytes      sign (bit 7) and fraction (bits 0 to 6)
    n                n/2 bytes    codes: byte j of a block has that of its element j below, of element 256 + j above
    n + n/2          n/512 bytes  bases
    then, from a multiple of 4 on, int32s: how many exponents are listed, and room for n/128 of element * 256 + exponent

A page that would list more does not fit, and stays as it is.  That the exponents of weights carry little is what ZipNN
(2024) and DFloat11 (2025) save by as well, with codes of variable length.

Works on NumPy arrays, without the GIL.  Importing this compiles it; numba keeps the result where it can, and looks at
this file alone to see whether it is out of date.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import int64, njit, types

from fmstream.core.compiling import native

BLOCK: Final = 512
HALF: Final = BLOCK // 2
CODES: Final = 14
"""Exponents above the base that have a code."""
LISTED: Final = 15
LISTED_SHARE: Final = 128
"""Elements for each of which one exponent may be listed."""
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy"}


def packed_bytes(elements: int) -> int:
    """Bytes of a packed page of so many elements, a multiple of 4."""
    return int(_list_at(elements)) + 4 * (1 + elements // LISTED_SHARE)


def _list_at(elements):
    return (elements + elements // 2 + elements // BLOCK + 3) // 4 * 4


_list_begin = njit(**_OPTIONS)(_list_at)


@njit(**_OPTIONS)
def _largest(block):
    found = int64(0)
    for i in range(BLOCK):
        found = max(found, int64(block[i]) & 0x7F80)
    return found >> 7


@njit(**_OPTIONS)
def _fill(block, signs, codes, base):
    """Signs, fractions and codes of a block; whether all codes are right as they are."""
    for i in range(BLOCK):
        bits = int64(block[i])
        signs[i] = ((bits >> 8) & 128) | (bits & 127)
    lowest = int64(0)
    for i in range(HALF):
        below = ((int64(block[i]) >> 7) & 255) - base
        above = ((int64(block[HALF + i]) >> 7) & 255) - base
        lowest |= (below - 1) | (above - 1)
        codes[i] = (below & 15) | ((above & 15) << 4)
    return lowest >= 0


@njit(**_OPTIONS)
def _correct(block, codes, base, first, entries, found, room):
    """Codes of exponents that are not above the base, and entries of those that are not 0; -1 if there is no room."""
    for i in range(BLOCK):
        exponent = (int64(block[i]) >> 7) & 255
        if exponent > base:
            continue
        code = LISTED if exponent else 0
        if code:
            if found == room:
                return -1
            found += 1
            entries[found] = (first + i) * 256 + exponent
        old = int64(codes[i % HALF])
        codes[i % HALF] = (old & 240) | code if i < HALF else (old & 15) | (code << 4)
    return found


@native(types.void(types.uint16[:, ::1], types.uint8[:, ::1], types.boolean[::1]), **_OPTIONS)
def pack(pages, packed, fits):
    """Pack pages.

    Args:
        pages: uint16 [n, elements], the bits of the numbers.
        packed: uint8 [n, packed_bytes]; what it holds for a page that does not fit means nothing.
        fits: bool [n], written: which pages were packed.
    """
    elements = pages.shape[1]
    bases = elements + elements // 2
    room = elements // LISTED_SHARE
    for page in range(len(pages)):
        out = packed[page]
        entries = out[_list_begin(elements) :].view(np.int32)
        found = int64(0)
        for number in range(elements // BLOCK):
            first = number * BLOCK
            block = pages[page, first : first + BLOCK]
            codes = out[elements + number * HALF : elements + (number + 1) * HALF]
            base = max(_largest(block) - CODES, 0)
            out[bases + number] = base
            if not _fill(block, out[first : first + BLOCK], codes, base):
                found = _correct(block, codes, base, first, entries, found, room)
                if found < 0:
                    break
        fits[page] = found >= 0
        entries[0] = max(found, 0)


@native(types.void(types.uint8[:, ::1], types.uint16[:, ::1]), **_OPTIONS)
def unpack(packed, pages):
    """Write the bits of packed pages, uint8 [n, packed_bytes], to uint16 [n, elements]."""
    elements = pages.shape[1]
    bases = elements + elements // 2
    for page in range(len(pages)):
        source, target = packed[page], pages[page]
        for number in range(elements // BLOCK):
            first, base = number * BLOCK, int64(source[bases + number])
            signs, block = source[first : first + BLOCK], target[first : first + BLOCK]
            codes = source[elements + number * HALF : elements + (number + 1) * HALF]
            for i in range(HALF):
                code, sign = int64(codes[i]) & 15, int64(signs[i])
                block[i] = ((sign & 128) << 8) | (sign & 127) | ((base + code if code else 0) << 7)
            for i in range(HALF):
                code, sign = int64(codes[i]) >> 4, int64(signs[HALF + i])
                block[HALF + i] = ((sign & 128) << 8) | (sign & 127) | ((base + code if code else 0) << 7)
        entries = source[_list_begin(elements) :].view(np.int32)
        for at in range(1, entries[0] + 1):
            place, exponent = entries[at] >> 8, entries[at] & 255
            target[place] = (int64(target[place]) & 0x807F) | (exponent << 7)
