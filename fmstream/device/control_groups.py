"""Memory limits of the control groups that this process is in, of both versions; there are none but on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from fmstream.core.reading import Unread, parse_int, read_int, read_text

PROC: Final = Path("/proc")
SYSFS: Final = Path("/sys")
NO_LIMIT: Final = 1 << 60
"""Control groups of the first version write a number near 2^63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A memory limit of a control group, and what is used of it that could not be dropped at once, in bytes."""

    limit: int
    used: int

    @property
    def headroom(self) -> int:
        """What may still be taken."""
        return max(0, self.limit - self.used)


def group_limit(proc: Path = PROC, sysfs: Path = SYSFS) -> GroupLimit | None:
    """The tightest memory limit of the control groups that this process is in; None where there is none.

    The page cache counts as used in the kernel's figures, but gives way, so it is taken off.
    """
    found = [limit for folder, version in _groups(proc, sysfs) if (limit := _limit_of(folder, version)) is not None]
    return min(found, key=lambda limit: limit.headroom, default=None)


def _groups(proc: Path, sysfs: Path) -> Iterator[tuple[Path, int]]:
    text = read_text(proc / "self/cgroup")
    for line in "" if isinstance(text, Unread) else text.splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, name = rest.partition(":")
        if not separator or (controllers and "memory" not in controllers.split(",")):
            continue
        parts = [part for part in PurePosixPath(name).parts if part not in ("/", "..")]
        for top in _tops(sysfs / "fs/cgroup", is_first=bool(controllers)):
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth]), 1 if controllers else 2


def _tops(root: Path, *, is_first: bool) -> tuple[Path, ...]:
    # Where both versions are mounted, the second one is in a folder of its own.
    return (root / "memory",) if is_first else (root, root / "unified")


def _limit_of(folder: Path, version: int) -> GroupLimit | None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = (read_int(folder / name) for name in names)
    if isinstance(limit, Unread) or isinstance(used, Unread) or not 0 <= limit < NO_LIMIT:
        return None
    stat = read_text(folder / "memory.stat")
    lines = [] if isinstance(stat, Unread) else [line.split() for line in stat.splitlines()]
    counts = {line[0]: parse_int(line[1], line[0]) for line in lines if len(line) == 2}
    # Sums over the groups below have a name of their own in the first version.
    cache = 0
    for name in ("active_file", "inactive_file"):
        value = counts.get(f"total_{name}", counts.get(name, 0))
        cache += 0 if isinstance(value, Unread) else value
    return GroupLimit(limit, max(0, used - cache))
