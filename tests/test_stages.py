"""Jobs begin in order, stop behind a failure, and end when nothing works on them any more."""

from __future__ import annotations

import os
import threading
import weakref

import pytest

from fmstream.actors.stages import Job, StagePool
from fmstream.errors import ForkedError
from tests.kit_runtime import TIMEOUT, Injected, Latch, leaves_nothing

__all__ = ["leaves_nothing"]


class Ends:
    """Counts what a pool tells of its end."""

    def __init__(self) -> None:
        self.settled = 0
        self.last = 0

    def settle(self) -> None:
        self.settled += 1

    def end(self) -> None:
        self.last += 1


def pool_of(number: int) -> tuple[StagePool, Ends]:
    ends = Ends()
    return StagePool(number, ends.settle, ends.end), ends


def test_one_thread_does_jobs_in_order() -> None:
    pool, ends = pool_of(1)
    done: list[int] = []
    jobs = [Job(lambda lane, n=n: done.append(n)) for n in range(50)]
    for job in jobs:
        pool.submit(job)
    assert jobs[-1].wait(TIMEOUT)
    assert done == list(range(50))
    assert pool.close()
    assert (ends.settled, ends.last) == (1, 1)


def test_jobs_behind_a_failure_are_not_begun_and_those_before_it_are() -> None:
    pool, _ = pool_of(2)
    first, failed = Latch(), threading.Event()

    def fail(lane: str) -> None:
        failed.set()
        raise Injected

    jobs = [Job(lambda lane: first.wait_here()), Job(fail), Job(lambda lane: None)]
    for job in jobs:
        pool.submit(job)
    assert failed.wait(TIMEOUT)
    assert jobs[2].wait(TIMEOUT)
    first.open()
    assert jobs[0].wait(TIMEOUT)
    assert [job.carried_out for job in jobs] == [True, False, False]
    assert isinstance(jobs[1].error, Injected)
    assert jobs[2].error is None
    assert pool.close()


def test_a_released_pool_begins_nothing_and_ends_once() -> None:
    pool, ends = pool_of(2)
    latch = Latch()
    running, waiting = Job(lambda lane: latch.wait_here()), Job(lambda lane: None)
    pool.submit(running)
    latch.wait_reached()
    pool.release()
    pool.submit(waiting)
    assert not pool.close(timeout=0.0)
    assert ends.last == 0
    latch.open()
    assert running.wait(TIMEOUT)
    assert pool.close()
    assert not waiting.done
    assert ends.last == 1


def test_a_pool_without_threads_ends_at_once() -> None:
    pool, ends = pool_of(3)
    assert pool.close()
    assert pool.close()
    assert (ends.settled, ends.last) == (0, 1)


def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Thing:
        pass

    pool, _ = pool_of(1)
    thing = Thing()
    alive = weakref.ref(thing)
    job = Job(lambda lane, kept=thing: None)
    pool.submit(job)
    assert job.wait(TIMEOUT)
    after = Job(lambda lane: None)
    pool.submit(after)
    assert after.wait(TIMEOUT)
    del thing, job
    assert alive() is None
    assert pool.close()


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, ends = pool_of(1)
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ForkedError):
            pool.submit(Job(lambda lane: None))
        pool.release()
        assert ends.last == 0
    assert pool.close()
