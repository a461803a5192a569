"""Which pages of a KV cache a decoding step attends to, in native code: the CPU's counterpart of ``page_select.cu``.

Works on NumPy arrays, without the GIL.  What is decided, and the shapes, stand in `fmstream.payloads.page_select`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

REST: Final = 0
CHOSEN: Final = 1
KEPT: Final = 2

_BINS: Final = 2048
_SHIFT: Final = 21
"""The upper 11 bits of a key choose a bin; within the bin that the threshold is in, keys are compared whole."""
# Sums may be taken in any order, which is what lets them be vectorised; the GPU takes them in another one as well.
_FAST: Final = {"reassoc", "contract", "nsz", "arcp"}
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy"}


@njit(fastmath=_FAST, **_OPTIONS)
def _ten(query, size, at, centre, radius, page):  # type: ignore[no-untyped-def]
    """Bounds of five queries for two pages: what is read is used often, and no sum waits for the one before it."""
    zero = np.float32(0)
    a, b, c, d, e = zero, zero, zero, zero, zero
    f, g, h, k, m = zero, zero, zero, zero, zero
    for i in range(centre.shape[1]):
        x, y = centre[page, i], radius[page, i]
        u, v = centre[page + 1, i], radius[page + 1, i]
        q, s = query[at, i], size[at, i]
        a += q * x + s * y
        f += q * u + s * v
        q, s = query[at + 1, i], size[at + 1, i]
        b += q * x + s * y
        g += q * u + s * v
        q, s = query[at + 2, i], size[at + 2, i]
        c += q * x + s * y
        h += q * u + s * v
        q, s = query[at + 3, i], size[at + 3, i]
        d += q * x + s * y
        k += q * u + s * v
        q, s = query[at + 4, i], size[at + 4, i]
        e += q * x + s * y
        m += q * u + s * v
    return (a, b, c, d, e), (f, g, h, k, m)


@njit(fastmath=_FAST, **_OPTIONS)
def _one(query, size, at, centre, radius, page):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(centre.shape[1]):
        total += query[at, i] * centre[page, i] + size[at, i] * radius[page, i]
    return total


@njit(**_OPTIONS)
def _score(query, size, centre, radius, scale, bounds):  # type: ignore[no-untyped-def]
    in_fives = query.shape[0] // 5 * 5
    in_pairs = bounds.shape[1] // 2 * 2
    for page in range(0, in_pairs, 2):
        for at in range(0, in_fives, 5):
            first, second = _ten(query, size, at, centre, radius, page)
            for i in range(5):
                bounds[at + i, page] = first[i] * scale
                bounds[at + i, page + 1] = second[i] * scale
        for at in range(in_fives, query.shape[0]):
            bounds[at, page] = _one(query, size, at, centre, radius, page) * scale
            bounds[at, page + 1] = _one(query, size, at, centre, radius, page + 1) * scale
    for page in range(in_pairs, bounds.shape[1]):
        for at in range(query.shape[0]):
            bounds[at, page] = _one(query, size, at, centre, radius, page) * scale


@njit(**_OPTIONS)
def _key(value):  # type: ignore[no-untyped-def]
    """Unsigned integers in the order of the floats; zero is kept for pages that are no candidates."""
    bits = np.float32(value + np.float32(0)).view(np.uint32)
    key = ~bits if bits & np.uint32(0x80000000) else bits | np.uint32(0x80000000)
    return np.uint32(1) if key == 0 else np.uint32(key)


@njit(**_OPTIONS)
def _threshold(keys, want, histogram, inside):  # type: ignore[no-untyped-def]
    """The key that the last of the ``want`` largest has, and how many of that key are among them."""
    if want <= 0:
        return np.uint32(0xFFFFFFFF), 0
    histogram[:] = 0
    for page in range(keys.shape[0]):
        histogram[keys[page] >> np.uint32(_SHIFT)] += 1
    left = want
    bin_ = _BINS - 1
    while bin_ > 0 and histogram[bin_] < left:
        left -= histogram[bin_]
        bin_ -= 1
    count = 0
    for page in range(keys.shape[0]):
        if keys[page] >> np.uint32(_SHIFT) == bin_ and keys[page] != 0:
            inside[count] = keys[page]
            count += 1
    if count < left:
        return np.uint32(0), 0  # fewer candidates than wanted: all of them
    found = np.sort(inside[:count])
    threshold = found[count - left]
    equal = 0
    for index in range(count - left, count):
        equal += found[index] == threshold
    return threshold, equal


@njit(**_OPTIONS)
def _take(keys, want, listed, role, new_role, histogram, inside):  # type: ignore[no-untyped-def]
    """List the pages of the ``want`` largest keys, ascending, then -1; equal keys by page.  Returns how many."""
    threshold, equal = _threshold(keys, want, histogram, inside)
    count = 0
    for page in range(keys.shape[0]):
        key = keys[page]
        take = key > threshold
        if not take and key == threshold and key != 0 and equal > 0:
            take = True
            equal -= 1
        if take:
            if count < listed.shape[0]:
                listed[count] = page
            count += 1
            if new_role != REST:
                role[page] = new_role
    listed[count:] = -1
    return count


@njit(fastmath=_FAST, **_OPTIONS)
def _exp(x):  # type: ignore[no-untyped-def]
    """e to the power of x <= 0, to about 2e-7 of itself: 2^n times a polynomial, so that loops of it are vectorised."""
    y = max(x * np.float32(1.44269504), np.float32(-125))
    whole = np.floor(y)
    f = (y - whole) * np.float32(0.693147181)
    value = np.float32(1 / 5040)
    value = value * f + np.float32(1 / 720)
    value = value * f + np.float32(1 / 120)
    value = value * f + np.float32(1 / 24)
    value = value * f + np.float32(1 / 6)
    value = value * f + np.float32(1 / 2)
    value = value * f + np.float32(1)
    value = value * f + np.float32(1)
    return value * np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(fastmath=_FAST, **_OPTIONS)
def _masses(bound, left):  # type: ignore[no-untyped-def]
    """Sums of the exponentials of all bounds, and of those whose ``left`` is one rather than zero."""
    top = bound[0]
    for page in range(bound.shape[0]):
        top = max(top, bound[page])
    every, rest = np.float32(0), np.float32(0)
    for page in range(bound.shape[0]):
        mass = _exp(bound[page] - top)
        every += mass
        rest += mass * left[page]
    return every, rest


@njit(**_OPTIONS)
def _share_left_out(bounds, left):  # type: ignore[no-untyped-def]
    worst = np.float32(0)
    for g in range(bounds.shape[0]):
        every, rest = _masses(bounds[g], left)
        worst = max(worst, rest / every)
    return worst


@njit(**_OPTIONS)
def decide(  # type: ignore[no-untyped-def]
    query, centre, radius, resident, mean_cos, mean_sin, scale,
    num_pages, num_ahead, num_frames, num_sinks, num_recent, stay,
    chosen, ahead, victims, left_out,
):  # fmt: skip
    """Decide for heads one after the other; the first axis of all arrays is sequences times KV heads.

    Args:
        query: float32 [N, G, D].
        centre, radius: float32 [N, P, D], the first ``num_pages`` of which are complete.
        resident: bool [N, P].
        mean_cos, mean_sin: float32 [D].
        scale: float32 that bounds are multiplied by.
        num_pages: pages to decide about, at most P.
        num_ahead, num_frames, num_sinks, num_recent, stay: see `fmstream.payloads.page_select.Limits`.
        chosen, ahead, victims: int32 results [N, ...], as long as pages may be listed.
        left_out: float32 result [N].
    """
    num_heads, group, dims = query.shape
    queries = np.empty((group + 1, dims), np.float32)
    bounds = np.empty((group + 1, num_pages), np.float32)
    left = np.empty(num_pages, np.float32)
    keys = np.empty(num_pages, np.uint32)
    inside = np.empty(num_pages, np.uint32)
    role = np.empty(num_pages, np.uint8)
    histogram = np.empty(_BINS, np.int64)
    unlisted = np.empty(0, np.int32)
    half = dims // 2
    for head in range(num_heads):
        queries[:group] = query[head]
        for d in range(dims):
            mean, turned = np.float32(0), np.float32(0)
            for g in range(group):
                mean += query[head, g, d]
                turned += query[head, g, d + half] if d < half else query[head, g, d - half]
            turned = -turned if d < half else turned
            queries[group, d] = (mean * mean_cos[d] + turned * mean_sin[d]) / np.float32(group)
        _score(queries, np.abs(queries), centre[head], radius[head], scale, bounds)
        prior = bounds[group]

        role[:] = REST
        for page in range(num_pages):
            importance = bounds[0, page]
            for g in range(1, group):
                importance = max(importance, bounds[g, page])
            if resident[head, page]:
                importance += stay
            kept = page < num_sinks or page >= num_pages - num_recent
            keys[page] = np.uint32(0xFFFFFFFF) if kept else min(_key(importance), np.uint32(0xFFFFFFFE))
        num_chosen = _take(keys, chosen.shape[1], chosen[head], role, CHOSEN, histogram, inside)
        for page in range(num_pages):
            left[page] = role[page] != CHOSEN
        left_out[head] = _share_left_out(bounds[:group], left)

        held = 0
        for page in range(num_pages):
            held += role[page] == CHOSEN or resident[head, page]
            keys[page] = 0 if role[page] == CHOSEN else _key(prior[page])
        _take(keys, max(0, num_frames - num_chosen), unlisted, role, KEPT, histogram, inside)
        for page in range(num_pages):
            keys[page] = 0 if role[page] != KEPT or resident[head, page] else _key(prior[page])
        fetched = _take(keys, num_ahead, ahead[head], role, REST, histogram, inside)
        surplus = max(0, min(held + fetched - num_frames, victims.shape[1]))
        for page in range(num_pages):
            keys[page] = 0 if role[page] == CHOSEN or not resident[head, page] else _key(-prior[page])
        _take(keys, surplus, victims[head], role, REST, histogram, inside)
