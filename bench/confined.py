"""Child processes, with a limit on their memory where the system grants one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.contract import BenchError
from bench.streamer import Case

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600


class Killed(Exception):
    """The process was killed: it went over its limit."""


@dataclass(frozen=True, slots=True)
class Group:
    """A control group; the peak is that of all its processes, page cache included."""

    folder: Path
    peak_file: str

    def peak_bytes(self) -> int | None:
        """The largest use so far, None where the kernel does not tell."""
        try:
            return int((self.folder / self.peak_file).read_text())
        except OSError:
            return None


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Group]:
    """A new control group with that limit; raises `BenchError` where none can be made."""
    folder, limit_file, peak_file = _place()
    try:
        folder.mkdir()
    except OSError as error:
        raise BenchError(f"no control group can be made: {error.strerror}") from error
    try:
        try:
            (folder / limit_file).write_text(str(limit_bytes))
        except OSError as error:
            raise BenchError(f"the control group takes no limit: {error.strerror}") from error
        for name, value in (("memory.swap.max", "0"), ("memory.memsw.limit_in_bytes", str(limit_bytes))):
            with contextlib.suppress(OSError):  # without swap there is no such file
                if (folder / name).exists():
                    (folder / name).write_text(value)
        yield Group(folder, peak_file)
    finally:
        folder.rmdir()


def _place() -> tuple[Path, str, str]:
    """Where to make a group below this process's own, and the names of its files for the limit and the peak."""
    top, name = Path("/sys/fs/cgroup"), f"bench-{os.getpid()}"
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError as error:
        raise BenchError("this system has no control groups") from error
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            own = top / "memory" / path.lstrip("/")
            # In a container the path may be the host's.
            folder = own if own.is_dir() else top / "memory"
            return folder / name, "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    for _, controllers, path in lines:
        if not controllers and (top / "cgroup.controllers").exists():
            return top / path.lstrip("/") / name, "memory.max", "memory.peak"
    raise BenchError("this system has no control groups for memory")


def stream_in_child(case: Case, group: Group | None = None) -> dict[str, Any]:
    """Run a case in a process of its own; raises `Killed` where a group's limit was passed."""
    case = replace(case, group=None if group is None else str(group.folder))
    command = [sys.executable, "-m", "bench.streamer", case.to_json()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if group is not None and ended.returncode == -9:
        raise Killed
    if ended.returncode != 0:
        raise RuntimeError(f"the streaming process failed:\n{ended.stderr}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
