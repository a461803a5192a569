"""Reads of byte ranges: alignment, ends of files, replaced files, closing."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fmstream.device import direct, files
from fmstream.device.direct import SeekingReader, open_reader, view_of
from fmstream.device.files import SourceFile, Staging
from fmstream.errors import ClosedError

NUM_BYTES = 300_123


@pytest.fixture
def content() -> bytes:
    return random.Random(5).randbytes(NUM_BYTES)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    return path


@pytest.fixture
def staging() -> Iterator[Staging]:
    area = Staging(8192)
    yield area
    area.close()


@pytest.fixture
def target() -> Iterator[Staging]:
    area = Staging(NUM_BYTES + 8192)
    yield area
    area.close()


def bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


class OneByteShort:
    """A reader that gives fewer bytes than asked for, as a signal or a network file system may."""

    def __init__(self, path: str, alignment: int) -> None:
        self._reader = open_reader(path)
        self.alignment = alignment

    def read_at(self, address: int, offset: int, nbytes: int) -> int:
        assert address % self.alignment == offset % self.alignment == nbytes % self.alignment == 0
        got = self._reader.read_at(address, offset, nbytes)
        return got - 1 if got > self.alignment else got

    def status(self) -> os.stat_result:
        return self._reader.status()

    def close(self) -> None:
        self._reader.close()


def buffered(path: str) -> direct.Reader:
    return direct.PositionalReader(os.open(path, os.O_RDONLY), drop_cache=True)


OPENERS = {"platform": open_reader, "seeking": SeekingReader}
if sys.platform != "win32":
    OPENERS["buffered"] = buffered
    OPENERS["short"] = lambda path: OneByteShort(path, 4096)


@pytest.mark.parametrize("opener", list(OPENERS))
def test_any_range_arrives_and_nothing_beside_it(
    opener: str, path: Path, content: bytes, staging: Staging, target: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "open_reader", OPENERS[opener])
    file = SourceFile(path)
    rng = random.Random(6)
    edges = [0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, NUM_BYTES - 1, NUM_BYTES]
    for _ in range(400):
        begin, end = sorted(rng.choice(edges) if rng.random() < 0.5 else rng.randrange(NUM_BYTES) for _ in range(2))
        shift = rng.choice([0, 64, 512, 4096, begin % 512, begin % 4096, rng.randrange(4096)])
        address, nbytes = target.address + shift, end - begin
        ctypes.memset(target.address, 0xA5, target.num_bytes)
        file.read_into(address, begin, nbytes, staging)
        assert bytes_at(address, nbytes) == content[begin:end]
        assert bytes_at(target.address, shift).strip(b"\xa5") == b""
        assert bytes_at(address + nbytes, 4096).strip(b"\xa5") == b""
    file.close()


def test_aligned_ranges_need_no_staging(path: Path, content: bytes, target: Staging) -> None:
    file = SourceFile(path)
    closed = Staging(1)
    closed.close()
    closed.address = 0  # a use of it would be a crash
    file.read_into(target.address, 4096, 8192, closed)
    assert bytes_at(target.address, 8192) == content[4096 : 4096 + 8192]
    file.close()


@pytest.mark.parametrize("cut_to", [0, 100, 4096, 70_000])
def test_a_file_cut_under_us_is_an_error_with_the_numbers(
    cut_to: int, path: Path, staging: Staging, target: Staging
) -> None:
    file = SourceFile(path)
    os.truncate(path, cut_to)
    with pytest.raises(OSError, match="ended early") as caught:
        file.read_into(target.address + 64, 3, 200_000, staging)
    message = str(caught.value)
    assert str(path) in message
    assert f"the file has {cut_to} bytes" in message
    assert str(NUM_BYTES) in message
    assert file.changed()
    file.close()


def test_a_range_past_the_end_is_an_error(path: Path, staging: Staging, target: Staging) -> None:
    file = SourceFile(path)
    with pytest.raises(OSError, match="wanted 2 bytes"):
        file.read_into(target.address, NUM_BYTES - 1, 2, staging)
    file.close()


def test_a_missing_file_is_the_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        SourceFile(tmp_path / "nothing")


def test_an_empty_file_can_be_opened_and_has_nothing_to_read(tmp_path: Path, staging: Staging, target: Staging) -> None:
    (tmp_path / "empty").touch()
    file = SourceFile(tmp_path / "empty")
    file.read_into(target.address, 0, 0, staging)
    with pytest.raises(OSError, match="ended early"):
        file.read_into(target.address, 0, 1, staging)
    file.close()


def test_changed_sees_replaced_rewritten_and_removed_files(path: Path, content: bytes) -> None:
    file = SourceFile(path)
    assert not file.changed()
    os.utime(path, ns=(0, file.identity.mtime_ns + 1))
    assert file.changed()
    file.close()

    file = SourceFile(path)
    other = path.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(0, file.identity.mtime_ns))
    os.replace(other, path)
    assert file.changed()
    file.close()

    file = SourceFile(path)
    assert not file.changed()
    path.unlink()
    assert file.changed()
    file.close()


def test_close_twice_then_a_read_is_refused(path: Path, staging: Staging, target: Staging) -> None:
    file = SourceFile(path)
    file.close()
    file.close()
    with pytest.raises(ClosedError, match=r"weights\.bin"):
        file.read_into(target.address, 0, 10, staging)


def test_a_running_read_outlives_close(
    path: Path, content: bytes, staging: Staging, target: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor's number may be another file's at once, so it must not be given back under a read."""
    inside, go_on = threading.Event(), threading.Event()
    closed: list[bool] = []

    class Blocked:
        alignment = 1

        def __init__(self, path: str) -> None:
            self._reader = SeekingReader(path)
            self.status = self._reader.status

        def read_at(self, address: int, offset: int, nbytes: int) -> int:
            inside.set()
            assert go_on.wait(60)
            return self._reader.read_at(address, offset, min(nbytes, 1000))

        def close(self) -> None:
            closed.append(True)
            self._reader.close()

    monkeypatch.setattr(files, "open_reader", Blocked)
    file = SourceFile(path)
    thread = threading.Thread(target=file.read_into, args=(target.address, 5, 5000, staging))
    thread.start()
    assert inside.wait(60)
    file.close()
    assert not closed
    go_on.set()
    thread.join(60)
    assert closed == [True]
    assert bytes_at(target.address, 5000) == content[5:5005]


