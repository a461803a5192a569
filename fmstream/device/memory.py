"""Anonymous host memory: one seam for what systems differ in."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import Final

HUGE_BYTES: Final = 2 << 20
"""The least memory for which large pages are asked."""


def private_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, in large pages where the system has them."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # Reads bypass the page cache: the disk writes here directly, in fewer and longer stretches.
        with contextlib.suppress(OSError):  # the kernel was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def return_free_memory() -> None:
    """Give memory that was freed back to the system, where the allocator would keep it (glibc)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
