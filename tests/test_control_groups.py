"""Limits of control groups bound what is taken of the host's memory; the page cache gives way and does not count."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from fmstream.config import StreamConfig
from fmstream.device.control_groups import GroupLimit, group_limit
from fmstream.payloads import budget

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job", "job", ("memory.max", "memory.current")),
        ("4:cpu,memory:/job", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_the_page_cache_is_not_taken_for_used(tmp_path: Path, line: str, folder: str, names: tuple[str, str]) -> None:
    group = tmp_path / "sys/fs/cgroup" / folder
    write(tmp_path / "proc/self/cgroup", f"{line}\n")
    write(group / names[0], f"{1000 * MIB}\n")
    write(group / names[1], f"{990 * MIB}\n")
    write(group / "memory.stat", f"anon {90 * MIB}\ninactive_file {700 * MIB}\nactive_file {200 * MIB}\n")
    assert group_limit(tmp_path / "proc", tmp_path / "sys") == GroupLimit(1000 * MIB, 90 * MIB)


def test_no_groups_are_no_limit(tmp_path: Path) -> None:
    assert group_limit(tmp_path, tmp_path) is None


def test_what_may_be_taken_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "group_limit", lambda: GroupLimit(100 * MIB, 40 * MIB))
    assert budget.available_bytes() == 60 * MIB
    assert budget.pinned_bytes(StreamConfig()) == int(100 * MIB * budget.PINNED_SHARE)


def test_without_a_limit_it_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "group_limit", lambda: None)
    assert budget.pinned_bytes(StreamConfig()) == int(psutil.virtual_memory().total * budget.PINNED_SHARE)
    assert budget.available_bytes() > 0
