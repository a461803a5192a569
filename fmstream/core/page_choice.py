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
_LOWEST: Final = np.float32(-3.4028235e38)
# Sums may be taken in any order, which is what lets them be vectorised; the GPU takes them in another one as well.
_FAST: Final = {"reassoc", "contract", "nsz", "arcp"}
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy"}


@njit(fastmath=_FAST, **_OPTIONS)
def _four(query, size, at, centre, radius):  # type: ignore[no-untyped-def]
    """Bounds of four queries at once: a digest is read once for all of them."""
    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(centre.shape[0]):
        x, y = centre[i], radius[i]
        a += query[at, i] * x + size[at, i] * y
        b += query[at + 1, i] * x + size[at + 1, i] * y
        c += query[at + 2, i] * x + size[at + 2, i] * y
        d += query[at + 3, i] * x + size[at + 3, i] * y
    return a, b, c, d


@njit(fastmath=_FAST, **_OPTIONS)
def _one(query, size, at, centre, radius):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(centre.shape[0]):
        total += query[at, i] * centre[i] + size[at, i] * radius[i]
    return total


@njit(**_OPTIONS)
def _score(query, size, centre, radius, scale, bounds, importance, prior):  # type: ignore[no-untyped-def]
    group = query.shape[0] - 1
    for page in range(importance.shape[0]):
        best = _LOWEST
        at = 0
        while at + 4 <= group:
            a, b, c, d = _four(query, size, at, centre[page], radius[page])
            bounds[at, page] = a * scale
            bounds[at + 1, page] = b * scale
            bounds[at + 2, page] = c * scale
            bounds[at + 3, page] = d * scale
            best = max(best, max(max(a, b), max(c, d)))
            at += 4
        while at < group:
            one = _one(query, size, at, centre[page], radius[page])
            bounds[at, page] = one * scale
            best = max(best, one)
            at += 1
        importance[page] = best * scale
        prior[page] = _one(query, size, group, centre[page], radius[page]) * scale


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


@njit(**_OPTIONS)
def _share_left_out(bounds, role):  # type: ignore[no-untyped-def]
    worst = np.float32(0)
    for g in range(bounds.shape[0]):
        top = _LOWEST
        for page in range(bounds.shape[1]):
            top = max(top, bounds[g, page])
        every, rest = np.float32(0), np.float32(0)
        for page in range(bounds.shape[1]):
            mass = np.exp(bounds[g, page] - top)
            every += mass
            if role[page] != CHOSEN:
                rest += mass
        if every > 0:
            worst = max(worst, rest / every)
    return worst


@njit(**_OPTIONS)
def decide(  # type: ignore[no-untyped-def]
    query, centre, radius, mean_cos, mean_sin, resident, scale,
    num_pages, num_ahead, num_frames, num_sinks, num_recent,
    chosen, ahead, victims, left_out,
):  # fmt: skip
    """Decide for heads one after the other; the first axis of all arrays is sequences times KV heads.

    Args:
        query: float32 [N, G, D].
        centre, radius: float32 [N, P, D], the first ``num_pages`` of which are complete.
        mean_cos, mean_sin: float32 [D].
        resident: bool [N, P].
        scale: float32 that bounds are multiplied by.
        num_pages: pages to decide about, at most P.
        num_ahead, num_frames, num_sinks, num_recent: see `fmstream.payloads.page_select.Limits`.
        chosen, ahead, victims: int32 results [N, ...], as long as pages may be listed.
        left_out: float32 result [N].
    """
    num_heads, group, dims = query.shape
    queries = np.empty((group + 1, dims), np.float32)
    bounds = np.empty((group, num_pages), np.float32)
    importance = np.empty(num_pages, np.float32)
    prior = np.empty(num_pages, np.float32)
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
        _score(queries, np.abs(queries), centre[head], radius[head], scale, bounds, importance, prior)

        role[:] = REST
        for page in range(num_pages):
            kept = page < num_sinks or page >= num_pages - num_recent
            keys[page] = np.uint32(0xFFFFFFFF) if kept else min(_key(importance[page]), np.uint32(0xFFFFFFFE))
        num_chosen = _take(keys, chosen.shape[1], chosen[head], role, CHOSEN, histogram, inside)
        left_out[head] = _share_left_out(bounds, role)

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
