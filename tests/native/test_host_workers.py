"""Workers of the host, native and portable, move the bytes that they are asked to, and say what went wrong."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmstream.actors import lanes
from fmstream.actors.host_workers import HostWorkers
from fmstream.core import jobs
from fmstream.core.jobs import Status
from fmstream.core.wake import SocketWake, open_wake, wait
from fmstream.errors import ConfigError
from tests.kit_workers import TIMEOUT, address, at_offset, noise_bytes, replace_reads


@settings(max_examples=150)
@given(
    row_bytes=st.one_of(st.integers(1, 200), st.sampled_from([256, 1000, 4096, 65_536])),
    num_rows=st.integers(1, 40),
    count=st.integers(0, 300),
    offsets=st.tuples(*[st.integers(0, 70)] * 2),
    seed=st.integers(0, 99),
)
def test_a_gather_moves_the_rows_and_nothing_else(
    workers: HostWorkers, row_bytes: int, num_rows: int, count: int, offsets: tuple[int, int], seed: int
) -> None:
    count = min(count, max(1, (4 << 20) // row_bytes))
    rng = np.random.default_rng(seed)
    table = at_offset(row_bytes * num_rows, offsets[0])
    table[:] = noise_bytes(len(table), seed)
    ids = rng.integers(0, num_rows, count)
    room = at_offset(row_bytes * count + 64, offsets[1])
    room[:] = 0xA5
    out = room[: row_bytes * count]
    ticket = workers.gather(address(table), row_bytes, address(ids), count, address(room), num_rows=num_rows)
    assert workers.wait(ticket, TIMEOUT)
    assert ticket.status is Status.DONE
    np.testing.assert_array_equal(out.reshape(count, row_bytes), table.reshape(num_rows, row_bytes)[ids])
    assert (room[row_bytes * count :] == 0xA5).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "int16", "int8", "complex128"])
def test_rows_past_the_caches_are_the_same(workers: HostWorkers, dtype: str) -> None:
    table = np.arange(64 * 4096).reshape(4096, 64).astype(dtype)
    ids = np.random.default_rng(1).integers(0, 4096, 40_000)
    out = at_offset(table[0].nbytes * len(ids), 0).view(dtype).reshape(-1, 64)
    workers.wait(workers.gather(address(table), table[0].nbytes, address(ids), len(ids), address(out)), TIMEOUT)
    np.testing.assert_array_equal(out, table[ids])


@pytest.mark.parametrize("bad", [-1, 7, 2**40, -(2**63)])
def test_a_bad_id_fails_before_anything_moves(workers: HostWorkers, bad: int) -> None:
    table, ids = np.ones((7, 1024)), np.zeros(400, np.int64)
    ids[399] = bad
    out = np.zeros((400, 1024))
    ticket = workers.gather(address(table), 8192, address(ids), 400, address(out), num_rows=7)
    with pytest.raises(IndexError, match="the id at position 399 is not a row of a table of 7 rows"):
        workers.wait(ticket, TIMEOUT)
    assert not out[200:].any()
    assert ticket.status is Status.FAILED


@given(
    num=st.integers(0, 3 << 20), offsets=st.tuples(st.integers(0, 70), st.integers(0, 70)), value=st.integers(0, 255)
)
@settings(max_examples=30)
def test_copies_and_fills_are_exact(workers: HostWorkers, num: int, offsets: tuple[int, int], value: int) -> None:
    source, room = at_offset(num, offsets[0]), at_offset(num + 64, offsets[1])
    source[:] = noise_bytes(num, value)
    room[:] = value
    assert workers.wait(workers.copy(address(source), address(room), num, keep=(source, room)), TIMEOUT)
    np.testing.assert_array_equal(room[:num], source)
    assert (room[num:] == value).all()
    assert workers.wait(workers.fill(address(room), value ^ 255, num), TIMEOUT)
    assert (room[:num] == value ^ 255).all()
    assert (room[num:] == value).all()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A descriptor and the 3 MB that are in the file."""
    content = noise_bytes(3_000_001).tobytes()
    path = tmp_path / "file"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    yield fd, content
    os.close(fd)


@pytest.mark.parametrize(("offset", "num"), [(0, 3_000_001), (1, 10), (2_999_999, 2), (123_457, 1_234_567), (5, 0)])
def test_reads_are_exact(workers: HostWorkers, file: tuple[int, bytes], offset: int, num: int) -> None:
    out = at_offset(num + 8, 3)
    assert workers.wait(workers.read(file[0], offset, address(out), num, keep=out), TIMEOUT)
    assert out[:num].tobytes() == file[1][offset : offset + num]
    assert not out[num:].any()


