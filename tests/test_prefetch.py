"""The prefetch actor: every byte in its place, whatever the order, and no wait without a bound."""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fmstream.actors.chunks import DIRECT_BYTES, GAP_BYTES, Part, ReadChunk, ScatterChunk, split
from fmstream.actors.prefetch import CANCELLED, DONE, FAILED, Piece, PrefetchActor
from fmstream.core.ring import Record
from fmstream.core.telemetry import Telemetry
from fmstream.device.files import SourceFile, Staging
from fmstream.device.homes import FileHome, MemoryHome
from fmstream.errors import ClosedError, ConfigError

PAGE = 4096
NUM_BYTES = 3 << 20
TIMEOUT = 60.0
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@pytest.fixture
def content() -> Bytes:
    return np.frombuffer(random.Random(3).randbytes(NUM_BYTES - 77), np.uint8)


@pytest.fixture
def file(tmp_path: Path, content: Bytes) -> Iterator[SourceFile]:
    path = tmp_path / "weights.bin"
    path.write_bytes(content.tobytes())
    file = SourceFile(path)
    yield file
    file.close()


@pytest.fixture
def actor() -> Iterator[PrefetchActor]:
    actor = PrefetchActor(num_workers=3, staging_bytes=3 * 8 * PAGE, telemetry=Telemetry())
    yield actor
    assert actor.close(TIMEOUT) == ()


def memory_home(data: Bytes) -> MemoryHome:
    return MemoryHome(data.ctypes.data, data.nbytes, data)


def wait_for(actor: PrefetchActor, count: int) -> dict[int, int]:
    """The operations of the next records by ticket."""
    records: list[Record] = []
    for _ in range(count):
        record = actor.completions.pop(TIMEOUT)
        assert record is not None, f"only {len(records)} of {count} records came"
        records.append(record)
    result = {record.sequence: record.op for record in records}
    assert len(result) == count
    return result


