"""Finding the file behind an address, and the files that homes share."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fmstream.device import homes, maps
from fmstream.device.direct import PAGE_BYTES
from fmstream.device.files import Identity
from fmstream.device.homes import FileSet, Mappings, dirty, register_mapping

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps and /proc/self/pagemap")
NUM_PAGES = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / ("weights with space\nand newline.bin" if sys.platform == "linux" else "weights.bin")
    path.write_bytes(np.random.default_rng(1).bytes(NUM_PAGES * PAGE_BYTES - 100))
    return path


@contextmanager
def mapped(path: Path, offset: int = 0) -> Iterator[int]:
    """The address of a private mapping, as a loader of checkpoints makes it."""
    with path.open("rb") as file:
        area = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY, offset=offset)
    export = ctypes.c_char.from_buffer(area)
    try:
        yield ctypes.addressof(export)
    finally:
        del export
        area.close()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[int, object]:
    """An empty registry, on a platform that tells nothing else."""
    entries: dict[int, object] = {}
    monkeypatch.setattr(homes, "_registered", entries)
    monkeypatch.setattr(homes, "read_maps", list)
    return entries


@linux
def test_an_address_in_a_mapping_is_found_at_its_place_in_the_file(path: Path) -> None:
    with mapped(path) as address, mapped(path, 2 * PAGE_BYTES) as later:
        found = Mappings.snapshot()
        assert found.find(address, 10) == (str(path), 0)
        assert found.find(address + 5000, 700) == (str(path), 5000)
        assert found.find(later + 3, 7) == (str(path), 2 * PAGE_BYTES + 3)
        whole = path.stat().st_size
        assert found.find(address, whole) == (str(path), 0)
        assert found.find(address, whole + 1) is None  # the tail of the last page is not the file's
        assert found.find(address, 0) is None
        assert found.find(later, NUM_PAGES * PAGE_BYTES) is None
    assert Mappings.snapshot().find(address, 10) is None


@linux
def test_a_mapping_split_by_the_kernel_is_one(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as area:
        area.madvise(mmap.MADV_DONTDUMP, PAGE_BYTES, PAGE_BYTES)
        export = ctypes.c_char.from_buffer(area)
        address = ctypes.addressof(export)
        del export
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("newline.bin")]
        assert len(lines) == 3
        assert Mappings.snapshot().find(address + 100, 3 * PAGE_BYTES) == (str(path), 100)


@linux
@pytest.mark.parametrize("change", ["replace", "delete", "cut"])
def test_a_file_that_went_away_is_no_home(change: str, path: Path) -> None:
    with mapped(path) as address:
        before = Mappings.snapshot()
        if change == "replace":
            other = path.with_name("other")
            other.write_bytes(path.read_bytes())
            other.replace(path)
        elif change == "delete":
            path.unlink()
        else:
            os.truncate(path, 8)
        assert before.find(address, 10) is None
        assert Mappings.snapshot().find(address, 10) is None


@linux
def test_a_renamed_file_is_found_under_its_new_name(path: Path) -> None:
    with mapped(path) as address:
        new = path.rename(path.with_name("new"))
        assert Mappings.snapshot().find(address, 10) == (str(new), 0)


@linux
def test_anonymous_memory_is_no_home() -> None:
    area = np.ones(10 * PAGE_BYTES)
    assert Mappings.snapshot().find(area.ctypes.data, area.nbytes) is None
    assert dirty(area.ctypes.data, area.nbytes)


@linux
def test_dirty_sees_the_written_page_and_no_other(path: Path) -> None:
    with mapped(path) as address:
        size = path.stat().st_size
        assert not dirty(address, size)
        assert ctypes.string_at(address, size) == path.read_bytes()
        assert not dirty(address, size)
        ctypes.memset(address + 2 * PAGE_BYTES + 9, 1, 1)
        assert dirty(address, size)
        assert dirty(address + 2 * PAGE_BYTES, 1)
        assert dirty(address + 2 * PAGE_BYTES - 1, 2)
        assert not dirty(address, 2 * PAGE_BYTES)
        assert not dirty(address + 3 * PAGE_BYTES, size - 3 * PAGE_BYTES)
        assert not dirty(address + 2 * PAGE_BYTES, 0)


@linux
def test_dirty_reads_long_ranges_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_ENTRIES_AT_ONCE", 2)
    with mapped(path) as address:
        assert not dirty(address, path.stat().st_size)
        ctypes.memset(address + 5 * PAGE_BYTES, 1, 1)
        assert dirty(address, path.stat().st_size)
        assert not dirty(address, 5 * PAGE_BYTES)


def test_unknown_pages_count_as_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError(1, "refused")

    with mapped(path) as address:
        monkeypatch.setattr(os, "open", refuse)
        assert dirty(address, 1)


@pytest.mark.parametrize(
    ("bits", "written"),
    [
        ([], False),
        ([63, 61], False),  # a page of the file
        ([63], True),  # a private copy
        ([62], True),  # a private copy, swapped out
        ([62, 61], False),  # a page of the file on its way to another frame
        ([61], False),
        ([63, 61, 56, 55], False),
    ],
)
def test_page_table_entries(bits: list[int], written: bool) -> None:
    entry = sum(1 << bit for bit in bits)
    assert maps.any_written(np.array([0, entry, 0], np.uint64)) is written


def test_parse_maps() -> None:
    text = (
        b"00400000-00402000 r--p 00000000 fe:00 26723                      /usr/bin/python\n"
        b"00402000-00404000 r-xp 00002000 fe:00 26723                      /usr/bin/python\n"
        b"00404000-00405000 r--p 00009000 fe:00 26723                      /usr/bin/python\n"
        b"7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n"
        b"7f0000001000-7f0000002000 rw-p 00000000 00:00 0                  [heap]\n"
        b"7f0000002000-7f0000003000 rw-p 00001000 103:0a 7                 /a b\\012c (deleted)\n"
    )
    assert maps.parse_maps(text) == [
        (0x400000, 0x404000, 0, 0xFE, 0, 26723, "/usr/bin/python"),
        (0x404000, 0x405000, 0x9000, 0xFE, 0, 26723, "/usr/bin/python"),
        (0x7F0000002000, 0x7F0000003000, 0x1000, 0x103, 0x0A, 7, "/a b\nc (deleted)"),
    ]


def test_a_registered_mapping_is_found_until_it_dies(path: Path, registry: dict[int, object]) -> None:
    alive = True
    register_mapping(0x10000, 5000, str(path), Identity.of(path.stat()), lambda: alive)
    snapshot = Mappings.snapshot()
    assert snapshot.find(0x10000 + 40, 60) == (str(path), 40)
    assert snapshot.find(0x10000 - 1, 60) is None
    assert snapshot.find(0x10000 + 4990, 11) is None
    alive = False
    assert snapshot.find(0x10000 + 40, 60) is None
    assert Mappings.snapshot().find(0x10000 + 40, 60) is None
    assert not registry


@pytest.mark.usefixtures("registry")
def test_a_registered_file_that_changed_is_no_home(path: Path) -> None:
    register_mapping(0x10000, 5000, str(path), Identity.of(path.stat()), lambda: True)
    path.write_bytes(b"other")
    assert Mappings.snapshot().find(0x10000, 60) is None
    path.unlink()
    assert Mappings.snapshot().find(0x10000, 60) is None


def test_a_file_set_opens_a_path_once_and_closes_it_with_its_last_use(path: Path) -> None:
    files = FileSet()
    first, second = files.open(path), files.open(str(path))
    assert first is second
    assert len(files) == 1
    files.release(first)
    assert files.open(path) is first
    files.release(first)
    files.release(first)
    assert len(files) == 0
    assert files.open(path) is not first
    files.close()
    files.close()
    assert len(files) == 0


def test_a_replaced_file_is_another_file(path: Path) -> None:
    files = FileSet()
    old = files.open(path)
    path.rename(path.with_name("old"))
    path.write_bytes(b"new")
    new = files.open(path)
    assert (old.changed(), new.changed()) == (True, False)
    assert new is not old
    files.close()