def test_a_read_past_the_end_says_where_the_file_ends(workers: HostWorkers, file: tuple[int, bytes]) -> None:
    out = np.zeros(100, np.uint8)
    ticket = workers.read(file[0], 2_999_950, address(out), 100)
    with pytest.raises(OSError, match=r"reading 100 bytes at offset 2999950 .* the file ends at offset 3000001"):
        workers.wait(ticket, TIMEOUT)
    assert out[:51].tobytes() == file[1][-51:]


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors of other kinds")
def test_a_failing_read_names_errno_and_offset(workers: HostWorkers, tmp_path: Path) -> None:
    out = np.zeros(100, np.uint8)
    reader, writer = os.pipe()
    folder = os.open(tmp_path, os.O_RDONLY)
    cases = [(1 << 20, errno.EBADF), (reader, errno.ESPIPE), (folder, errno.EISDIR), (writer, errno.ESPIPE)]
    try:
        for fd, number in cases:
            with pytest.raises(OSError, match=f"at offset 7 .*errno {number}") as caught:
                workers.wait(workers.read(fd, 7, address(out), 100), TIMEOUT)
            # Of a descriptor that is wrong in two ways either may be told.
            assert caught.value.errno == number
    finally:
        for fd in (reader, writer, folder):
            os.close(fd)
    assert not out.any()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_a_read_that_fails_midway_says_where(own: HostWorkers, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_at(fd: int, target: int, offset: int, num_bytes: int) -> int:
        if offset >= 30:
            raise OSError(number, "as a disk that fails")
        return 10

    replace_reads(own, read_at, monkeypatch)
    out = np.zeros(100, np.uint8)
    with pytest.raises(
        OSError, match=f"reading 100 bytes at offset 0 .* failed at offset 30 .errno {number}"
    ) as caught:
        own.wait(own.read(5, 0, address(out), 100), TIMEOUT)
    assert caught.value.errno == number


def test_short_and_interrupted_reads_go_on(own: HostWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def read_at(fd: int, target: int, offset: int, num_bytes: int) -> int:
        calls.append((offset, num_bytes))
        if own.native and len(calls) == 2:
            raise OSError(errno.EINTR, "a signal")
        ctypes.memset(target, offset, min(7, num_bytes))
        return min(7, num_bytes)

    replace_reads(own, read_at, monkeypatch)
    out = np.zeros(20, np.uint8)
    assert own.wait(own.read(5, 3, address(out), 20), TIMEOUT)
    assert out.tolist() == [3] * 7 + [10] * 7 + [17] * 6
    assert list(dict.fromkeys(calls)) == [(3, 20), (10, 13), (17, 6)]


def test_nothing_to_do_is_done_at_once(workers: HostWorkers) -> None:
    ticket = workers.copy(0, 0, 0)
    assert workers.is_done(ticket)
    assert ticket.status is Status.DONE


def test_more_requests_than_fit_are_all_carried_out(workers: HostWorkers) -> None:
    out = np.zeros(5000, np.uint8)
    tickets = [workers.fill(address(out) + i, i % 251 + 1, 1) for i in range(5000)]
    for ticket in reversed(tickets):
        assert workers.wait(ticket, TIMEOUT)
    np.testing.assert_array_equal(out, np.arange(5000) % 251 + 1)


def test_tickets_are_awaited(workers: HostWorkers) -> None:
    out = np.zeros(400, np.uint8)

    async def main() -> None:
        tickets = [workers.fill(address(out) + i, 1, 1) for i in range(200)]
        for ticket in tickets:
            await ticket
        await asyncio.gather(*(workers.completed(workers.fill(address(out) + i, 1, 1)) for i in range(200, 400)))
        with pytest.raises(IndexError):
            await workers.gather(address(out), 1, address(np.array([9])), 1, address(out), num_rows=3)

    asyncio.run(main())
    asyncio.run(main())
    assert (out == 1).all()
    assert not workers._readers
    assert workers._num_awaiting == 0


def test_threads_and_tasks_may_wait_at_once(workers: HostWorkers) -> None:
    out = np.zeros(16_000, np.uint8)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            first = address(out) + 2000 * number
            if number % 2:
                for i in range(2000):
                    assert workers.wait(workers.fill(first + i, number + 1, 1), TIMEOUT)
            else:
                asyncio.run(many(first, number + 1))
        except BaseException as error:
            failures.append(error)

    async def many(first: int, value: int) -> None:
        for i in range(2000):
            await workers.fill(first + i, value, 1)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert failures == []
    np.testing.assert_array_equal(out, np.repeat(np.arange(1, 9), 2000))


def test_a_wait_that_takes_too_long_says_so(own: HostWorkers) -> None:
    out = np.zeros(64 << 20, np.uint8)
    ticket = own.fill(address(out), 1, len(out), keep=out)
    assert own.wait(ticket, 0.0) in {True, False}
    assert own.wait(ticket, TIMEOUT)


def test_impossible_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="0 host workers: at least 1 is needed"):
        HostWorkers(0)
    monkeypatch.setitem(sys.modules, "fmstream.actors.native", None)
    with pytest.raises(ConfigError, match="native workers cannot be had here"):
        lanes.native_starter()
    with pytest.raises(ConfigError, match="native=False"):
        HostWorkers(1, native=True)
    fallen = HostWorkers(1)
    assert not fallen.native
    assert "cannot be had here" in fallen.why_portable
    fallen.close()


def test_what_native_code_knows_of_jobs_is_what_python_knows() -> None:
    native = pytest.importorskip("fmstream.core._native")
    assert (native.OP_GATHER, native.OP_COPY, native.OP_READ) == (jobs.Op.GATHER, jobs.Op.COPY, jobs.Op.READ)
    assert (native.DONE, native.FAILED, native.CANCELLED) == (Status.DONE, Status.FAILED, Status.CANCELLED)
    assert (native.BAD_ID, native.END_OF_FILE, native.EINTR) == (jobs.BAD_ID, jobs.END_OF_FILE, errno.EINTR)


@pytest.mark.parametrize("make", [open_wake, SocketWake])
def test_a_signal_is_kept_until_somebody_waits(make: type[SocketWake]) -> None:
    wake = make()
    assert not wait(wake, 0.0)
    for _ in range(3):
        wake.signal()
    assert wait(wake, TIMEOUT)
    assert not wait(wake, 0.0)
    os.write(wake.signal_fd, (1).to_bytes(8, sys.byteorder))  # as native code does
    assert wait(wake, TIMEOUT)
    wake.close()
    wake.close()
    wake.signal()
