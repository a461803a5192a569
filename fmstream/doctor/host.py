"""The host as proc and sysfs show it: memory and its limits, mounts, NUMA nodes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fmstream.core.reading import Unread, names_in, parse_cpu_list, parse_int, read_int, read_text

VIRTUAL_DISKS: Final = ("virtio", "vbd-", "VMBUS")
"""How the folders of disks begin that KVM, Xen and Hyper-V make up; they call themselves turning, whatever they are."""
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
        if isinstance(value, Unread):
            continue
        if value == 1 and any(part.startswith(VIRTUAL_DISKS) for part in os.path.realpath(folder).split("/")):
            return Unread("a virtual disk may say so of any disk beneath it")
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
