"""The ring's source, as shipped, has no race and loses no wake-up; changed in any of these places it has or does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fmstream.core._native import HEAD, MASK, RECORD_BYTES, TAIL
from tests.native.weak import PRIVATE, Broken, Recorder, Thread, explore, shipped, source

RING = 0
OUT, IN, DATA = PRIVATE, 2 * PRIVATE, 10_000
Mutate = Callable[[str], str]


def words(number: int) -> tuple[int, ...]:
    return 7, number, number + 10, number + 20


def read_records(recorder: Recorder, count: int) -> list[tuple[int, ...]]:
    return [tuple(recorder.do("read", OUT + RECORD_BYTES * i + 8 * j) for j in range(4)) for i in range(count)]


def write_records(recorder: Recorder, first: int, count: int) -> None:
    for i in range(count):
        for j, word in enumerate(words(first + i)):
            recorder.do("write", IN + RECORD_BYTES * i + 8 * j, word)


def one_by_one(num_records: int, mutate: Mutate) -> list[Thread]:
    """Records are pushed and popped one by one; who cannot go on looks again and again."""

    def producer(recorder: Recorder) -> Any:
        push = shipped(recorder, mutate)["push"]
        for number in range(num_records):
            while not push(RING, *words(number)):
                recorder.do("changed", RING + HEAD)

    def consumer(recorder: Recorder) -> Any:
        pop_many = shipped(recorder, mutate)["pop_many"]
        got: list[tuple[int, ...]] = []
        while len(got) < num_records:
            if pop_many(RING, OUT, 1):
                got += read_records(recorder, 1)
            else:
                recorder.do("changed", RING + TAIL)
        return tuple(got)

    return [producer, consumer]


def in_batches(num_records: int, mutate: Mutate) -> list[Thread]:
    """Records are pushed and popped by twos, as many as fit or are there."""

    def producer(recorder: Recorder) -> Any:
        push_many = shipped(recorder, mutate)["push_many"]
        number = 0
        while number < num_records:
            count = min(2, num_records - number)
            write_records(recorder, number, count)
            pushed = push_many(RING, IN, count)
            number += pushed
            if not pushed:
                recorder.do("changed", RING + HEAD)

    def consumer(recorder: Recorder) -> Any:
        pop_many = shipped(recorder, mutate)["pop_many"]
        got: list[tuple[int, ...]] = []
        while len(got) < num_records:
            count = pop_many(RING, OUT, 2)
            got += read_records(recorder, count)
            if not count:
                recorder.do("changed", RING + TAIL)
        return tuple(got)

    return [producer, consumer]


def asleep(num_records: int, mutate: Mutate) -> list[Thread]:
    """The consumer sleeps where nothing is there; what a record tells of was written before it."""

    def producer(recorder: Recorder) -> Any:
        push_all = shipped(recorder, mutate)["push_all"]
        for number in range(num_records):
            recorder.do("write", DATA + 8 * number, number)
            write_records(recorder, number, 1)
            while (pushed := push_all(RING, IN, 1)) == 0:
                recorder.do("changed", RING + HEAD)
            if pushed == 2:
                recorder.do("signal")

    def consumer(recorder: Recorder) -> Any:
        ring = shipped(recorder, mutate)
        got: list[tuple[int, ...]] = []
        while len(got) < num_records:
            if ring["pop_many"](RING, OUT, 1):
                got += read_records(recorder, 1)
                assert recorder.do("read", DATA + 8 * got[-1][1]) == got[-1][1]
            elif ring["park"](RING):
                recorder.do("sleep")
        return tuple(got)

    return [producer, consumer]


Scenario = Callable[[int, Mutate], list[Thread]]


def check(scenario: Scenario, capacity: int, num_records: int, mutate: Mutate = str) -> int:
    """Explore; every run must give all records in order.  Returns the number of states."""
    num_states, results = explore(scenario(num_records, mutate), {RING + MASK: capacity - 1})
    expected = (None, tuple(words(number) for number in range(num_records)))
    if results != [expected]:
        raise Broken(f"records were lost or changed: {results}")
    return num_states


@pytest.mark.parametrize(
    ("scenario", "capacity", "num_records"),
    [(one_by_one, 1, 3), (one_by_one, 2, 4), (in_batches, 2, 4), (in_batches, 4, 5), (asleep, 1, 2), (asleep, 2, 2)],
)
def test_the_shipped_source_is_right_in_every_run(scenario: Scenario, capacity: int, num_records: int) -> None:
    assert check(scenario, capacity, num_records) > 50


def change(old: str, new: str, function: str) -> Mutate:
    """Put ``new`` in the place of ``old`` in one function of the source."""

    def mutate(text: str) -> str:
        start = text.index(f"def {function}(")
        end = text.find("\ndef ", start + 1)
        body = text[start : end if end >= 0 else len(text)]
        assert body.count(old) == 1, f"{old!r} is not once in {function}"
        return text.replace(body, body.replace(old, new))

    return mutate


SLOT = "    st(slot, op)\n    st(slot + 8, page)\n    st(slot + 16, frame)\n    st(slot + 24, sequence)\n"
PUBLISH = "    st_rel(ring + TAIL, tail + 1)\n"
COPY = "    memcpy(target, ring + SLOTS"
MUTANTS: dict[str, tuple[Scenario, int, int, Mutate]] = {
    "tail stored relaxed": (one_by_one, 2, 3, change("st_rel(ring + TAIL", "st_rlx(ring + TAIL", "push")),
    "tail of a batch stored relaxed": (
        in_batches,
        2,
        3,
        change("st_rel(ring + TAIL", "st_rlx(ring + TAIL", "push_many"),
    ),
    "tail loaded relaxed": (one_by_one, 2, 3, change("ld_acq(ring + TAIL", "ld_rlx(ring + TAIL", "peek_many")),
    "head stored relaxed": (one_by_one, 1, 3, change("st_rel(ring + HEAD", "st_rlx(ring + HEAD", "release")),
    "head loaded relaxed": (one_by_one, 1, 3, change("ld_acq(ring + HEAD", "ld_rlx(ring + HEAD", "push")),
    "head loaded relaxed for a batch": (in_batches, 2, 4, change("ld_acq(ring + HEAD", "ld_rlx(ring + HEAD", "room")),
    "published before it is written": (one_by_one, 2, 3, change(SLOT + PUBLISH, PUBLISH + SLOT, "push")),
    "released before it is read": (
        one_by_one,
        1,
        3,
        change(COPY, f"    st_rel(ring + HEAD, head + taken)\n    st_rel(ring + HEAD, head)\n{COPY}", "peek_many"),
    ),
    "full one record too late": (
        one_by_one,
        2,
        4,
        change("if tail - head > mask:", "if tail - head > mask + 1:", "push"),
    ),
    "room for one too many": (in_batches, 2, 4, change("ld(ring + MASK) + 1", "ld(ring + MASK) + 2", "room")),
    "no fence before looking for a sleeper": (asleep, 2, 2, change("    fence()\n", "", "must_wake")),
    "no fence before sleeping": (asleep, 2, 2, change("    fence()\n", "", "park")),
    "no second look before sleeping": (
        asleep,
        2,
        2,
        change("if ld_acq(ring + TAIL) != ld(ring + HEAD):", "if False:", "park"),
    ),
    "second look at what was seen last": (asleep, 2, 2, change("ld_acq(ring + TAIL)", "ld(ring + SEEN_TAIL)", "park")),
    "looking for a sleeper before the push": (
        asleep,
        2,
        2,
        change(
            "    push_many(ring, source, count)\n    return 2 if must_wake(ring) else 1",
            "    woken = must_wake(ring)\n    push_many(ring, source, count)\n    return 2 if woken else 1",
            "push_all",
        ),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    scenario, capacity, num_records, mutate = MUTANTS[name]
    assert mutate(source()) != source()
    assert check(scenario, capacity, num_records) > 1
    with pytest.raises(Broken):
        check(scenario, capacity, num_records, mutate)
