"""Temporary files that leave nothing behind: where the system allows, they have no name."""

from __future__ import annotations

import contextlib
import os
import sys


def remove_name(fd: int, name: str) -> str:
    """Remove a file's name where it can be opened without; returns the path that leads to it."""
    nameless = f"/proc/self/fd/{fd}"
    if sys.platform != "linux":
        return name
    try:
        if not os.path.samestat(os.stat(nameless), os.fstat(fd)):
            return name
    except OSError:
        return name
    os.unlink(name)
    return nameless


def dispose(fd: int, name: str, pid: int) -> None:
    """Close a file that process ``pid`` made, and remove its name if it still has one."""
    os.close(fd)
    # A forked child shares the file; its name is the parent's to remove.  Windows does not remove what is mapped.
    if os.getpid() == pid:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(name)
