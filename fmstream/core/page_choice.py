"""Which pages of a KV cache a decoding step attends to, in native code: the CPU's counterpart of ``page_select.cu``.

Works on NumPy arrays, without the GIL.  What is decided, and the shapes, stand in `fmstream.payloads.page_select`.
Importing this compiles it; numba keeps the result where it can, and looks at this file alone to see whether it is out
of date.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fmstream.core.compiling import native

_BINS: Final = 2048
_LINE: Final = 64
_AHEAD: Final = 8
"""Pages that are fetched before they are scored: the processor does not look beyond a page of memory by itself."""
# Sums may be taken in any order, which is what lets them be vectorised; the GPU takes them in another one as well.
_FAST: Final = {"reassoc", "contract", "nsz", "arcp"}
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy"}


# Bounds


@intrinsic
def _fetch(typing: Any, address: Any) -> Any:
    """Ask for the line of memory at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(fetch, [pointer, i32(0), i32(3), i32(1)])  # data to read, to the nearest cache
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit(**_OPTIONS)
def _fetch_pages(address, num_bytes):
    for at in range(0, num_bytes, _LINE):
        _fetch(address + at)  # type: ignore[call-arg]


@njit(fastmath=_FAST, **_OPTIONS)
def _ten(query, size, at, centre, radius, page):
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
def _one(query, size, at, centre, radius, page):
    total = np.float32(0)
    for i in range(centre.shape[1]):
        total += query[at, i] * centre[page, i] + size[at, i] * radius[page, i]
    return total


@njit(**_OPTIONS)
def _score(query, size, centre, radius, scale, bounds):
    in_fives = query.shape[0] // 5 * 5
    in_pairs = bounds.shape[1] // 2 * 2
    page_bytes = np.int64(centre.shape[1] * 4)
    first, second = np.int64(centre.ctypes.data), np.int64(radius.ctypes.data)
    for page in range(0, in_pairs, 2):
        _fetch_pages(first + (page + _AHEAD) * page_bytes, 2 * page_bytes)
        _fetch_pages(second + (page + _AHEAD) * page_bytes, 2 * page_bytes)
        for at in range(0, in_fives, 5):
            of_first, of_second = _ten(query, size, at, centre, radius, page)
            for i in range(5):
                bounds[at + i, page] = of_first[i] * scale
                bounds[at + i, page + 1] = of_second[i] * scale
        for at in range(in_fives, query.shape[0]):
            bounds[at, page] = _one(query, size, at, centre, radius, page) * scale
            bounds[at, page + 1] = _one(query, size, at, centre, radius, page + 1) * scale
    for page in range(in_pairs, bounds.shape[1]):
        for at in range(query.shape[0]):
            bounds[at, page] = _one(query, size, at, centre, radius, page) * scale


# Keys: integers in the order of floats, of which the largest is found faster


@njit(**_OPTIONS)
def _key(value):
    bits = np.int64(np.float32(value + np.float32(0)).view(np.int32))
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@njit(**_OPTIONS)
def _greatest(bound):
    """The largest bound."""
    top = _key(bound[0])
    for page in range(bound.shape[0]):
        top = max(top, _key(bound[page]))
    return np.int32(top ^ ((top >> 31) & 0x7FFFFFFF)).view(np.float32)


@njit(fastmath=_FAST, **_OPTIONS)
def _exp(x):
    """e to the power of x <= 0, to about 3e-6 of itself: 2^n times a polynomial, so that loops of it are vectorised."""
    y = max(x * np.float32(1.44269504), np.float32(-125))
    whole = np.int32(y - np.float32(0.5))  # the nearest, for y <= 0
    f = (y - np.float32(whole)) * np.float32(0.693147181)
    value = np.float32(1 / 120)
    value = value * f + np.float32(1 / 24)
    value = value * f + np.float32(1 / 6)
    value = value * f + np.float32(1 / 2)
    value = value * f + np.float32(1)
    value = value * f + np.float32(1)
    return value * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(fastmath=_FAST, **_OPTIONS)
def _share_of(bound, left):
    """Part that pages whose ``left`` is one rather than zero have of the sum of the exponentials of all bounds."""
    top = _greatest(bound)
    every, rest = np.float32(0), np.float32(0)
    for page in range(bound.shape[0]):
        mass = _exp(bound[page] - top)
        every += mass
        rest += mass * left[page]
    return rest / every


@njit(fastmath=_FAST, **_OPTIONS)
def _raise_to(largest, bound):
    for page in range(bound.shape[0]):
        largest[page] = max(largest[page], bound[page])


# The largest


@njit(**_OPTIONS)
def _threshold(keys, want, work, histogram):
    """The key that the last of the ``want`` largest has, how many of that key are among them, and how many there are.

    There must be ``want`` keys, at least one.  Keys are counted in bins of equal width from the least to the greatest,
    then those of the bin that the threshold is in, until a bin is one key wide.
    """
    count, left = keys.shape[0], want
    work[:count] = keys
    while True:
        least, greatest = work[0], work[0]
        for at in range(count):
            least, greatest = min(least, work[at]), max(greatest, work[at])
        low, span, shift = np.int64(least), np.int64(greatest) - np.int64(least), 0
        while span >> shift >= _BINS:
            shift += 1
        histogram[:] = 0
        for at in range(count):
            histogram[np.uintp((work[at] - low) >> shift)] += 1
        within = span >> shift
        while histogram[within] < left:
            left -= histogram[within]
            within -= 1
        if shift == 0:
            return np.int32(low + within), left, histogram[within]
        inside = np.uintp(0)
        for at in range(count):
            key = work[at]
            work[inside] = key
            inside += np.uintp((key - low) >> shift == within)
        count = np.int64(inside)