@pytest.mark.skipif(sys.platform != "linux", reason="direct reads that can be refused are Linux's")
def test_where_direct_reads_are_refused_buffered_ones_are_used(
    path: Path, content: bytes, staging: Staging, target: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_preadv = os.open, os.preadv

    def refuse_open(name: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real_open(name, flags, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_open)
        file = SourceFile(path)
    assert file.alignment == 1
    file.read_into(target.address + 1, 7, 100_000, staging)
    assert bytes_at(target.address + 1, 100_000) == content[7:100_007]
    file.close()

    def refuse_sectors(fd: int, views: list[memoryview], offset: int) -> int:
        if len(views[0]) % 4096:
            raise OSError(errno.EINVAL, "refused")
        return real_preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", refuse_sectors)
    file = SourceFile(path)
    assert file.alignment == 4096
    file.read_into(target.address + 1, 7, 100_000, staging)
    assert bytes_at(target.address + 1, 100_000) == content[7:100_007]
    file.close()


@pytest.mark.skipif(sys.platform != "linux", reason="counts open descriptors in /proc")
def test_no_descriptor_is_left_open(path: Path, tmp_path: Path, staging: Staging, target: Staging) -> None:
    before = len(os.listdir("/proc/self/fd"))
    SourceFile(path).close()
    folder = SourceFile(tmp_path)
    with pytest.raises(IsADirectoryError):
        folder.read_into(target.address, 0, 1, staging)
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_staging_is_aligned_writable_and_closes_twice() -> None:
    area = Staging(5000)
    assert area.num_bytes == 8192
    assert area.address % 4096 == 0
    view_of(area.address, 5)[:] = b"12345"
    assert bytes_at(area.address, 5) == b"12345"
    area.close()
    area.close()
