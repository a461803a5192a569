"""Tickets, workers and processes end well: cancelled, closed, dropped, forked, interrupted."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from fmstream.actors.host_workers import HostWorkers
from fmstream.core.jobs import Status
from fmstream.errors import CancelledRun, ClosedError, ForkedError
from tests.kit_workers import TIMEOUT, Gate, address, replace_reads
from tests.tree import ROOT


class Keep:
    """Something whose end can be seen."""


def test_what_is_kept_is_let_go_when_the_ticket_has_ended(own: HostWorkers) -> None:
    out = np.zeros(64, np.uint8)
    freed = threading.Event()
    weakref.finalize(keep := Keep(), freed.set)
    ticket = own.fill(address(out), 1, 64, keep=keep)
    del keep
    own.wait(ticket, TIMEOUT)
    gc.collect()
    assert freed.is_set()


def test_a_task_that_is_cancelled_leaves_the_ticket(
    own: HostWorkers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_reads(own, gate.read_at, monkeypatch)
    out = np.zeros(8, np.uint8)

    async def main() -> None:
        ticket = own.read(0, 0, address(out), 8, keep=out)
        waiting = asyncio.ensure_future(own.completed(ticket))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not own.is_done(ticket)
        gate.opened.set()
        await ticket

    asyncio.run(main())
    assert (out == 1).all()
    assert own._num_awaiting == 0


def test_one_that_has_begun_is_cancelled_when_it_ends(
    own: HostWorkers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_reads(own, gate.read_at, monkeypatch)
    out = np.zeros(64, np.uint8)
    first = own.read(0, 0, address(out), 8, keep=out)
    others = [own.fill(address(out) + i, 9, 1) for i in (8, 9)]
    assert gate.inside.wait(TIMEOUT)
    for ticket in (*others, first):
        own.cancel(ticket)
    assert not own.wait(first, 0.0)
    assert not own.wait(others[0], 0.01)
    gate.opened.set()
    for ticket in others:
        with pytest.raises(CancelledRun):
            own.wait(ticket, TIMEOUT)
    own.wait(first, TIMEOUT)  # its last step was the one that was running
    assert out.tolist() == [1] * 8 + [0] * 56


def test_close_leaves_a_blocked_read_with_its_memory(
    own: HostWorkers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_reads(own, gate.read_at, monkeypatch)
    freed = threading.Event()
    weakref.finalize(keep := Keep(), freed.set)
    out = np.zeros(8, np.uint8)
    blocked = own.read(0, 0, address(out), 8, keep=keep, name="blocked")
    waiting = own.fill(address(out), 2, 8, name="waiting")
    del keep
    assert gate.inside.wait(TIMEOUT)
    assert own.close(0.0) == (blocked, waiting)
    (thread,) = [lane._thread for lane in own._lanes]
    del own._lanes[:]
    own._running.clear()
    own._backlog.clear()
    own._load.clear()
    gc.collect()
    assert not freed.is_set()
    gate.opened.set()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    gc.collect()
    assert freed.is_set()
    assert (out == 1).all()


def test_cancel_at_any_moment_ends_every_ticket(own: HostWorkers) -> None:
    out = np.zeros(4 << 20, np.uint8)
    for num_before in range(0, 40, 3):
        tickets = [own.fill(address(out), 1, len(out), keep=out) for _ in range(20)]
        own.is_done(tickets[num_before // 2])
        for ticket in tickets[num_before % 20 :]:
            own.cancel(ticket)
        for ticket in tickets:
            try:
                assert own.wait(ticket, TIMEOUT)
            except CancelledRun:
                assert ticket.status is Status.CANCELLED
    own.cancel(tickets[0])
    assert own._running == {}
    assert own._lanes[0].keeps == {}
    assert set(own._load.values()) == {0}


def test_close_ends_what_waits_and_refuses_more(own: HostWorkers) -> None:
    out = np.zeros(8 << 20, np.uint8)
    tickets = [own.fill(address(out), 1, len(out), keep=out) for _ in range(50)]
    assert own.close(TIMEOUT) == ()
    assert own.close() == ()
    assert all(own.is_done(ticket) for ticket in tickets)
    assert tickets[-1].status is Status.CANCELLED
    with pytest.raises(CancelledRun, match="cancelled, or its workers were closed"):
        own.wait(tickets[-1])
    with pytest.raises(ClosedError, match="'late'"):
        own.fill(0, 0, 1, name="late")


def test_workers_that_are_dropped_end(own: HostWorkers) -> None:
    dropped = HostWorkers(2, native=own.native)
    threads = [lane._thread for lane in dropped._lanes]
    assert all(thread.daemon for thread in threads)
    del dropped
    gc.collect()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_descriptors_and_threads_are_given_back(own: HostWorkers) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        made = HostWorkers(2, native=own.native)
        out = np.zeros(8, np.uint8)
        made.wait(made.fill(address(out), 1, 8), TIMEOUT)
        made.close(TIMEOUT)

    once()
    before = descriptors(), threading.active_count()
    for _ in range(20):
        once()
    assert (descriptors(), threading.active_count()) == before


# What happens at the end of a process, in one of its own

START = """
import ctypes, os, sys, threading
import numpy as np
from fmstream.actors.host_workers import HostWorkers
workers = HostWorkers(2, native=sys.argv[1] == "native")
out = np.zeros(1 << 20, np.uint8)
"""
EXIT = START + "workers.fill(out.ctypes.data, 1, len(out), keep=out)\nprint('end')"
IDLE_EXIT = START + "workers.wait(workers.fill(out.ctypes.data, 1, len(out)))\nprint('end')"
FORK = (
    START
    + """
