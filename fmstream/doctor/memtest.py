"""``fmstream memtest``: patterns written to the memory of a device and read back."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from fmstream.config import parse_size
from fmstream.device.accelerator import Accelerator
from fmstream.device.device import Device
from fmstream.device.opening import device_name, open_device
from fmstream.doctor.faults import Comparer, Findings, name_kind
from fmstream.doctor.patterns import DEFAULT, Pattern, Sweep, find_patterns, make_sweeps
from fmstream.doctor.region import MIB, Region, cache_bytes
from fmstream.doctor.sweeping import check_sweep, write_sweep
from fmstream.errors import ConfigError, MemoryBudgetError
from fmstream.payloads.budget import available_bytes

SCHEMA: Final = 1
ROUNDS: Final = 2
"""What is measured as the default suite; each round has random words and offsets of its own."""
HOST_SHARE, DEVICE_SHARE = "50%", "90%"
"""Of the free memory, where no size is given."""
HOST_ROOM, DEVICE_ROOM = 512 * MIB, 256 * MIB
"""Left free in any case: for other processes, and for what comparing takes."""
BEYOND_CACHE: Final = 4
"""Times the cache that must be tested, lest words come back from there."""


@dataclass(frozen=True, slots=True)
class Seen:
    """How far a test has come: shares of one, words of 4 bytes."""

    pattern: str
    round_number: int
    done_words: int
    total_words: int
    num_errors: int


Show = Callable[[Seen], None]


@dataclass(frozen=True, slots=True)
class MemtestResult:
    """What a memory test did and found.

    Attributes:
        device: as torch names it, and ``device_name`` as its maker does.
        asked_bytes, tested_bytes: less was tested where the device gave less.
        cache_bytes: the largest cache before that memory, None where it is not known.
        patterns, rounds, seed: what was written; the same again with these.
        ended: "complete", "time limit" or "interrupted".
        done: share of what was to be done.
        written_bytes, checked_bytes: over all sweeps.
        findings: the errors.
    """

    device: str
    device_name: str
    asked_bytes: int
    tested_bytes: int
    cache_bytes: int | None
    patterns: tuple[str, ...]
    rounds: int
    seed: int
    ended: str
    done: float
    seconds: float
    written_bytes: int
    checked_bytes: int
    findings: Findings

    @property
    def kind(self) -> str | None:
        """What the errors look like together; None without errors."""
        return name_kind(self.findings, self.tested_bytes // 4)

    @property
    def is_beyond_cache(self) -> bool | None:
        """Whether words had to come back from the memory itself; None where the cache is not known."""
        return None if self.cache_bytes is None else self.tested_bytes >= BEYOND_CACHE * self.cache_bytes

    @property
    def status(self) -> int:
        """Exit status: 1 with errors, 130 if interrupted without one, else 0."""
        if self.findings.num_errors:
            return 1
        return 130 if self.ended == "interrupted" else 0

    def to_dict(self) -> dict[str, Any]:
        """In JSON types."""
        found = self.findings
        return {
            "schema": SCHEMA,
            "device": self.device,
            "device_name": self.device_name,
            "asked_bytes": self.asked_bytes,
            "tested_bytes": self.tested_bytes,
            "cache_bytes": self.cache_bytes,
            "is_beyond_cache": self.is_beyond_cache,
            "patterns": list(self.patterns),
            "rounds": self.rounds,
            "seed": self.seed,
            "ended": self.ended,
            "done": self.done,
            "seconds": self.seconds,
            "written_bytes": self.written_bytes,
            "checked_bytes": self.checked_bytes,
            "errors": found.num_errors,
            "kind": self.kind,
            "errors_by_pattern": dict(found.by_pattern),
            "flipped_bits": found.bits.tolist(),
            "flipped_per_word": found.flips.tolist(),
            "second_reads": dict(found.second_reads),
            "faults": [fault.to_dict() for fault in found.faults],
        }

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def run_memtest(
    device: str | None = None,
    *,
    size: int | str | None = None,
    patterns: Sequence[str] = DEFAULT,
    rounds: int = ROUNDS,
    seed: int | None = None,
    time_limit: float | None = None,
    show: Show | None = None,
) -> MemtestResult:
    """Test the memory of a device.

    Args:
        device: "cpu", "cuda", ...; None is the CUDA card where there is one.
        size: bytes, "2GiB", or "80%" of the free memory; None is half of the host's, nine tenths of a device's.
        patterns: by name, in order.
        rounds: how often all patterns are gone through.
        seed: of the random ones; None draws one.
        time_limit: seconds after which the test ends with what it has found.
        show: told how far it has come.

    Raises:
        ConfigError: an option cannot be used.
        MemoryBudgetError: the size leaves no room for anything else, or the device does not give it.
    """
    opened, chosen = open_device(device), find_patterns(patterns)
    if rounds < 1:
        raise ConfigError(f"rounds={rounds!r}: there must be at least 1")
    if time_limit is not None and not time_limit > 0:
        raise ConfigError(f"time_limit={time_limit!r}: give seconds above 0, or leave it out")
    asked = _bytes_to_test(opened, size)
    with closing(Region(opened, asked)) as region:
        test = Memtest(region, chosen, rounds, secrets.randbits(31) if seed is None else seed, time_limit, show)
        began = time.monotonic()
        ended = test.run()
        return MemtestResult(
            device=str(opened.torch_device),
            device_name=device_name(opened),
            asked_bytes=asked,
            tested_bytes=region.num_words * 4,
            cache_bytes=cache_bytes(opened),
            patterns=tuple(pattern.name for pattern in chosen),
            rounds=rounds,
            seed=test.seed,
            ended=ended,
            done=test.done_words / test.total_words,
            seconds=time.monotonic() - began,
            written_bytes=test.written_words * 4,
            checked_bytes=(test.done_words - test.written_words) * 4,
            findings=test.findings,
        )


def _bytes_to_test(device: Device, size: int | str | None) -> int:
    if isinstance(device, Accelerator):
        free, share, room = device.available_bytes(), DEVICE_SHARE, DEVICE_ROOM
    else:
        free, share, room = available_bytes(), HOST_SHARE, HOST_ROOM
    # What a share would take of the room that others need, it leaves.
    asked = parse_size(share if size is None else size, of=free, name="size", whole="the free memory")
    if size is None:
        asked = min(asked, free - room)
    if not 4 <= asked <= free - room:
        raise MemoryBudgetError(
            f"size={size!r} is {asked} bytes; {free} bytes of {device.torch_device} are free, of which {room} stay so: "
            f"give at most {max(0, free - room)} bytes, or close what else uses it"
        )
    return asked // 4 * 4


class _OutOfTime(Exception):
    pass


class Memtest:
    """Goes through patterns over one region."""

    def __init__(
        self,
        region: Region,
        patterns: Sequence[Pattern],
        rounds: int,
        seed: int,
        time_limit: float | None = None,
        show: Show | None = None,
    ) -> None:
        self.seed = seed
        self.findings = Findings()
        self.done_words = 0
        self.written_words = 0
        self._region = region
        self._patterns = patterns
        self._rounds = rounds
        self._show = show
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._compare = Comparer(self.findings, region.read_again, region.address)
        self._at = ("", 0)
        self.total_words = 2 * region.num_words * rounds * sum(pattern.num_sweeps for pattern in patterns)

    def run(self) -> str:
        """Test; returns how it ended: "complete", "time limit" or "interrupted"."""
        try:
            for sweep in self._sweeps():
                write_sweep(self._region, sweep, self._wrote)
                self.findings.begin_sweep()
                check_sweep(self._region, sweep, self._compare, self._tick)
        except _OutOfTime:
            return "time limit"
        except KeyboardInterrupt:
            return "interrupted"
        return "complete"

    def _sweeps(self) -> Iterator[Sweep]:
        for round_number in range(1, self._rounds + 1):
            for pattern in self._patterns:
                self._at = pattern.name, round_number
                self._compare.pattern, self._compare.scrambled = pattern.name, pattern.scrambled
                yield from make_sweeps(pattern, self.seed, round_number)

    def _wrote(self, num_words: int) -> None:
        self.written_words += num_words
        self._tick(num_words)

    def _tick(self, num_words: int) -> None:
        self.done_words += num_words
        if self._show is not None:
            self._show(Seen(*self._at, self.done_words, self.total_words, self.findings.num_errors))
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise _OutOfTime