class Gate:
    """Reads of a file stop inside it until it is opened; each read that arrives is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Semaphore(0)
        self.opened = threading.Event()
        self.left = threading.Semaphore(0)
        real = SourceFile.read_into

        def read_into(file: SourceFile, address: int, offset: int, nbytes: int, staging: Staging) -> None:
            self.arrived.release()
            try:
                assert self.opened.wait(TIMEOUT)
                real(file, address, offset, nbytes, staging)
            finally:
                self.left.release()

        monkeypatch.setattr(SourceFile, "read_into", read_into)

    def wait_until_inside(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=TIMEOUT)

    def open(self, count: int = 1) -> None:
        """Let the reads through and wait until ``count`` of them have ended."""
        self.opened.set()
        for _ in range(count):
            assert self.left.acquire(timeout=TIMEOUT)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def far_apart(file: SourceFile, target: Bytes, count: int, size: int = 64) -> list[Piece]:
    """Pieces that no chunk can share, for they lie too far apart in the file."""
    stride = 2 * GAP_BYTES
    address = target.ctypes.data
    return [Piece(FileHome(file, i * stride, size), 0, address + i * size, size) for i in range(count)]


def test_ten_thousand_random_tickets_arrive_byte_for_byte(
    actor: PrefetchActor, file: SourceFile, content: Bytes
) -> None:
    rng = random.Random(11)
    memory = np.frombuffer(rng.randbytes(200_000), np.uint8)
    sources = {"file": content, "memory": memory}
    wanted: dict[int, tuple[Bytes, Bytes]] = {}

    def submit(ticket: int) -> None:
        pieces: list[Piece] = []
        expected: list[Bytes] = []
        target = np.full(rng.choice([0, 40, 3000, 3000, 60_000]) + 64, 0xA5, np.uint8)
        at = rng.randrange(64)
        while at < target.size - 1 and rng.random() < 0.9:
            kind = rng.choice(list(sources))
            source = sources[kind]
            size = min(rng.choice([0, 1, 100, 5000, 40_000]), target.size - at)
            base = rng.randrange(source.size - size)
            skipped = rng.randrange(base + 1)
            length = source.size - base + skipped - rng.randrange(source.size - base - size + 1)
            if kind == "file":
                pieces.append(Piece(FileHome(file, base - skipped, length), skipped, target.ctypes.data + at, size))
            else:
                home = MemoryHome(memory.ctypes.data + base - skipped, length, memory)
                pieces.append(Piece(home, skipped, target.ctypes.data + at, size))
            expected.append(source[base : base + size])
            at += size
        before = target[: at - sum(part.size for part in expected)]
        wanted[ticket] = target, np.concatenate([before.copy(), *expected, np.full(target.size - at, 0xA5, np.uint8)])
        actor.submit(ticket, pieces, target, "pieces")

    total = 10_000
    for first in range(0, total, 500):
        for ticket in range(first, first + 500):
            submit(ticket)
        for ticket, op in wait_for(actor, 500).items():
            target, expected = wanted.pop(ticket)
            assert op == DONE
            np.testing.assert_array_equal(target, expected)
    assert not wanted
    assert actor.completions.pop(0.0) is None


def test_large_pieces_are_read_straight_to_where_they_belong(file: SourceFile, content: Bytes) -> None:
    target = Staging(NUM_BYTES)
    home = FileHome(file, 0, file.num_bytes)
    size = DIRECT_BYTES + 999
    shift = 1234  # unaligned, but the same in the file and in memory
    chunks = list(split([Piece(home, shift, target.address + shift, size)], 32 * PAGE))
    assert {type(chunk) for chunk in chunks} == {ReadChunk}
    assert sum(chunk.num_bytes for chunk in chunks) == size
    with_actor = PrefetchActor(num_workers=2, staging_bytes=8 * PAGE)
    with_actor.submit(1, [Piece(home, shift, target.address + shift, size)], target, "large")
    assert wait_for(with_actor, 1) == {1: DONE}
    assert ctypes.string_at(target.address + shift, size) == content[shift : shift + size].tobytes()
    assert ctypes.string_at(target.address + shift + size, 600) == bytes(600)
    with_actor.close()
    target.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing needs staging")
def test_small_neighbours_share_a_read(file: SourceFile) -> None:
    target = np.zeros(1000, np.uint8)
    file.alignment = 512
    home = FileHome(file, 0, file.num_bytes)
    pieces = [Piece(home, at, target.ctypes.data + at, 10) for at in (700, 20, 500)]
    (chunk,) = split(pieces, 8 * PAGE)
    assert isinstance(chunk, ScatterChunk)
    assert [part.source for part in chunk.parts] == [20, 500, 700]
    far = Piece(home, 710 + GAP_BYTES + 1, target.ctypes.data, 10)
    assert len(list(split([*pieces, far], 64 * PAGE))) == 2
    assert len(list(split([*pieces, far], 8 * PAGE))) == 2


def test_what_goes_on_in_source_and_destination_is_one_piece(file: SourceFile) -> None:
    target = Staging(NUM_BYTES)
    home = FileHome(file, 4096, file.num_bytes - 4096)
    half = DIRECT_BYTES // 2
    pieces = [Piece(home, at, target.address + at, half) for at in (half, 0)]
    (chunk,) = split(pieces, 2 * DIRECT_BYTES)
    assert chunk == ReadChunk(file, Part(4096, target.address, DIRECT_BYTES))
    target.close()


def test_a_ticket_without_pieces_is_done_at_once(actor: PrefetchActor) -> None:
    actor.submit(7, [], None, "nothing")
    assert wait_for(actor, 1) == {7: DONE}


def test_the_earliest_ticket_goes_first(file: SourceFile, gate: Gate) -> None:
    actor = PrefetchActor(num_workers=1, staging_bytes=2 * PAGE, telemetry=(telemetry := Telemetry()))
    target = np.zeros(4 * 64, np.uint8)
    for ticket in (5, 3, 9):
        actor.submit(ticket, far_apart(file, target, 4), target, f"ticket {ticket}")
    gate.opened.set()
    assert list(wait_for(actor, 3)) == [5, 3, 9]
    assert [span.name for span in telemetry.spans] == ["ticket 5"] * 4 + ["ticket 3"] * 4 + ["ticket 9"] * 4
    actor.close()


def test_all_workers_share_one_ticket(actor: PrefetchActor, file: SourceFile, gate: Gate, content: Bytes) -> None:
    target = np.zeros(3 * 64, np.uint8)
    actor.submit(1, far_apart(file, target, 3), target, "shared")
    gate.wait_until_inside(3)
    assert actor.completions.pop(0.0) is None
    gate.open(3)
    assert wait_for(actor, 1) == {1: DONE}
    np.testing.assert_array_equal(target[64:128], content[2 * GAP_BYTES : 2 * GAP_BYTES + 64])


def test_telemetry_counts_bytes_spans_and_the_union_of_busy_time(
    actor: PrefetchActor, file: SourceFile, gate: Gate
) -> None:
    telemetry = actor._telemetry
    target = np.zeros(3 * 64, np.uint8)
    actor.submit(1, far_apart(file, target, 3), target, "block 1")
    gate.wait_until_inside(3)
    gate.open(3)
    wait_for(actor, 1)
    spans = list(telemetry.spans)
    assert telemetry.link_bytes == sum(span.num_bytes for span in spans) == 3 * 64
    assert {(span.lane, span.name) for span in spans} == {(f"copy {i}", "block 1") for i in range(3)}
    # All three were busy at the same time, so the union reaches from the first start to the last end.
    union = max(span.end for span in spans) - min(span.start for span in spans)
    assert telemetry.link_seconds == pytest.approx(union, rel=1e-6)
    assert telemetry.link_seconds < sum(span.end - span.start for span in spans)


def test_a_failure_fails_its_ticket_only(
    actor: PrefetchActor, file: SourceFile, content: Bytes, tmp_path: Path
) -> None:
    (tmp_path / "short").write_bytes(b"123")
    short = SourceFile(tmp_path / "short")
    target = np.zeros(300, np.uint8)
    address = target.ctypes.data
    actor.submit(1, [Piece(FileHome(short, 0, 100), 0, address, 100)], target, "bad")
    actor.submit(2, [Piece(FileHome(file, 50, 100), 0, address + 100, 100)], target, "good")
    assert wait_for(actor, 2) == {1: FAILED, 2: DONE}
    error = actor.error(1)
    assert isinstance(error, OSError)
    assert "ended early" in str(error)
    assert actor.error(2) is None
    np.testing.assert_array_equal(target[100:200], content[50:150])
    short.close()


def test_a_failure_drops_the_rest_and_is_reported_when_nothing_runs(
    file: SourceFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def read_into(file: SourceFile, address: int, offset: int, nbytes: int, staging: Staging) -> None:
        calls.append(offset)
        if offset == 0:
            assert inside.wait(TIMEOUT)
            raise OSError("the disk is gone")
        inside.set()
        assert go_on.wait(TIMEOUT)

    monkeypatch.setattr(SourceFile, "read_into", read_into)
    actor = PrefetchActor(num_workers=2, staging_bytes=4 * PAGE)
    target = np.zeros(6 * 64, np.uint8)
    ours = threading.Event()
    weakref.finalize(keep := Keep(), ours.set)
    actor.submit(1, far_apart(file, target, 6), keep, "bad")
    del keep
    assert inside.wait(TIMEOUT)
    # Only the worker that failed is free, so once this has come it has recorded its failure.
    marker, there = np.ones(2 * PAGE, np.uint8), np.zeros(2 * PAGE, np.uint8)  # more than is copied on the spot
    actor.submit(2, [Piece(memory_home(marker), 0, there.ctypes.data, 2 * PAGE)], there, "marker")
    assert wait_for(actor, 1) == {2: DONE}
    assert actor.completions.pop(0.0) is None
    assert not ours.is_set()
    go_on.set()
    assert wait_for(actor, 1) == {1: FAILED}
    assert str(actor.error(1)) == "the disk is gone"
    assert sorted(calls) == [0, 2 * GAP_BYTES]
    assert ours.wait(TIMEOUT), "the error's traceback keeps the destination alive"
    actor.close()


class Keep:
    """Something whose end can be seen."""


def test_cancel_drops_what_has_not_begun_and_waits_for_what_has(file: SourceFile, gate: Gate) -> None:
    actor = PrefetchActor(num_workers=1, staging_bytes=2 * PAGE)
    target = np.zeros(4 * 64, np.uint8)
    for ticket in (1, 2, 3):
        actor.submit(ticket, far_apart(file, target, 4), target, "pieces")
    gate.wait_until_inside()
    actor.cancel([2, 1, 99, 2])
    assert wait_for(actor, 1) == {2: CANCELLED}
    assert actor.completions.pop(0.0) is None  # ticket 1 still writes
    gate.open(5)
    assert list(wait_for(actor, 2).items()) == [(1, CANCELLED), (3, DONE)]
    actor.cancel([1, 2, 3])
    assert actor.completions.pop(0.0) is None
    actor.submit(1, far_apart(file, target, 1), target, "again")
    assert wait_for(actor, 1) == {1: DONE}
    actor.close()


def test_abandon_leaves_a_blocked_read_with_its_memory(file: SourceFile, gate: Gate, content: Bytes) -> None:
    actor = PrefetchActor(num_workers=1, staging_bytes=2 * PAGE, telemetry=(telemetry := Telemetry()))
    freed = threading.Event()
    target = np.zeros(2 * 64, np.uint8)
    weakref.finalize(keep := Keep(), freed.set)
    actor.submit(1, far_apart(file, target, 2), keep, "blocked")
    del keep
    actor.submit(2, far_apart(file, target, 2), None, "waiting")
    gate.wait_until_inside()
    assert actor.abandon() == (1,)
    assert wait_for(actor, 1) == {2: CANCELLED}
    gc.collect()
    assert not freed.is_set()

    other = np.arange(64, dtype=np.uint8)
    result = np.zeros(64, np.uint8)
    actor.submit(1, [Piece(memory_home(other), 0, result.ctypes.data, 64)], result, "new crew")
    assert wait_for(actor, 1) == {1: DONE}
    np.testing.assert_array_equal(result, other)

    gate.open()
    assert freed.wait(TIMEOUT)
    np.testing.assert_array_equal(target[:64], content[:64])
    assert actor.completions.pop(0.0) is None
    assert [span.name for span in telemetry.spans] == ["new crew"]
    actor.close()


def test_close_does_not_wait_for_a_blocked_read(file: SourceFile, gate: Gate) -> None:
    actor = PrefetchActor(num_workers=1, staging_bytes=2 * PAGE)
    target = np.zeros(64, np.uint8)
    actor.submit(1, far_apart(file, target, 1), target, "blocked")
    actor.submit(2, far_apart(file, target, 1), target, "waiting")
    gate.wait_until_inside()
    assert actor.close(timeout=0.0) == (1,)
    assert actor.close() == ()
    assert wait_for(actor, 1) == {2: CANCELLED}
    assert actor.completions.pop(TIMEOUT) is None  # closed, so it does not wait
    with pytest.raises(ClosedError, match="'late'"):
        actor.submit(3, [], None, "late")
    gate.open()


def test_close_waits_for_a_read_that_ends(file: SourceFile, gate: Gate) -> None:
    actor = PrefetchActor(num_workers=1, staging_bytes=2 * PAGE)
    target = np.zeros(2 * 64, np.uint8)
    actor.submit(1, far_apart(file, target, 2), target, "running")
    gate.wait_until_inside()
    gate.opened.set()
    assert actor.close(TIMEOUT) == ()
    assert wait_for(actor, 1) == {1: CANCELLED}


def copy_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("fmstream copy")}


def test_threads_start_with_the_first_request_and_end_with_the_actor(file: SourceFile) -> None:
    before = copy_threads()
    actor = PrefetchActor(num_workers=2, staging_bytes=4 * PAGE)
    assert copy_threads() == before
    actor.close()

    actor = PrefetchActor(num_workers=2, staging_bytes=4 * PAGE)
    actor.submit(1, [], None, "first")
    mine = copy_threads() - before
    assert len(mine) == 2
    assert all(thread.daemon for thread in mine)
    del actor
    gc.collect()
    for thread in mine:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "an actor that was dropped left its threads"


def test_a_ticket_twice_on_its_way_is_a_mistake(actor: PrefetchActor, file: SourceFile, gate: Gate) -> None:
    target = np.zeros(64, np.uint8)
    actor.submit(1, far_apart(file, target, 1), target, "first")
    gate.wait_until_inside()
    with pytest.raises(AssertionError, match="ticket 1"):
        actor.submit(1, far_apart(file, target, 1), target, "second")
    gate.open()
    assert wait_for(actor, 1) == {1: DONE}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrefetchActor(num_workers=0), "0 prefetch workers"),
        (lambda: PrefetchActor(num_workers=2, staging_bytes=16_383), "give at least 16384"),
    ],
)
def test_impossible_sizes_name_the_limit(make: Callable[[], PrefetchActor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


EXIT_WITH_A_BLOCKED_READ = """
import sys, threading
from fmstream.actors.prefetch import Piece, PrefetchActor
from fmstream.device.files import SourceFile
from fmstream.device.homes import FileHome

inside = threading.Event()
def read_into(*args):
    inside.set()
    threading.Event().wait()
SourceFile.read_into = read_into
file = SourceFile(sys.argv[1])
target = bytearray(64)
actor = PrefetchActor()
actor.submit(1, [Piece(FileHome(file, 0, 64), 0, 0, 64)], target, "blocked")
assert inside.wait(60)
"""

FORK = (
    EXIT_WITH_A_BLOCKED_READ
    + """
import os
from fmstream.errors import ForkedError
actor._lock.acquire()
actor._crew._lock.acquire()
child = os.fork()
if child == 0:
    try:
        actor.submit(2, [], None, "in the child")
    except ForkedError as error:
        assert "forked child" in str(error)
        actor.cancel([1])
        assert actor.abandon() == actor.close() == ()
        print("refused", flush=True)
    sys.exit(7)
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 7, status
"""
)


def run_script(script: str, *args: str) -> str:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script, *args], timeout=TIMEOUT, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_blocked_read_does_not_hold_up_the_exit(file: SourceFile) -> None:
    run_script(EXIT_WITH_A_BLOCKED_READ, file.path)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_is_refused_and_ends(file: SourceFile) -> None:
    assert run_script(FORK, file.path) == "refused\n"