from fmstream.errors import ForkedError
ticket = workers.fill(out.ctypes.data, 1, len(out), keep=out)
workers._lock.acquire()
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: workers.fill(0, 0, 1), lambda: workers.wait(ticket)):
        try:
            call()
        except ForkedError as error:
            refused += "forked child" in str(error)
    workers.cancel(ticket)
    assert workers.close() == ()
    print("refused", refused, flush=True)
    sys.exit(7)
workers._lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert workers.wait(ticket, 30.0)
print("end")
"""
)
INTERRUPT = (
    START
    + """
import signal
from fmstream.actors.tickets import Ticket
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    workers.wait(Ticket(workers, "never"))
except KeyboardInterrupt:
    print("interrupted")
assert workers.wait(workers.fill(out.ctypes.data, 1, len(out)), 30.0)
print("end")
"""
)


@pytest.mark.parametrize("kind", ["native", "portable"])
@pytest.mark.parametrize(
    ("script", "printed"),
    [(EXIT, ["end"]), (IDLE_EXIT, ["end"]), (FORK, ["refused 2", "end"]), (INTERRUPT, ["interrupted", "end"])],
    ids=["exit", "idle-exit", "fork", "interrupt"],
)
@pytest.mark.skipif(sys.platform == "win32", reason="no fork, no signals to itself")
def test_the_process_ends_well(kind: str, script: str, printed: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, kind], timeout=TIMEOUT, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed


def test_a_child_that_was_forked_is_told(own: HostWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_pid", own._pid + 1)
    with pytest.raises(ForkedError, match="'fill' is asked for in a forked child"):
        own.fill(0, 0, 1)
    assert own.close() == ()
    monkeypatch.undo()
    own._closed = False


@pytest.mark.skipif(sys.platform == "win32", reason="no native workers")
def test_a_native_worker_needs_no_gil() -> None:
    own = HostWorkers(1, native=True)
    out = np.zeros(64, np.uint8)
    cell = ctypes.c_uint8.from_address(address(out) + 63)
    limit = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody takes the GIL from this thread while it counts
    try:
        ticket = own.fill(address(out), 1, 64)
        looks = 0
        while not cell.value and looks < 50_000_000:
            looks += 1
    finally:
        sys.setswitchinterval(limit)
    assert cell.value == 1
    assert own.wait(ticket, TIMEOUT)
    own.close()
