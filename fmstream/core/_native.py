"""Everything that numba compiles: the ring, the gather, and the loop of a worker.  Importing this compiles it.

All of it is in one file because numba looks at this file alone to see whether compiled code that it kept is out of
date.  Functions take int64 *addresses*, never arrays, whose reference counts would need the GIL; whoever
calls owns the memory.  Records and control words are int64.

A ring, from its address on (capacity: a power of two)::

    0    tail: records ever pushed          the producer's; 8: what it last saw of head
    128  head: records ever popped          the consumer's; 136: what it last saw of tail
    256  parked: the consumer sleeps        set by the consumer, cleared by whoever wakes it
    384  mask: capacity - 1                 constant
    512  slots of 32 bytes: op, page, frame, sequence

Order: a slot is written before tail is stored (release) and read after tail was loaded (acquire); it is read before
head is stored (release) and written again after head was loaded (acquire).  What was last seen of the other cursor is
never ahead of it, so it only makes a ring look fuller or emptier than it is.  Sleeping is Dekker's pattern: the
consumer sets parked, then looks at tail; the producer stores tail, then looks at parked; a sequentially consistent
fence stands between the two on both sides, so at least one sees the other (Dijkstra, "Cooperating sequential
processes", 1965, section 2.1).  `tests/native` explores these functions exhaustively under a weak memory model.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fmstream.core.compiling import native

TAIL, SEEN_HEAD, HEAD, SEEN_TAIL, PARKED, MASK, SLOTS = 0, 8, 128, 136, 256, 384, 512
RECORD_BYTES = 32

# A lane, from its address on.  Of these constants those of jobs are also in `fmstream.core.jobs`.
STOP = 0
DEMAND, COMPLETIONS, CANCELS, CANCEL_MASK = 64, 72, 80, 88
DEMAND_FD, SIGNAL_FD, CLOCK = 96, 104, 112
READ, WRITE, PREAD, ERRNO, GETTIME = 128, 136, 144, 152, 160
POSTED = 192  # a job on its way in: 8 words, the caller's
TAKEN = 256  # a job, then its outcome: 8 words each, the worker's
OUTCOME = 320
SCRATCH = 384
LANE_BYTES = 512

OP_GATHER, OP_COPY, OP_READ = 1, 2, 3  # else: fill
DONE, FAILED, CANCELLED = 0, 1, 2
BAD_ID, END_OF_FILE, EINTR = -1, -2, 4

SPINS = 200  # looks at an empty ring before sleeping: some microseconds
STEP_BYTES = 1 << 20  # bytes after which a job looks whether it is cancelled
PAST_CACHES_BYTES = 1 << 20  # the least that is written past the caches: less is still there when it is used
LINE = 64
MAX_AHEAD_LINES = 16  # lines of a row that are fetched ahead; the processor sees by itself how it goes on

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_LINE = ir.VectorType(_I64, 8)
i8 = types.int64


# What Python has no words for


def _word(num_args: int, emit: Callable[[Any, list[Any]], Any], returns: Any = types.void) -> Any:
    """A function of int64 that ``emit(builder, args)`` makes instructions of."""
    signature = returns(*[i8] * num_args)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = emit(builder, list(args))
        return context.get_dummy_value() if signature.return_type == types.void else value

    made = signature, generate
    define: Any = (  # numba counts parameters
        lambda typing: made,
        lambda typing, a: made,
        lambda typing, a, b: made,
        lambda typing, a, b, c: made,
        lambda typing, a, b, c, d: made,
        lambda typing, a, b, c, d, e: made,
    )
    return intrinsic(define[num_args])


def _at(builder: Any, address: Any, kind: Any = _I64) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(order: str) -> Any:
    return _word(1, lambda b, args: b.load_atomic(_at(b, args[0]), order, 8), i8)


def _instruction(x86: str, arm: str = "") -> Any:
    """An instruction without operands, or none where the processor has no need of it."""

    def emit(builder: Any, args: list[Any]) -> None:
        here = builder.module.triple.partition("-")[0]
        name = {"x86_64": x86, "i686": x86, "aarch64": arm, "arm64": arm}.get(here)
        if name:
            operands = [] if name == x86 else [_I32(1)]
            kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)

    return _word(0, emit)


def _fetch(builder: Any, args: list[Any]) -> None:
    pointer = _at(builder, args[0], _I8)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
    builder.call(fetch, [pointer, _I32(0), _I32(2), _I32(1)])  # data to read, to the second cache: it has more room


def _copy(kind: Any, aligned: int = 0) -> Any:
    """Copy one value of a type; with ``aligned``, what its target is a multiple of, past the caches."""

    def emit(builder: Any, args: list[Any]) -> None:
        value = builder.load(_at(builder, args[1], kind), align=1)
        store = builder.store(value, _at(builder, args[0], kind), align=aligned or 1)
        if aligned:
            store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))

    return _word(2, emit)


def _call(num_args: int) -> Any:
    """Call a C function by its address; it takes int64 or pointers and is not variadic."""
    kind = ir.FunctionType(_I64, [_I64] * num_args)
    return _word(num_args + 1, lambda b, args: b.call(_at(b, args[0], kind), args[1:]), i8)


ld = _word(1, lambda b, args: b.load(_at(b, args[0]), align=8), i8)
ld_rlx, ld_acq = _load("monotonic"), _load("acquire")
st = _word(2, lambda b, args: b.store(args[1], _at(b, args[0]), align=8))
st_rel = _word(2, lambda b, args: b.store_atomic(args[1], _at(b, args[0]), "release", 8))
xchg = _word(2, lambda b, args: b.atomic_rmw("xchg", _at(b, args[0]), args[1], "seq_cst"), i8)
fence = _word(0, lambda b, args: b.fence("seq_cst"))
pause = _instruction("llvm.x86.sse2.pause", "llvm.aarch64.hint")
# Stores past the caches are not ordered by a release store on x86.
drain_stores = _instruction("llvm.x86.sse.sfence")
fetch_ahead = _word(1, _fetch)
memcpy = _word(3, lambda b, args: cgutils.raw_memcpy(b, _at(b, args[0], _I8), _at(b, args[1], _I8), args[2], 1))
memset = _word(3, lambda b, args: cgutils.memset(b, _at(b, args[0], _I8), args[2], b.trunc(args[1], _I8)))
copy_line, copy_line_past_caches = _copy(_LINE), _copy(_LINE, aligned=LINE)
copy_32, copy_16 = _copy(ir.VectorType(_I64, 4)), _copy(ir.VectorType(_I64, 2))
copy_8, copy_1 = _copy(_I64), _copy(_I8)
call_0, call_2, call_3, call_4 = _call(0), _call(2), _call(3), _call(4)


# The ring


@native(types.boolean(i8, i8, i8, i8, i8))
def push(ring, op, page, frame, sequence):
    """Append a record; False if the ring is full."""
    tail, mask = ld(ring + TAIL), ld(ring + MASK)
    if tail - ld(ring + SEEN_HEAD) > mask:
        head = ld_acq(ring + HEAD)
        st(ring + SEEN_HEAD, head)
        if tail - head > mask:
            return False
    slot = ring + SLOTS + (tail & mask) * RECORD_BYTES
    st(slot, op)
    st(slot + 8, page)
    st(slot + 16, frame)
    st(slot + 24, sequence)
    st_rel(ring + TAIL, tail + 1)
    return True


@native(i8(i8, i8))
def room(ring, wanted):
    """Records that can be pushed; looks at the consumer only where fewer than ``wanted`` are known to fit."""
    tail = ld(ring + TAIL)
    capacity = ld(ring + MASK) + 1
    free = capacity - (tail - ld(ring + SEEN_HEAD))
    if free < wanted:
        head = ld_acq(ring + HEAD)
        st(ring + SEEN_HEAD, head)
        free = capacity - (tail - head)
    return free


@native(i8(i8, i8, i8))
def push_many(ring, source, count):
    """Append as many of ``count`` records at ``source`` as fit, all at once; returns how many."""
    taken = min(count, room(ring, count))
    if taken <= 0:
        return 0
    tail, mask = ld(ring + TAIL), ld(ring + MASK)
    first = min(taken, mask + 1 - (tail & mask))
    memcpy(ring + SLOTS + (tail & mask) * RECORD_BYTES, source, first * RECORD_BYTES)
    memcpy(ring + SLOTS, source + first * RECORD_BYTES, (taken - first) * RECORD_BYTES)
    st_rel(ring + TAIL, tail + taken)
    return taken


@native(i8(i8, i8, i8))
def peek_many(ring, target, count):
    """Copy up to ``count`` of the oldest records to ``target`` and leave them in the ring; returns how many."""
    head, mask = ld(ring + HEAD), ld(ring + MASK)
    there = ld(ring + SEEN_TAIL) - head
    if there < count:
        tail = ld_acq(ring + TAIL)
        st(ring + SEEN_TAIL, tail)
        there = tail - head
    taken = min(count, there)
    if taken <= 0:
        return 0
    first = min(taken, mask + 1 - (head & mask))
    memcpy(target, ring + SLOTS + (head & mask) * RECORD_BYTES, first * RECORD_BYTES)
    memcpy(target + first * RECORD_BYTES, ring + SLOTS, (taken - first) * RECORD_BYTES)
    return taken


@native(types.void(i8, i8))
def release(ring, count):
    """Pop ``count`` records that were peeked at."""
    st_rel(ring + HEAD, ld(ring + HEAD) + count)


@native(i8(i8, i8, i8))
def pop_many(ring, target, count):
    """Move up to ``count`` of the oldest records to ``target``; returns how many."""
    taken = peek_many(ring, target, count)
    if taken:
        release(ring, taken)
    return taken


@native(types.boolean(i8))
def must_wake(ring):
    """After a push: whether the consumer sleeps and nobody has been told to wake it yet."""
    fence()
    return ld_rlx(ring + PARKED) != 0 and xchg(ring + PARKED, 0) != 0


@native(types.boolean(i8))
def park(ring):
    """Before the consumer sleeps: whether it may, for the next push will wake it.  False if there are records."""
    xchg(ring + PARKED, 1)
    fence()
    if ld_acq(ring + TAIL) != ld(ring + HEAD):
        xchg(ring + PARKED, 0)
        return False
    return True


@native(i8(i8, i8, i8))
def push_all(ring, source, count):
    """Append records if all fit: 0 if they do not, 2 if the consumer must be woken, else 1."""
    if room(ring, count) < count:
        return 0
    push_many(ring, source, count)
    return 2 if must_wake(ring) else 1


# The gather


@native(types.void(i8, i8, i8))
def copy_row(target, source, num_bytes):
    """Copy with as few moves as there are sizes: the last one overlaps the one before."""
    if num_bytes >= 64:
        last = num_bytes - 64
        for done in range(0, last, 64):
            copy_line(target + done, source + done)
        copy_line(target + last, source + last)
    elif num_bytes >= 32:
        copy_32(target, source)
        copy_32(target + num_bytes - 32, source + num_bytes - 32)
    elif num_bytes >= 16:
        copy_16(target, source)
        copy_16(target + num_bytes - 16, source + num_bytes - 16)
    elif num_bytes >= 8:
        copy_8(target, source)
        copy_8(target + num_bytes - 8, source + num_bytes - 8)
    else:
        for done in range(num_bytes):
            copy_1(target + done, source + done)


@native(types.void(i8, i8, i8, i8, i8, i8))
def gather_rows(target, table, row_bytes, ids, count, known):
    """Copy ``count`` rows side by side.  ``known`` ids can be read, of which those that follow are fetched ahead."""
    ahead = 8 if row_bytes > 1024 else 32
    lines = min((row_bytes + LINE - 1) // LINE, MAX_AHEAD_LINES)
    past_caches = target % LINE == 0 and row_bytes % LINE == 0 and known * row_bytes >= PAST_CACHES_BYTES
    for index in range(count):
        if index + ahead < known:
            coming = table + ld(ids + 8 * (index + ahead)) * row_bytes
            for line in range(lines):
                fetch_ahead(coming + line * LINE)
        source = table + ld(ids + 8 * index) * row_bytes
        if past_caches:
            for done in range(0, row_bytes, LINE):
                copy_line_past_caches(target + done, source + done)
        else:
            copy_row(target, source, row_bytes)
        target += row_bytes
    if past_caches:
        drain_stores()


@native(i8(i8, i8, i8))
def first_bad(ids, count, num_rows):
    """Index of the first id that is not in [0, num_rows), -1 if all are."""
    least = most = 0
    for index in range(count):  # without a branch, so that it takes several at once
        least, most = min(least, ld(ids + 8 * index)), max(most, ld(ids + 8 * index))
    index = -1 if least >= 0 and most < num_rows else 0
    while index >= 0 and 0 <= ld(ids + 8 * index) < num_rows:
        index += 1
    return index


# The worker


@native(i8(i8))
def now(lane):
    """Nanoseconds of the clock of ``time.perf_counter``."""
    call_2(ld(lane + GETTIME), ld(lane + CLOCK), lane + SCRATCH)
    return ld(lane + SCRATCH) * 1000000000 + ld(lane + SCRATCH + 8)


@native(types.boolean(i8))
def dropped(lane):
    """Whether the job that was taken is to end now."""
    sequence = ld(lane + TAKEN + 8)
    cell = ld(lane + CANCELS) + (sequence & ld(lane + CANCEL_MASK)) * 8
    return ld_acq(cell) == sequence or ld_acq(lane + STOP) != 0


@native(i8(i8, i8, i8))
def fail(lane, detail, place):
    """Note why a job failed and where."""
    st(lane + OUTCOME + 8, detail)
    st(lane + OUTCOME + 16, place)
    return 0


@native(i8(i8, i8, i8, i8, i8))
def read_some(lane, fd, offset, target, num_bytes):
    """Read what comes at once; returns how many bytes, 0 if it failed."""
    while True:
        got = call_4(ld(lane + PREAD), fd, target, num_bytes, offset)
        if got > 0:
            return got
        if got == 0:
            return fail(lane, END_OF_FILE, offset)
        reason = ld(call_0(ld(lane + ERRNO))) & 0xFFFFFFFF
        if reason != EINTR:
            return fail(lane, reason, offset)


@native(i8(i8, i8, i8))
def advance(lane, done, left):
    """Do the next part of the job that was taken; returns how many bytes or rows, 0 if it failed."""
    job = lane + TAKEN
    op, a, b, c = ld(job), ld(job + 24), ld(job + 32), ld(job + 40)
    if op == OP_GATHER:
        rows = min(left, max(1, STEP_BYTES // b))
        gather_rows(ld(job + 48) + done * b, a, b, c + 8 * done, rows, left)
        return rows
    size = min(left, STEP_BYTES)
    if op == OP_READ:
        return read_some(lane, a, b + done, c + done, size)
    if op == OP_COPY:
        memcpy(b + done, a + done, size)
    else:
        memset(a + done, b, size)
    return size


@native(i8(i8))
def carry_out(lane):
    """Do the job that was taken; returns how it ended."""
    job, total = lane + TAKEN, ld(lane + TAKEN + 16)
    bad = first_bad(ld(job + 40), total, ld(job + 56)) if ld(job) == OP_GATHER and ld(job + 56) > 0 else -1
    if bad >= 0:
        fail(lane, BAD_ID, bad)
        return FAILED
    done = 0
    while done < total:
        if dropped(lane):
            return CANCELLED
        part = advance(lane, done, total - done)
        if part == 0:
            return FAILED
        done += part
    return DONE


@native(types.void(i8, i8))
def store(address, value):
    """Store a word that another thread looks at: a cell of those cancelled, or `STOP` (the worker is woken then)."""
    st_rel(address, value)


@native(types.boolean(i8))
def take(lane):
    """Wait for the next job: first looking again and again, then asleep.  False if the worker is to end."""
    demand = ld(lane + DEMAND)
    looks = 0
    while ld_acq(lane + STOP) == 0:
        if pop_many(demand, lane + TAKEN, 2) == 2:
            return True
        looks += 1
        if looks < SPINS:
            pause()
        elif park(demand):
            call_3(ld(lane + READ), ld(lane + DEMAND_FD), lane + SCRATCH, 8)
            looks = 0
    return False


@native(types.void(i8), nogil=True)
def work(lane):
    """Carry out jobs until told to stop.  The whole life of a worker is this one call."""
    outcome = lane + OUTCOME
    last = 0
    while take(lane):
        sequence = ld(lane + TAKEN + 8)
        if sequence <= last:  # posted twice, for posting was interrupted
            continue
        last = sequence
        memset(outcome, 0, 24)
        st(outcome + 24, sequence)
        st(outcome + 32, now(lane))
        st(outcome, carry_out(lane))
        st(outcome + 40, now(lane))
        # There is room: no more jobs are on their way than outcomes fit.
        if push_all(ld(lane + COMPLETIONS), outcome, 2) == 2:
            st(lane + SCRATCH, 1)
            call_3(ld(lane + WRITE), ld(lane + SIGNAL_FD), lane + SCRATCH, 8)
