"""What every benchmark is: a claim, a way to measure it, and figures with the bars they should clear."""

from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

SCRATCH = Path(__file__).resolve().parents[1] / "out"
"""Where benchmarks keep their files while they run; on the disk that the repository is on."""
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems that are no disk."""

Row = dict[str, Any]


class BenchError(RuntimeError):
    """A benchmark cannot be run here; says why, and what would help."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure should not pass: ``at_most`` or ``at_least``, the other is None."""

    at_most: float | None = None
    at_least: float | None = None

    def cleared(self, value: float) -> bool:
        """Whether a figure is on the right side."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one contender, in order of measurement."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.samples) - min(self.samples)) / self.median

    def row(self, name: str, **more: Any) -> Row:
        """A row of the table: median, least and largest in seconds."""
        seconds = {"median_s": self.median, "min_s": min(self.samples), "max_s": max(self.samples)}
        return {"contender": name, **seconds, "runs": len(self.samples), **more}


@dataclass(slots=True)
class Workplace:
    """What a benchmark is given.

    Attributes:
        quick: whether it must end within a minute.
        folder: an empty folder on the repository's disk; it is deleted afterwards.
        say: prints a line of progress.
    """

    quick: bool
    folder: Path
    say: Callable[[str], None]

    def need(self, num_bytes: int) -> None:
        """Refuse to begin where the disk has not that much room; raises `BenchError`."""
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes:
            raise BenchError(f"{num_bytes / 1e9:.1f} GB of disk are needed, {free / 1e9:.1f} GB are free: make room")


@dataclass(frozen=True, slots=True)
class Findings:
    """What a benchmark returns: figures by name, and rows of any columns."""

    figures: Mapping[str, float]
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Bench:
    """A registered benchmark; ``claim`` is one sentence that its figures support or refute."""

    name: str
    claim: str
    bars: Mapping[str, Bar]
    run: Callable[[Workplace], Findings]


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a benchmark, as it is printed with ``--json``."""

    bench: str
    claim: str
    command: str
    machine: str
    figures: dict[str, float]
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """In JSON types."""
        return asdict(self)


registry: dict[str, Bench] = {}


def register(
    name: str, claim: str, bars: Mapping[str, Bar]
) -> Callable[[Callable[[Workplace], Findings]], Callable[[Workplace], Findings]]:
    """Make the decorated function the benchmark ``name``."""

    def add(run: Callable[[Workplace], Findings]) -> Callable[[Workplace], Findings]:
        assert name not in registry, f"there is a benchmark {name!r} already"
        registry[name] = Bench(name, claim, bars, run)
        return run

    return add


def load_benches() -> dict[str, Bench]:
    """Import every module of this package, so that each registers what it measures."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "__main__":
            importlib.import_module(f"{__package__}.{module.name}")
    return registry


def carry_out(bench: Bench, *, quick: bool, say: Callable[[str], None]) -> Result:
    """Run a benchmark in a folder of its own."""
    with temporary_folder() as folder:
        findings = bench.run(Workplace(quick, folder, say))
    command = f"python -m bench {bench.name}" + (" --quick" if quick else "")
    figures = {name: float(value) for name, value in findings.figures.items()}
    return Result(bench.name, bench.claim, command, describe_machine(), figures, findings.rows)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder on the repository's disk that is deleted at the end; raises `BenchError` where that is no disk."""
    SCRATCH.mkdir(exist_ok=True)
    kind = file_system(SCRATCH)
    if kind in IN_MEMORY:
        raise BenchError(f"the repository's out/ lies on {kind}, which is memory: make out/ a link to a folder on disk")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=SCRATCH.resolve()) as name:
        yield Path(name)


def file_system(path: Path) -> str:
    """Type of the file system that holds a path, "unknown" where the system does not tell."""
    place = path.resolve()
    parts = [p for p in psutil.disk_partitions(all=True) if place.is_relative_to(p.mountpoint)]
    return max(parts, key=lambda part: len(part.mountpoint)).fstype if parts else "unknown"


def describe_machine() -> str:
    """Processor, memory, disk and versions; names no host and no user."""
    gigabytes = psutil.virtual_memory().total / 1e9
    return (
        f"{num_cores()} cores of {_processor()}, {gigabytes:.0f} GB RAM, {file_system(SCRATCH)} disk, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {_version('torch')}"
    )


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turn(contenders: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, Timing]:
    """Measure contenders one after the other, ``rounds`` times, so that a slow minute hits them all.

    A contender measures itself and returns the seconds of one run or more.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            samples[name] += measure()
    return {name: Timing(tuple(seconds)) for name, seconds in samples.items()}
