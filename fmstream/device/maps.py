"""What the kernel knows about mapped files: which are mapped where, and which pages were written.

Only Linux tells; elsewhere nothing is known to be mapped, and every page counts as written.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Final, NamedTuple

import numpy as np

from fmstream.device.direct import PAGE_BYTES

# Documentation/admin-guide/mm/pagemap.rst: one 64-bit word for each page of the address space.
_PRESENT: Final = np.uint64(1 << 63)
_SWAPPED: Final = np.uint64(1 << 62)
_OF_A_FILE: Final = np.uint64(1 << 61)
_ENTRY_BYTES: Final = 8
_ENTRIES_AT_ONCE: Final = 1 << 16

_LINE: Final = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)\s+(/.*)")
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


class MappedRange(NamedTuple):
    """A stretch of addresses that shows a file.

    ``offset`` is the place of ``start`` in the file; ``major``, ``minor`` and ``inode`` name the file as the kernel saw
    it when it was mapped; ``path`` is where it was then.
    """

    start: int
    end: int
    offset: int
    major: int
    minor: int
    inode: int
    path: str

    def is_still(self, status: os.stat_result) -> bool:
        """Whether a status taken now is that of the file that is mapped."""
        if sys.platform != "linux" or status.st_ino != self.inode:
            return False
        major, minor = os.major(status.st_dev), os.minor(status.st_dev)
        # Where a file system has no device of its own (btrfs), the two calls number it differently.
        return (major, minor) == (self.major, self.minor) or major == self.major == 0


def read_maps() -> list[MappedRange]:
    """All mapped files of this process in order of address; neighbours that go on in the same file are joined."""
    if sys.platform != "linux":
        return []
    with open("/proc/self/maps", "rb") as lines:
        return parse_maps(lines.read())


def parse_maps(text: bytes) -> list[MappedRange]:
    """The ranges in the text of /proc/self/maps."""
    ranges: list[MappedRange] = []
    for match in map(_LINE.fullmatch, text.split(b"\n")):
        if match is None:
            continue
        start, end, offset, major, minor = (int(number, 16) for number in match.groups()[:5])
        path = os.fsdecode(_OCTAL.sub(lambda escape: bytes([int(escape[1], 8)]), match[7]))
        found = MappedRange(start, end, offset, major, minor, int(match[6]), path)
        if ranges and _continues(ranges[-1], found):
            found = found._replace(start=ranges[-1].start, offset=ranges[-1].offset)
            ranges.pop()
        ranges.append(found)
    return ranges


def _continues(before: MappedRange, after: MappedRange) -> bool:
    return (
        before.end == after.start
        and before.offset + before.end - before.start == after.offset
        and before[3:] == after[3:]
    )


def dirty(address: int, nbytes: int) -> bool:
    """Whether a page in the range may differ from the file behind it.

    A page counts as written if it is a private copy, in memory or swapped out.  A page that the range shares with a
    neighbour counts too.  True where the kernel does not tell.
    """
    if sys.platform != "linux":
        return True
    if nbytes <= 0:
        return False
    first, last = address // PAGE_BYTES, (address + nbytes - 1) // PAGE_BYTES
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        for page in range(first, last + 1, _ENTRIES_AT_ONCE):
            wanted = min(_ENTRIES_AT_ONCE, last + 1 - page) * _ENTRY_BYTES
            entries = os.pread(fd, wanted, page * _ENTRY_BYTES)
            if len(entries) < wanted or any_written(np.frombuffer(entries, np.uint64)):
                return True
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def any_written(entries: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> bool:
    """Whether a page table entry is of a private copy: in memory or swapped, and not of a file."""
    # A file's page that is being migrated looks swapped, but keeps the file's mark.
    private = (entries & _OF_A_FILE) == 0
    there = (entries & (_PRESENT | _SWAPPED)) != 0
    return bool(np.any(there & private))
