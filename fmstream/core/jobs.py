"""Jobs of the workers that touch host memory, by raw address, and what came of them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Op(IntEnum):
    """What a job does, and the meaning of its words, each an int64."""

    GATHER = 1
    """number of ids, table address, bytes of a row, address of int64 ids, destination, rows of the table (0: ids are
    not checked)"""
    COPY = 2
    """bytes, source, destination"""
    READ = 3
    """bytes, file descriptor, offset in the file, destination"""
    FILL = 4
    """bytes, destination, value of each byte"""


class Status(IntEnum):
    """How a job ended.  Whatever it is, nothing writes for the job any more."""

    DONE = 0
    FAILED = 1
    CANCELLED = 2


BAD_ID = -1
"""Detail of a failed gather: an id is out of range; the place is its index."""
END_OF_FILE = -2
"""Detail of a failed read: the file ends; the place is the offset of its end."""


class Job(NamedTuple):
    """One job of one worker.

    ``sequence`` grows from job to job of a worker and comes back with the outcome; ``first`` is the position of the
    first id among all that were asked for.
    """

    op: Op
    sequence: int
    words: tuple[int, ...]
    first: int = 0


class Outcome(NamedTuple):
    """How a job ended.

    ``detail`` is an errno, `BAD_ID`, `END_OF_FILE`, or 0; ``place`` is where in the file or among the ids it failed.
    ``start`` and ``end`` are ``time.perf_counter()`` nanoseconds, taken by the worker.
    """

    status: Status
    detail: int
    place: int
    sequence: int
    start: int
    end: int


def num_bytes_of(job: Job) -> int:
    """Bytes that a job writes."""
    return job.words[0] * (job.words[2] if job.op is Op.GATHER else 1)


def failure(job: Job, outcome: Outcome) -> Exception:
    """The error of a failed job: an IndexError that names the id's place, or an OSError that names errno and offset."""
    if job.op is Op.GATHER:
        position = job.first + outcome.place
        return IndexError(f"the id at position {position} is not a row of a table of {job.words[5]} rows")
    num_bytes, fd, offset = job.words[:3]
    wanted = f"reading {num_bytes} bytes at offset {offset} of file descriptor {fd}"
    if outcome.detail == END_OF_FILE:
        return OSError(f"{wanted}: the file ends at offset {outcome.place}")
    return OSError(outcome.detail, f"{wanted} failed at offset {outcome.place} (errno {outcome.detail})")
