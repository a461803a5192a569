"""Spill files: what is written comes back, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fmstream.device import spill as spill_module
from fmstream.device.files import SourceFile, Staging
from fmstream.device.homes import FileSet, Mappings, dirty
from fmstream.device.spill import SpillFile
from fmstream.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "a spill file was left behind"


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(nbytes)), dtype=torch.uint8)


def test_what_is_written_is_mapped_and_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "WRITE_BYTES", 10_000)
    parts = [random_bytes(size, size) for size in (5, 4096, 70_001, 1)]
    spill = SpillFile(folder, sum(part.numel() for part in parts))
    offsets = [spill.append(part.data_ptr(), part.numel()) for part in parts]
    spill.finish()
    assert offsets == [0, 4096, 8192, 8192 + 73_728]
    files = FileSet()
    file = files.open(spill.path)
    assert file.num_bytes == spill.num_bytes == 8192 + 73_728 + 4096
    staging = Staging(8192)
    for part, offset in zip(parts, offsets, strict=True):
        mapped = spill.map(offset, part.numel())
        assert torch.equal(mapped, part)
        assert mapped.untyped_storage().nbytes() == part.numel()
        read = torch.zeros_like(part)
        file.read_into(read.data_ptr(), offset, part.numel(), staging)
        assert torch.equal(read, part)
    assert not file.changed()
    staging.close()
    files.close()
    spill.close()
    spill.close()
    assert spill.closed
    assert torch.equal(mapped, parts[-1])  # what is mapped outlives the file


def test_writes_to_what_is_mapped_stay_in_memory(folder: Path) -> None:
    data = random_bytes(9000, 1)
    spill = SpillFile(folder)
    offset = spill.append(data.data_ptr(), 9000)
    spill.finish()
    mapped = spill.map(offset, 9000)
    mapped.fill_(3)
    assert torch.equal(spill.map(offset, 9000), mapped)  # one mapping, one truth
    file = SourceFile(spill.path)
    read = torch.zeros_like(data)
    staging = Staging(16384)
    file.read_into(read.data_ptr(), offset, 9000, staging)
    assert torch.equal(read, data)
    staging.close()
    file.close()
    spill.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_mapped_is_found_and_clean_until_written(folder: Path) -> None:
    data = random_bytes(9000, 2)
    spill = SpillFile(folder)
    spill.append(data.data_ptr(), 9000)
    second = spill.append(data.data_ptr(), 9000)
    spill.finish()
    mapped = spill.map(second, 9000)
    assert Mappings.snapshot().find(mapped.data_ptr() + 7, 100) == (spill.path, second + 7)
    assert not dirty(mapped.data_ptr(), 9000)
    mapped[0] = 1
    assert dirty(mapped.data_ptr(), 9000)
    address = mapped.data_ptr()
    del mapped
    spill.close()
    assert Mappings.snapshot().find(address, 100) is None


def test_no_room_is_refused_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    with pytest.raises(ConfigError, match="6000 bytes are needed and 5000 are free") as caught:
        SpillFile(folder, 6000)
    assert str(folder) in str(caught.value)
    assert list(folder.iterdir()) == []

    spill = SpillFile(folder)
    data = random_bytes(5001, 1)
    with pytest.raises(ConfigError, match="5001 bytes are needed"):
        spill.append(data.data_ptr(), 5001)
    assert spill.closed


def test_a_folder_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*another spill_dir"):
        SpillFile(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (OSError(errno.ENOSPC, "full"), ConfigError),
        (OSError(errno.EIO, "broken"), OSError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_failure_or_an_interrupt_leaves_nothing(
    failure: BaseException, raised: type[BaseException], step: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_bytes(5000, 1)

    def fail(*args: object) -> int:
        raise failure

    spill = SpillFile(folder)
    monkeypatch.setattr(os, step, fail)

    def write_all() -> None:
        spill.append(data.data_ptr(), 5000)
        spill.finish()

    with pytest.raises(raised):
        write_all()
    assert spill.closed
    assert list(folder.iterdir()) == []


def test_an_empty_spill_is_finished_and_closed(folder: Path) -> None:
    spill = SpillFile(folder)
    spill.finish()
    spill.close()


SCRIPT = """
import sys
from fmstream.device.spill import SpillFile
spill = SpillFile(sys.argv[1])
data = bytearray(5000)
import torch
spill.append(torch.frombuffer(data, dtype=torch.uint8).data_ptr(), 5000)
print("ready", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


def start(folder: Path, action: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), action],
        cwd=root,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be removed there")
def test_a_spill_that_was_not_closed_goes_at_exit(folder: Path) -> None:
    with start(folder, "exit") as process:
        assert process.wait(60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only there the name goes early")
def test_a_killed_process_leaves_nothing(folder: Path) -> None:
    with start(folder, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL


def test_where_a_name_is_needed_it_is_kept_until_close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "remove_name", lambda fd, name: name)
    spill = SpillFile(folder)
    data = random_bytes(100, 1)
    spill.append(data.data_ptr(), 100)
    spill.finish()
    assert [str(path) for path in folder.iterdir()] == [spill.path]
    assert Path(spill.path).name.startswith("fmstream-")
    assert torch.equal(spill.map(0, 100), data)
    spill.close()
