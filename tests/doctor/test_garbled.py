"""Files and answers that make no sense never raise, and never count as a failure."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fmstream.core.reading import parse_cpu_list, parse_int, read_int, read_text
from fmstream.device.control_groups import group_limit
from fmstream.doctor.checks.build import runs_on
from fmstream.doctor.environment import describe
from fmstream.doctor.examine import examine
from fmstream.doctor.host import is_rotational, meminfo, mount_of, numa_nodes
from fmstream.doctor.nvml import Nvml
from fmstream.doctor.page import render_checkup
from fmstream.doctor.pci import PciDevice, same_address
from fmstream.doctor.system import Wanted
from fmstream.doctor.windows import WindowsFacts, parse_windows
from tests.doctor.machine import FakeCard, FakeNvml, Machine, NVMLError

DEVICE_FILES = (
    "vendor",
    "class",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "numa_node",
    "resource",
    "resource1_resize",
    "removable",
    "power/runtime_status",
    "aer_dev_correctable",
    "aer_dev_nonfatal",
    "aer_dev_fatal",
)
PROC_FILES = ("meminfo", "self/cgroup", "self/mountinfo", "sys/kernel/osrelease", "sys/vm/overcommit_memory", "cpuinfo")
SYS_FILES = (
    "fs/cgroup/user.slice/memory.max",
    "fs/cgroup/user.slice/memory.current",
    "fs/cgroup/user.slice/memory.stat",
    "devices/system/node/node0/cpulist",
    "module/pcie_aspm/parameters/policy",
    "dev/block/259:2/queue/rotational",
)
REAL = st.sampled_from(
    [
        "0x10de",
        "0x030000",
        "-1",
        "63",
        "0",
        "255",
        "Unknown",
        "16.0 GT/s PCIe",
        "0x0 0x0 0x0",
        "max",
        "0::/..",
        "[",
        "0-",
    ]
)
JUNK = st.one_of(
    REAL.map(str.encode),
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.integers(-(2**80), 2**80).map(lambda number: f"{number}".encode()),
)
ANSWER: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.binary(max_size=8),
    st.text(max_size=8),
    st.lists(st.integers(-3, 2**65), max_size=5),
    st.sampled_from([NVMLError(3), NVMLError(999), OSError("gone"), ValueError("odd"), TypeError("odd")]),
)


@settings(max_examples=60)
@given(
    device=st.dictionaries(st.sampled_from(DEVICE_FILES), JUNK),
    proc=st.dictionaries(st.sampled_from(PROC_FILES), JUNK),
    sys=st.dictionaries(st.sampled_from(SYS_FILES), JUNK),
)
def test_garbled_files(device: dict[str, bytes], proc: dict[str, bytes], sys: dict[str, bytes]) -> None:
    with TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        machine.gpu(has_nvml=False)
        machine.wanted = Wanted(path=Path("/models/m"), model_bytes=1)
        for root, files in ((machine.folders[0], device), (machine.proc, proc), (machine.sysfs, sys)):
            for name, content in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content)
        checkup = examine(machine.system)
        broken = [finding.result.read for finding in checkup.findings if "check itself failed" in finding.result.read]
        assert broken == []
        render_checkup(checkup, width=40)
        describe(machine.system)


@settings(max_examples=60)
@given(answers=st.dictionaries(st.sampled_from(sorted(FakeNvml.names())), ANSWER), driver=ANSWER)
def test_garbled_answers_of_the_library(answers: dict[str, Any], driver: Any) -> None:
    with TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        machine.gpu().answers.update(answers)
        machine.nvml = FakeNvml(machine.cards, driver=driver)
        checkup = examine(machine.system)
        broken = [finding.result.read for finding in checkup.findings if "check itself failed" in finding.result.read]
        assert broken == []
        render_checkup(checkup)
        describe(machine.system)


@given(JUNK)
def test_single_readers(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        read_text(path), read_int(path)
        text = content.decode("utf-8", "replace")
        parse_int(text, "x"), parse_cpu_list(text), runs_on(text, (8, 9)), same_address(text), parse_windows(text)


@pytest.mark.parametrize("reader", [meminfo, numa_nodes])
def test_missing_folders_are_empty(reader: Any, tmp_path: Path) -> None:
    assert reader(tmp_path / "none") == {}


def test_missing_files_are_reasons(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert group_limit(none, none) is None
    assert "mountinfo" in str(mount_of(none, Path("/a")))
    assert str(is_rotational(none, "8:0")) == "not told"
    device = PciDevice(none)
    assert (device.driver, device.is_display, device.is_asleep, list(device.above())) == (None, False, False, [])
    assert device.bar_sizes(1) == ()
    assert "No such file" in str(device.errors("fatal"))
    assert "NUL" in str(read_text(Path("a\0b"))) or "null" in str(read_text(Path("a\0b")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
NAMES = ("system", "managed", "files", "agent", "defender", "exclusions", "adapters", "memory", "aspm", "smi")


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
@example({"exclusions": ["N/A: Must be an administrator to view exclusions"]})
@example({"adapters": {"value": [{"Name": "NVIDIA"}], "Count": 1}})
@example({"system": {"TotalVirtualMemorySize": "12", "FreeVirtualMemory": -1}})
def test_windows_says_something_odd(document: dict[str, Any]) -> None:
    facts = parse_windows(json.dumps(document))
    assert isinstance(facts, WindowsFacts)


def test_a_library_without_calls_is_no_library() -> None:
    class Empty:
        NVMLError = NVMLError

    library = Nvml(lambda: Empty)
    assert not library.is_open
    assert library.cards() == []
    library.close()


def test_a_closed_library_answers_nothing() -> None:
    library = Nvml(lambda: FakeNvml([FakeCard({"Name": b"card"})]))
    (card,) = library.cards()
    assert card.name == "card"
    library.close()
    library.close()
    assert str(card.name) == "closed"
