"""The host as proc and sysfs show it: memory and its limits, mounts, NUMA nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from fmstream.doctor.reading import Unread, names_in, parse_cpu_list, parse_int, read_int, read_text

NO_LIMIT: Final = 1 << 60
"""Control groups of the first version write a number near 2^63 where there is no limit."""

_OCTAL: Final = re.compile(r"\\([0-3][0-7]{2})")


def kernel_release(proc: Path) -> str:
    """Release of the kernel, empty if it cannot be read."""
    text = read_text(proc / "sys/kernel/osrelease")
    return "" if isinstance(text, Unread) else text


def is_wsl(proc: Path) -> bool:
    """Whether this is Linux inside Windows: its kernel says so."""
    return "microsoft" in kernel_release(proc).lower()


def meminfo(proc: Path) -> dict[str, int]:
    """Sizes in ``/proc/meminfo`` in bytes, by name; those that can be read."""
    text = read_text(proc / "meminfo")
    found: dict[str, int] = {}
    for line in "" if isinstance(text, Unread) else text.splitlines():
        name, _, rest = line.partition(":")
        value, _, unit = rest.strip().partition(" ")
        size = parse_int(value, name)
        if not isinstance(size, Unread) and size >= 0:
            found[name.strip()] = size * 1024 if unit.strip() == "kB" else size
    return found


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A memory limit of a control group, and what is used of it that could not be dropped at once, in bytes."""

    limit: int
    used: int

    @property
    def headroom(self) -> int:
        """What may still be taken."""
        return max(0, self.limit - self.used)


def group_limit(proc: Path, sysfs: Path) -> GroupLimit | None:
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


@dataclass(frozen=True, slots=True)
class Mount:
    """What is mounted where a path lies: the kind of file system, what it comes from, and its device's number."""

    point: str
    kind: str
    source: str
    device: str


def mount_of(proc: Path, path: Path) -> Mount | Unread:
    """The mount that holds a path, which must be absolute."""
    text = read_text(proc / "self/mountinfo")
    if isinstance(text, Unread):
        return text
    best: Mount | None = None
    for line in text.splitlines():
        mount = _mount(line)
        # Of mounts on one point the last one is on top.
        if mount is not None and _holds(mount.point, path) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best or Unread("mountinfo: no mount holds the path")


def _mount(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    fields, kinds = left.split(), right.split()
    if not separator or len(fields) < 5 or len(kinds) < 2:
        return None
    point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
    return Mount(point, kinds[0], kinds[1], fields[2])


def _holds(point: str, path: Path) -> bool:
    try:
        return path.is_relative_to(point)
    except ValueError:
        return False


def is_rotational(sysfs: Path, device: str) -> bool | Unread:
    """Whether a device, "8:1", is a disk that turns."""
    folder = sysfs / "dev/block" / device
    # A partition has its queue in the disk's folder above.
    for queue in (folder / "queue", folder / "../queue"):
        value = read_int(queue / "rotational")
        if not isinstance(value, Unread):
            return value == 1
    return Unread("not told")


def numa_nodes(sysfs: Path) -> dict[int, frozenset[int]]:
    """The CPUs of each node."""
    folder = sysfs / "devices/system/node"
    found = {}
    for name in names_in(folder):
        number = name.removeprefix("node")
        if number != name and number.isdecimal() and number.isascii():
            text = read_text(folder / name / "cpulist")
            found[int(number)] = frozenset() if isinstance(text, Unread) else parse_cpu_list(text)
    return found