@njit(**_OPTIONS)
def _part(pages, keys, want, best, others, work, histogram):
    """List the pages of the ``want`` largest keys, equal ones by their order, and the others; how many are best.

    Both lists have room for one page more than there are, so that nothing branches on what the keys are; ``best`` may
    begin where ``pages`` does.  The keys are not kept.
    """
    count = pages.shape[0]
    if want <= 0:
        others[:count] = pages
        return 0
    if want >= count:
        best[:count] = pages
        return count
    threshold, equal, num_equal = _threshold(keys, want, work, histogram)
    for at in range(count if equal < num_equal else 0):  # of those on the threshold only the first are among the best
        if keys[at] == threshold:
            keys[at] -= np.int32(equal <= 0)
            equal -= 1
    # Unsigned: of what may be negative it would be looked at whether it counts from the end.
    taken, left = np.uintp(0), np.uintp(0)
    for at in range(count):
        best[taken], others[left] = pages[at], pages[at]
        is_best = np.uintp(keys[at] >= threshold)
        taken, left = taken + is_best, left + (np.uintp(1) - is_best)
    return want


@njit(**_OPTIONS)
def _publish(pages, listed):
    """Write a list, then -1; returns its length."""
    listed[: pages.shape[0]] = pages
    listed[pages.shape[0] :] = -1
    return pages.shape[0]


# The decision


@njit(**_OPTIONS)
def _favour(importance, resident, stay):
    """Raise the importance of what is in memory."""
    for page in range(importance.shape[0]):
        importance[page] += stay if resident[page] else np.float32(0)


@njit(**_OPTIONS)
def _attended(importance, begin, end, limit, chosen, others, scratch):
    """List the pages that are attended to, all before ``begin`` and from ``end`` on among them, and the others."""
    keys, work, histogram = scratch
    num_pages = importance.shape[0]
    for page in range(num_pages):
        keys[page], chosen[page] = _key(importance[page]), page
    want = min(limit, num_pages) - begin - (num_pages - end)
    taken = begin + _part(chosen[begin:end], keys[begin:end], want, chosen[begin:], others, work, histogram)
    for page in range(end, num_pages):
        chosen[taken] = page
        taken += 1
    return taken


@njit(**_OPTIONS)
def _ahead(prior, resident, room, others, listed, lists, scratch):
    """List what is fetched: of the ``room`` of ``others`` that the coming positions favour, what is not there yet."""
    keys, work, histogram = scratch
    kept, rest = lists
    for at in range(others.shape[0]):
        keys[at] = _key(prior[others[at]])
    num_kept = _part(others, keys[: others.shape[0]], room, kept, rest, work, histogram)
    missing = 0
    for at in range(num_kept):
        page = kept[at]
        kept[missing], keys[missing] = page, _key(prior[page])
        missing += not resident[page]
    count = _part(kept[:missing], keys[:missing], listed.shape[0], kept, rest, work, histogram)
    return _publish(kept[:count], listed)


@njit(**_OPTIONS)
def _victims(prior, resident, surplus, others, listed, lists, scratch):
    """List what makes room: of ``others`` that are there, those that the coming positions favour least."""
    keys, work, histogram = scratch
    there, rest = lists
    count = 0
    for at in range(others.shape[0]):
        page = others[at]
        there[count], keys[count] = page, _key(-prior[page])
        count += resident[page]
    want = min(count + surplus, listed.shape[0])
    count = _part(there[:count], keys[:count], want, there, rest, work, histogram)
    _publish(there[:count], listed)


_floats, _many_floats = types.float32[:, ::1], types.float32[:, :, ::1]
_vector, _listed = types.float32[::1], types.int32[:, ::1]


@native(
    types.void(
        *(_many_floats, _many_floats, _many_floats, types.boolean[:, ::1], _vector, _vector, types.float32),
        *(types.int64, types.int64, types.int64, types.int64, types.int64, types.float32),
        *(_listed, _listed, _listed, _vector),
    ),
    **_OPTIONS,
)
def decide(
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
    scratch = np.empty(num_pages, np.int32), np.empty(num_pages, np.int32), np.empty(_BINS, np.int32)
    attended, others = np.empty(num_pages + 1, np.int32), np.empty(num_pages + 1, np.int32)
    lists = np.empty(num_pages + 1, np.int32), np.empty(num_pages + 1, np.int32)
    begin = min(num_sinks, num_pages)
    end = max(begin, num_pages - num_recent)
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

        left[:] = bounds[0]
        for g in range(1, group):
            _raise_to(left, bounds[g])
        _favour(left, resident[head], stay)
        num_chosen = _attended(left, begin, end, chosen.shape[1], attended, others, scratch)
        rest = others[: num_pages - num_chosen]
        _publish(attended[:num_chosen], chosen[head])
        left[:] = 0
        for at in range(rest.shape[0]):
            left[rest[at]] = 1
        left_out[head] = 0
        for g in range(group):
            left_out[head] = max(left_out[head], _share_of(bounds[g], left))
        fetched = _ahead(prior, resident[head], num_frames - num_chosen, rest, ahead[head], lists, scratch)
        _victims(prior, resident[head], num_chosen + fetched - num_frames, rest, victims[head], lists, scratch)
