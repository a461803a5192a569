"""Two ends of the native ring that are native loops, for benchmarks and for tests: one pushes, one pops and checks."""

from __future__ import annotations

import ctypes

import numpy as np
from numba import njit, types

from fmstream.core._native import call_0, ld, pause, pop_many, push

i8 = types.int64
MULTIPLIER = np.int64(-7046029254386353131)  # odd: every record differs from its neighbours in most bits
LOOKS = 2000  # before another process may have the core: it may be the one that is waited for
SCHED_YIELD = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value


@njit(i8(i8))
def rest(looks):  # type: ignore[no-untyped-def]
    """Wait a little; returns how often that was."""
    if looks % LOOKS == LOOKS - 1:
        call_0(SCHED_YIELD)
    else:
        pause()
    return looks + 1


@njit(types.void(i8, i8), nogil=True)
def produce(ring, count):  # type: ignore[no-untyped-def]
    """Push ``count`` records, each a function of its number; waits while the ring is full."""
    looks = 0
    for number in range(count):
        word = number * MULTIPLIER
        while not push(ring, word, number, ~number, number ^ word):
            looks = rest(looks)


@njit(i8(i8, i8, i8), nogil=True)
def consume(ring, target, count):  # type: ignore[no-untyped-def]
    """Pop ``count`` records to ``target``; returns how many are not what was pushed in their place."""
    wrong = 0
    looks = 0
    for number in range(count):
        while pop_many(ring, target, 1) == 0:
            looks = rest(looks)
        word = number * MULTIPLIER
        same = ld(target) == word and ld(target + 8) == number
        if not (same and ld(target + 16) == ~number and ld(target + 24) == number ^ word):
            wrong += 1
    return wrong
