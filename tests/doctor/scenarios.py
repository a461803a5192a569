"""Machines, sound and faulty, and what the doctor has to say of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fmstream.core.reading import Unread
from fmstream.doctor.measured import Build, LinkRates, MemoryCheck, Pinned, RoundTrip
from fmstream.doctor.nvml import NO_PACKAGE
from fmstream.doctor.system import Wanted
from fmstream.doctor.torch_facts import TorchDevice, TorchFacts
from tests.doctor.machine import ARCHITECTURES, GIB, MIB, FakeNvml, Machine, NVMLError, memory_info, write

Said = tuple[str, str]
"""A verdict, and a pattern that what is told must match."""


@dataclass(frozen=True)
class Scenario:
    """A machine to build and what is expected of it by the number of the check."""

    name: str
    build: Callable[[Machine], Any]
    expected: dict[int, Said]

    @property
    def status(self) -> int:
        """The exit status that follows."""
        return int(any(verdict == "FAIL" for verdict, _ in self.expected.values()))


SCENARIOS: list[Scenario] = []


def expect(expected: dict[int, Said]) -> Callable[[Callable[[Machine], Any]], Callable[[Machine], Any]]:
    def keep(build: Callable[[Machine], Any]) -> Callable[[Machine], Any]:
        SCENARIOS.append(Scenario(build.__name__, build, expected))
        return build

    return keep


def no_load(machine: Machine, **wanted: Any) -> None:
    machine.wanted = Wanted(is_measured=False, **wanted)


# Sound machines.


@expect(
    {
        1: ("OK", "driver 580.95.05, NVIDIA GeForce RTX 4090"),
        2: ("OK", "580.95.05"),
        3: ("OK", "not inside Windows"),
        5: ("OK", "of its own"),
        6: ("OK", "8.9 Ada"),
        7: ("OK", "sm_86 runs on sm_89"),
        8: ("OK", "NVRTC 13.0 built a small kernel for sm_89"),
        9: ("OK", "x16"),
        10: ("OK", "gen 4 under load"),
        11: ("OK", "straight at the root"),
        12: ("OK", "256 MiB tried, all of it pinned"),
        13: ("OK", r"26.0 GB/s in, 25.5 GB/s out.*31.5 GB/s is the raw rate of gen 4 x16; 81 % of it"),
        14: ("INFO", "35 % of pinned"),
        15: ("INFO", "each direction for itself"),
        16: ("OK", "0 in .* under load, 0 in all.*16 a minute for gen 4 x16"),
        17: ("OK", "none since boot"),
        18: ("OK", "policy default"),
        19: ("OK", "active"),
        20: ("OK", "32.0 GiB"),
        21: ("INFO", "23.5 GiB free of 24.0 GiB"),
        23: ("INFO", "not available"),
        24: ("INFO", "not available"),
        25: ("OK", "not held down under load"),
        26: ("OK", "45 C.*93 C"),
        27: ("OK", "48.0 GiB available of 64.0 GiB"),
        28: ("OK", "8.00 GiB of swap"),
        29: ("OK", "one node"),
        33: ("OK", "no error in 512 MiB"),
        34: ("OK", "bit for bit"),
    }
)
def a_sound_desktop(m: Machine) -> None:
    m.gpu()


@expect({1: ("INFO", "no NVIDIA card on this machine"), 9: ("INFO", "no card"), 34: ("OK", "on the CPU")})
def no_card_no_package(m: Machine) -> None:
    m.nvml = NO_PACKAGE
    m.torch = TorchFacts("2.13.0+cpu")


@expect({1: ("INFO", "no NVIDIA card"), 2: ("INFO", "no driver")})
def no_card_but_the_package(m: Machine) -> None:
    m.torch = TorchFacts("2.13.0+cpu")


@expect({1: ("INFO", "no NVIDIA card"), 34: ("OK", "CPU")})
def graphics_in_the_processor_only(m: Machine) -> None:
    m.gpu(vendor="0x8086", has_nvml=False, has_torch=False)


@expect({9: ("OK", "x8.*by design"), 10: ("OK", "gen 4"), 13: ("OK", "15.8 GB/s is the raw rate of gen 4 x8; 83 %")})
def x8_by_design(m: Machine) -> None:
    m.gpu(name="NVIDIA GeForce RTX 4060", width=8, slot=(4, 16), total=8 * GIB)
    m.probes.rates = LinkRates(13.1e9, 13.2e9, 5e9)


@expect(
    {
        9: ("OK", "x16"),
        23: ("OK", "on, none uncorrected, 3 corrected"),
        24: ("OK", "2 rows replaced"),
        6: ("OK", "Hopper"),
    }
)
def a_sound_server_card(m: Machine) -> None:
    m.gpu(
        name="NVIDIA H200",
        capability=(9, 0),
        generation=5,
        total=141 * GIB,
        bar1=256 * GIB,
        EccMode=[1, 1],
        TotalEccErrors=lambda kind, since: 3 if kind == 0 else 0,
        RemappedRows=(2, 0, 0, 0),
    )


@expect({1: ("OK", "RTX 4090, NVIDIA GeForce RTX 3090"), 9: ("OK", "x16")})
def two_cards(m: Machine) -> None:
    m.gpu()
    m.gpu(name="NVIDIA GeForce RTX 3090", address="0000:02:00.0", capability=(8, 6))


# The driver.


@expect({1: ("FAIL", "0000:01:00.0: an NVIDIA card without NVIDIA's driver.*install")})
def a_card_without_driver(m: Machine) -> None:
    m.gpu(has_nvml=False, has_torch=False)
    (m.folders[0] / "driver").unlink()


@expect({1: ("FAIL", "held by nouveau")})
def a_card_held_by_nouveau(m: Machine) -> None:
    m.gpu(has_nvml=False, has_torch=False)
    (m.folders[0] / "driver").unlink()
    (m.folders[0] / "driver").symlink_to("../../../bus/pci/drivers/nouveau")


@expect({1: ("INFO", "lent to a virtual machine")})
def a_card_lent_to_a_guest(m: Machine) -> None:
    m.gpu(has_nvml=False, has_torch=False)
    (m.folders[0] / "driver").unlink()
    (m.folders[0] / "driver").symlink_to("../../../bus/pci/drivers/vfio-pci")


@expect({1: ("FAIL", "libnvidia-ml is not found.*--gpus all")})
def a_container_without_the_card(m: Machine) -> None:
    m.gpu(has_nvml=False, has_torch=False)


@expect({1: ("UNKNOWN", "nvidia-ml-py is not installed"), 9: ("OK", "x16"), 21: ("INFO", "23.6 GiB in all, by torch")})
def the_package_is_missing(m: Machine) -> None:
    m.gpu(has_nvml=False)
    m.nvml = NO_PACKAGE


@expect({1: ("FAIL", "without NVIDIA's driver|library libnvidia-ml is not found")})
def the_driver_is_not_loaded(m: Machine) -> None:
    m.gpu(has_nvml=False, has_torch=False)
    m.nvml = FakeNvml([], trouble=9)


@expect({1: ("UNKNOWN", "next check"), 2: ("FAIL", "differ in version; the kernel has 575.64.03.*restart")})
def driver_mismatch(m: Machine) -> None:
    m.gpu(has_nvml=False, has_torch=False)
    m.nvml = FakeNvml([], trouble=18)
    write(m.proc / "driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.64.03  Thu\nGCC\n")


@expect({2: ("WARN", "library 580.95.05, kernel 575.64.03")})
def driver_differs_but_answers(m: Machine) -> None:
    m.gpu()
    write(m.proc / "driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.64.03  Thu\n")


@expect({1: ("FAIL", "fallen off the bus")})
def a_lost_card(m: Machine) -> None:
    m.gpu(has_nvml=False, has_torch=False)
    m.nvml = FakeNvml([], trouble=15)


@expect({1: ("UNKNOWN", "did not open")})
def no_permission(m: Machine) -> None:
    m.gpu(has_nvml=False, has_torch=False)
    m.nvml = FakeNvml([], trouble=4)


@expect({1: ("WARN", "0000:02:00.0 does not answer")})
def one_of_two_cards_is_silent(m: Machine) -> None:
    m.gpu()
    m.gpu(address="0000:02:00.0", has_nvml=False, has_torch=False)


@expect(
    {
        1: ("OK", "driver of unknown version"),
        6: ("OK", "8.9"),
        9: ("OK", "x16"),
        10: ("OK", "gen 4"),
        16: ("UNKNOWN", "PcieReplayCounter"),
        20: ("OK", "32.0 GiB"),
        21: ("INFO", "by torch"),
        23: ("INFO", "not available"),
        25: ("UNKNOWN", "."),
        26: ("UNKNOWN", "."),
    }
)
def a_library_that_answers_half(m: Machine) -> None:
    m.gpu(
        Name=b"\xff\xfe",
        CurrPcieLinkGeneration=NVMLError(999),
        CurrPcieLinkWidth=None,
        MaxPcieLinkGeneration="four",
        MaxPcieLinkWidth=-1,
        GpuMaxPcieLinkGeneration=NVMLError(13),
        CudaComputeCapability=5,
        PerformanceState=32,
        PcieReplayCounter=NVMLError(3),
        MemoryInfo=ValueError("version"),
        BAR1MemoryInfo=SimpleNamespace(),
        EccMode=[],
        RemappedRows=(1, 2),
        CurrentClocksEventReasons=True,
        Temperature=OSError("gone"),
        ComputeRunningProcesses=7,
    )
    m.nvml = FakeNvml(m.cards, driver=17)


@expect({25: ("WARN", "too hot")})
def an_old_driver_calls_them_throttle_reasons(m: Machine) -> None:
    m.gpu(CurrentClocksEventReasons=NVMLError(13), CurrentClocksThrottleReasons=0x40)


# Builds.


@expect(
    {6: ("INFO", "of no family known"), 7: ("FAIL", "code that runs on sm_150"), 8: ("WARN", "does not know sm_150")}
)
def a_card_newer_than_torch(m: Machine) -> None:
    m.gpu(capability=(15, 0))
    m.probes.built = Unread("NVRTC 13.0 does not know sm_150")


@expect({7: ("FAIL", "code that runs on sm_120.*sm_12x")})
def a_wheel_up_to_hopper_on_blackwell(m: Machine) -> None:
    m.gpu(name="NVIDIA GeForce RTX 5090", capability=(12, 0))
    m.torch = TorchFacts("2.9.0+cu126", cuda="12.6", architectures=("sm_80", "sm_86", "sm_90", "sm_90a"))


@expect({7: ("INFO", "only compute_90: translated for sm_120")})
def only_intermediate_code(m: Machine) -> None:
    m.gpu(capability=(12, 0))
    m.torch = TorchFacts("2.9.0", cuda="12.6", architectures=("sm_80", "sm_90", "compute_90"))


@expect({7: ("WARN", "built without CUDA"), 34: ("OK", "on the CPU"), 13: ("UNKNOWN", "torch does not see the card")})
def torch_without_cuda(m: Machine) -> None:
    m.gpu(has_torch=False)
    m.torch = TorchFacts("2.13.0+cpu")


@expect({7: ("UNKNOWN", "sees no card: The NVIDIA driver on your system is too old")})
def a_driver_too_old_for_torch(m: Machine) -> None:
    m.gpu(has_torch=False)
    m.torch = TorchFacts("2.13.0", cuda="13.0", warned=("The NVIDIA driver on your system is too old",))


@expect({7: ("FAIL", "cannot be imported")})
def torch_cannot_be_imported(m: Machine) -> None:
    m.gpu(has_torch=False)
    m.torch = Unread("torch cannot be imported: OSError: no libcudart")


@expect({8: ("WARN", "extra cuda are not installed.*pip install")})
def no_compiler(m: Machine) -> None:
    m.gpu()
    m.probes.built = Unread("the packages of the extra cuda are not installed")


@expect({8: ("OK", "built gather.cu, select.cu for sm_89")})
def kernels_of_our_own(m: Machine) -> None:
    m.gpu()
    m.probes.built = Build(("gather.cu", "select.cu"), "NVRTC 13.0")


# The link.


@expect({9: ("WARN", "x4 of x16.*the slot has x4.*move the card"), 10: ("OK", "gen 4")})
def x4_slot(m: Machine) -> None:
    m.gpu(now=(4, 4), slot=(4, 4))


@expect({9: ("WARN", "x4 of x16.*which the card has and the slot too.*reseat")})
def x4_in_an_x16_slot(m: Machine) -> None:
    m.gpu(now=(4, 4), slot=(4, 16))


@expect({9: ("WARN", "x8 of x16.*the slot has x8")})
def x8_by_bifurcation(m: Machine) -> None:
    m.gpu(now=(4, 8), slot=(4, 8))


@expect({9: ("OK", "x16"), 10: ("UNKNOWN", "gen 1 of 4 while idle in state P8")})
def idle_at_gen_1(m: Machine) -> None:
    m.gpu(now=(1, 16), state=8)
    no_load(m)


@expect({9: ("OK", "x16"), 10: ("OK", "gen 4 under load")})
def idle_at_gen_1_and_full_under_load(m: Machine) -> None:
    m.gpu(now=(1, 16), state=8, busy={"CurrPcieLinkGeneration": 4, "PerformanceState": 0})


@expect({10: ("WARN", "gen 1 of 4 under load"), 13: ("WARN", "3.90 GB/s")})
def gen_1_under_load(m: Machine) -> None:
    m.gpu(now=(1, 16))
    m.probes.rates = LinkRates(1.9e9, 3.9e9)


@expect({10: ("OK", "gen 3, for the slot; the card could do gen 4"), 9: ("OK", "x16")})
def a_slot_of_gen_3(m: Machine) -> None:
    m.gpu(slot=(3, 16), now=(3, 16))


@expect(
    {
        9: ("UNKNOWN", "all bits set: the device does not answer"),
        10: ("UNKNOWN", "not readable"),
        11: ("UNKNOWN", "not told"),
    }
)
def a_device_of_ones(m: Machine) -> None:
    unread = {
        "current_link_speed": "Unknown",
        "current_link_width": "63",
        "max_link_speed": "Unknown",
        "max_link_width": "255",
    }
    m.gpu(has_nvml=False, files=unread)
    m.nvml = NO_PACKAGE


@expect(
    {9: ("UNKNOWN", "powered off.*put the card to work"), 19: ("UNKNOWN", "suspended"), 10: ("UNKNOWN", "powered off")}
)
def a_card_that_sleeps(m: Machine) -> None:
    m.gpu(has_nvml=False, files={"power/runtime_status": "suspended", "current_link_width": "63"})
    m.nvml = NO_PACKAGE
    no_load(m)


@expect({11: ("WARN", r"limited at 0000:03:00.0: gen 4 x4, 7.88 GB/s.*gen 4 x16, 31.5 GB/s"), 9: ("OK", "x16")})
def a_switch_behind_four_lanes(m: Machine) -> None:
    root = m.port("0000:00:05.0", width=16, now=(4, 4))
    inner = m.port("0000:03:00.0", now=(4, 4), under=root)
    m.gpu(address="0000:05:00.0", under=m.port("0000:04:00.0", under=inner))


@expect({11: ("OK", "2 ports further up, none slower")})
def a_switch_with_all_lanes(m: Machine) -> None:
    root = m.port("0000:00:05.0", now=(1, 16))
    m.gpu(address="0000:05:00.0", now=(1, 16), under=m.port("0000:04:00.0", under=m.port("0000:03:00.0", under=root)))


@expect({11: ("INFO", "outside the case.*2.5 GT/s whatever they carry"), 9: ("OK", "x4")})
def a_card_in_a_dock(m: Machine) -> None:
    root = m.port("0000:00:07.0", generation=1, width=4)
    outer = m.port("0000:05:00.0", generation=1, width=4, under=root)
    m.gpu(address="0000:06:00.0", now=(1, 4), width=4, files={"removable": "removable"}, under=outer)
    no_load(m)


@expect(
    {20: ("INFO", "256 MiB: resizable BAR is off; the card could map 32.0 GiB. It is a window, not the card's memory")}
)
def a_small_window(m: Machine) -> None:
    m.gpu(bar1=256 * MIB, files={"resource1_resize": f"{1 << 15 | 1 << 8:016x}"})


@expect({20: ("OK", "32.0 GiB")})
def a_window_by_sysfs(m: Machine) -> None:
    m.gpu(BAR1MemoryInfo=NVMLError(3))


@expect({18: ("INFO", "powersave")})
def links_save_power(m: Machine) -> None:
    m.gpu()
    write(m.sysfs / "module/pcie_aspm/parameters/policy", "default performance [powersave] powersupersave\n")


@expect({16: ("WARN", "400 in .* under load, 1400 in all.*16 a minute.*reseat")})
def replays_under_load(m: Machine) -> None:
    card = m.gpu(PcieReplayCounter=1000)
    m.probes.during = lambda: card.answers.update(PcieReplayCounter=1400)


@expect({16: ("INFO", "1000 since the driver was loaded; whether they rise")})
def replays_long_ago(m: Machine) -> None:
    m.gpu(PcieReplayCounter=1000)
    no_load(m)


@expect({17: ("WARN", "50 at 0000:00:01.0 while it was under load")})
def errors_that_rise_at_the_port(m: Machine) -> None:
    m.gpu()
    counters = m.folders[0].parent / "aer_dev_correctable"
    write(counters, "RxErr 10\nTOTAL_ERR_COR 10\n")
    m.probes.during = lambda: write(counters, "RxErr 60\nTOTAL_ERR_COR 60\n")


@expect({17: ("INFO", "10 at 0000:00:01.0 since boot, corrected; none of them under load")})
def errors_long_ago(m: Machine) -> None:
    m.gpu()
    write(m.folders[0].parent / "aer_dev_correctable", "RxErr 10\nTOTAL_ERR_COR 10\n")


@expect({17: ("FAIL", "2 MalfTLP at 0000:01:00.0 since boot, fatal")})
def fatal_errors(m: Machine) -> None:
    m.gpu(files={"aer_dev_fatal": "DLP 0\nMalfTLP 2\nTOTAL_ERR_FATAL 2"})


@expect({17: ("OK", "none")})
def a_question_for_what_is_not_there(m: Machine) -> None:
    m.gpu(files={"aer_dev_nonfatal": "UnsupReq 4\nTOTAL_ERR_NONFATAL 4"})


@expect({17: ("WARN", "3 CmpltTO at 0000:01:00.0 since boot, not corrected")})
def completion_timeouts(m: Machine) -> None:
    m.gpu(files={"aer_dev_nonfatal": "UnsupReq 4\nCmpltTO 3\nTOTAL_ERR_NONFATAL 7"})


@expect({13: ("WARN", r"12.0 GB/s in.*38 % of it"), 14: ("INFO", "67 % of pinned")})
def copies_at_a_third(m: Machine) -> None:
    m.gpu()
    m.probes.rates = LinkRates(12e9, 12.5e9, 8e9, 8e9)


@expect({13: ("INFO", "73 % of it"), 14: ("UNKNOWN", "not measured"), 15: ("UNKNOWN", "not measured")})
def copies_in_between(m: Machine) -> None:
    m.gpu()
    m.probes.rates = LinkRates(23e9, 24e9)


@expect({13: ("UNKNOWN", "out of memory"), 14: ("UNKNOWN", "."), 15: ("UNKNOWN", "."), 33: ("UNKNOWN", "no room")})
def a_card_that_is_full(m: Machine) -> None:
    m.gpu()
    m.probes.rates = Unread("out of memory")
    m.probes.memory = Unread("no room")


# The card.


@expect({23: ("FAIL", "2 uncorrected since the driver.*memory tests do not tell which part")})
def uncorrected_errors(m: Machine) -> None:
    m.gpu(EccMode=[1, 1], TotalEccErrors=lambda kind, since: 2 if kind == 1 else 9)


@expect({23: ("WARN", "4 uncorrected in its life")})
def uncorrected_errors_of_old(m: Machine) -> None:
    m.gpu(EccMode=[1, 1], TotalEccErrors=lambda kind, since: 4 if (kind, since) == (1, 1) else 0)


@expect({23: ("INFO", "off")})
def ecc_off(m: Machine) -> None:
    m.gpu(EccMode=[0, 0])


@expect({24: ("WARN", "one waits to be.*reset the card")})
def row_remap_pending(m: Machine) -> None:
    m.gpu(RemappedRows=(0, 1, 1, 0))


@expect({24: ("FAIL", "could not be replaced")})
def row_remap_failed(m: Machine) -> None:
    m.gpu(RemappedRows=(3, 5, 0, 1))


@expect({24: ("WARN", "pages wait to be retired")})
def retired_pages_pending(m: Machine) -> None:
    m.gpu(capability=(7, 5), RetiredPagesPendingStatus=1)


@expect({25: ("WARN", "power brake by the supply, under load")})
def power_brake_under_load(m: Machine) -> None:
    m.gpu(busy={"CurrentClocksEventReasons": 0x80})


@expect({25: ("INFO", "power limit, under load")})
def at_the_power_limit(m: Machine) -> None:
    m.gpu(busy={"CurrentClocksEventReasons": 0x4})


@expect({26: ("WARN", "94 C.*93 C")})
def too_hot_under_load(m: Machine) -> None:
    m.gpu(busy={"Temperature": 94})


@expect({26: ("INFO", "45 C; where it slows down is not told")})
def no_threshold(m: Machine) -> None:
    m.gpu(TemperatureThreshold=NVMLError(3))


@expect({21: ("WARN", "30.0 GiB, as --memory says")})
def more_memory_than_is_free(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(memory_bytes=30 * GIB)


@expect({33: ("FAIL", "17 wrong words in 512 MiB.*bit 3.*a fault on the memory path")})
def memory_that_forgets(m: Machine) -> None:
    m.gpu()
    m.probes.memory = MemoryCheck(512 * MIB, 17, 1.0, "bit 3 stays at 1")


@expect({34: ("FAIL", "differs from the unstreamed run")})
def wrong_bytes(m: Machine) -> None:
    m.gpu()
    m.probes.trip = RoundTrip(is_equal=False, streamed_bytes=MIB)


@expect({34: ("UNKNOWN", "did not stream on the CPU: no folder")})
def streaming_fails_on_the_cpu(m: Machine) -> None:
    m.probes.trip = Unread("no folder")


@expect(
    {
        1: ("INFO", "torch drives an AMD card"),
        5: ("INFO", r"Radeon 8060S Graphics \(gfx1151\) shares the host's memory.*gains little"),
        6: ("INFO", "gfx1151, not an NVIDIA card"),
        7: ("INFO", "drives it"),
        21: ("INFO", "shares the host's memory"),
        23: ("INFO", "no NVIDIA card"),
    }
)
def a_unified_memory_apu(m: Machine) -> None:
    apu = TorchDevice(0, "Radeon 8060S Graphics", None, None, "gfx1151", is_integrated=True, total_bytes=96 * GIB)
    m.torch = TorchFacts("2.11.0+rocm7", hip="7.0", architectures=("gfx1151",), devices=(apu,))


@expect({5: ("INFO", "GB10 shares the host's memory"), 21: ("INFO", "shares")})
def a_unified_memory_nvidia_board(m: Machine) -> None:
    card = m.gpu(name="NVIDIA GB10", capability=(12, 1), has_torch=False)
    card.answers["MemoryInfo"] = NVMLError(3)
    device = TorchDevice(0, "NVIDIA GB10", "0000:01:00.0", (12, 1), is_integrated=True, total_bytes=119 * GIB)
    m.torch = TorchFacts("2.13.0", cuda="13.0", architectures=ARCHITECTURES, devices=(device,))


# The host.


@expect({27: ("FAIL", "leaves 14.0 GiB of 16.0 GiB.*20.0 GiB to be pinned.*pinned= less")})
def a_group_limit_below_the_pins(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(pinned_bytes=20 * GIB)
    group = m.sysfs / "fs/cgroup/user.slice"
    write(group / "memory.max", f"{16 * GIB}\n")
    write(group / "memory.current", f"{12 * GIB}\n")
    write(group / "memory.stat", f"anon {2 * GIB}\ninactive_file {9 * GIB}\nactive_file {GIB}\nbroken\n")


@expect(
    {27: ("WARN", 'leaves 15.0 GiB of 16.0 GiB.*44.8 GiB, which pinned="auto" may take.*the kernel ends the process')}
)
def a_group_limit_of_the_first_version(m: Machine) -> None:
    m.gpu()
    write(m.proc / "self/cgroup", "4:memory:/docker/abc\n3:cpu:/\n0::/\n")
    group = m.sysfs / "fs/cgroup/memory/docker/abc"
    write(group / "memory.limit_in_bytes", f"{16 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{3 * GIB}\n")
    write(group / "memory.stat", f"inactive_file 0\ntotal_inactive_file {2 * GIB}\n")


@expect({27: ("OK", "the control group leaves 60.0 GiB")})
def a_wide_group_above_a_group_that_is_not_there(m: Machine) -> None:
    m.gpu()
    write(m.proc / "self/cgroup", "0::/../../elsewhere/job.scope\n")
    write(m.sysfs / "fs/cgroup/memory.max", f"{62 * GIB}\n")
    write(m.sysfs / "fs/cgroup/memory.current", f"{2 * GIB}\n")


@expect({27: ("FAIL", "48.0 GiB available.*60.0 GiB to be pinned")})
def a_model_larger_than_memory(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(model_bytes=60 * GIB)


@expect({27: ("UNKNOWN", "meminfo"), 28: ("UNKNOWN", "meminfo")})
def no_meminfo(m: Machine) -> None:
    m.gpu()
    (m.proc / "meminfo").unlink()


@expect({28: ("WARN", "4.00 GiB may still be promised.*20.0 GiB of weights")})
def strict_overcommit(m: Machine) -> None:
    m.gpu()
    write(m.proc / "sys/vm/overcommit_memory", "2\n")
    m.set_memory(64 * GIB, 48 * GIB, CommitLimit=40 * GIB, Committed_AS=36 * GIB)
    m.wanted = Wanted(model_bytes=20 * GIB)


@expect({29: ("WARN", "the card is at node 1, this process runs on others only.*numactl --cpunodebind=1")})
def numa_mismatch(m: Machine) -> None:
    m.gpu(files={"numa_node": "1"})
    write(m.sysfs / "devices/system/node/node0/cpulist", "0-7\n")
    write(m.sysfs / "devices/system/node/node1/cpulist", "8-15\n")
    m.cpus = frozenset(range(8))


@expect({29: ("OK", "card and process at node 1")})
def numa_bound(m: Machine) -> None:
    m.gpu(files={"numa_node": "1"})
    write(m.sysfs / "devices/system/node/node0/cpulist", "0-7\n")
    write(m.sysfs / "devices/system/node/node1/cpulist", "8-11,12,13-15\n")
    m.cpus = frozenset({8, 15})


@expect({29: ("INFO", "may run on all of 2 nodes")})
def numa_not_bound(m: Machine) -> None:
    m.gpu(files={"numa_node": "0"})
    write(m.sysfs / "devices/system/node/node0/cpulist", "0-7\n")
    write(m.sysfs / "devices/system/node/node1/cpulist", "8-15\n")


@expect({29: ("UNKNOWN", "the firmware does not say")})
def numa_unknown(m: Machine) -> None:
    m.gpu()
    write(m.sysfs / "devices/system/node/node1/cpulist", "16-31\n")


@expect({12: ("WARN", "64.0 MiB pinned, then refused; ulimit -l is 64.0 MiB.*raising ulimit -l may help")})
def a_limit_on_locked_memory(m: Machine) -> None:
    m.gpu()
    m.locked = 64 * MIB
    m.probes.pinned = lambda num_bytes: Pinned(64 * MIB, was_refused=True)


@expect({12: ("OK", "1.00 GiB pinned, then refused.*512 MiB to be pinned")})
def pins_within_what_is_allowed(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(pinned_bytes=512 * MIB)
    m.probes.pinned = lambda num_bytes: Pinned(GIB, was_refused=True)


@expect({30: ("OK", "ext4 on /, 10.0 GiB of weights"), 12: ("OK", "2.00 GiB tried")})
def a_model_on_a_fast_disk(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(path=Path("/models/m"), model_bytes=10 * GIB)


@expect({30: ("INFO", "on a disk that turns")})
def a_model_on_a_disk_that_turns(m: Machine) -> None:
    m.gpu()
    m.mount("/data\\040store", "ext4", "/dev/sda1", "8:1")
    write(m.sysfs / "devices/sda/queue/rotational", "1\n")
    write(m.sysfs / "devices/sda/sda1/partition", "1\n")
    (m.sysfs / "dev/block/8:1").symlink_to(m.sysfs / "devices/sda/sda1")
    m.wanted = Wanted(path=Path("/data store/m"))


@expect({30: ("OK", "ext4 on /data store(?!, on a disk)")})
def a_model_on_a_virtual_disk_that_says_that_it_turns(m: Machine) -> None:
    m.gpu()
    m.mount("/data\\040store", "ext4", "/dev/vda1", "254:1")
    write(m.sysfs / "devices/pci0000:00/virtio1/block/vda/queue/rotational", "1\n")
    write(m.sysfs / "devices/pci0000:00/virtio1/block/vda/vda1/partition", "1\n")
    (m.sysfs / "dev/block/254:1").symlink_to(m.sysfs / "devices/pci0000:00/virtio1/block/vda/vda1")
    m.wanted = Wanted(path=Path("/data store/m"))


@expect({30: ("INFO", "nfs4 on /srv.*network file system")})
def a_model_on_the_network(m: Machine) -> None:
    m.gpu()
    m.mount("/srv", "nfs4", "server:/srv", "0:50")
    m.wanted = Wanted(path=Path("/srv/m"))


@expect({30: ("INFO", "tmpfs on /dev/shm.*count twice")})
def a_model_in_memory(m: Machine) -> None:
    m.gpu()
    m.mount("/dev/shm", "tmpfs", "tmpfs")
    m.wanted = Wanted(path=Path("/dev/shm/m"))


# Windows and WSL2.

WINDOWS: dict[str, Any] = {
    "system": {"TotalVirtualMemorySize": 96 << 20, "FreeVirtualMemory": 30 << 20, "TotalVisibleMemorySize": 64 << 20},
    "managed": True,
    "files": {"AllocatedBaseSize": 32768, "CurrentUsage": 100},
    "agent": {"MemoryCompression": True},
    "defender": {"RealTimeProtectionEnabled": True},
    "exclusions": ["D:\\models"],
    "adapters": [{"Name": "NVIDIA GeForce RTX 4090", "DriverVersion": "32.0.15.8088"}, {"Name": "Intel(R) UHD"}],
    "memory": [
        {"Name": "luid_0_phys_0", "DedicatedUsage": 2 * GIB, "SharedUsage": GIB},
        {"Name": "luid_1_phys_0", "DedicatedUsage": 0, "SharedUsage": MIB},
    ],
    "aspm": "GUID\n    Current AC Power Setting Index: 0x00000002\n    Current DC Power Setting Index: 0x00000001\n",
    "smi": "00000000:01:00.0, WDDM\n",
}


def windows_says(**more: Any) -> str:
    return json.dumps(WINDOWS | more)


@expect(
    {
        4: ("INFO", "WDDM.*by design"),
        9: ("OK", "x16.*all that card and slot have together"),
        11: ("INFO", "of Linux only"),
        18: ("INFO", "most on mains, moderate on battery"),
        22: ("INFO", "2.00 GiB of the card's memory used, 1.00 GiB of RAM"),
        27: ("OK", "48.0 GiB available of 64.0 GiB"),
        28: ("OK", "30.0 GiB of 96.0 GiB may still be promised; page file 32.0 GiB, sized by Windows"),
        31: ("OK", "msvcp140"),
        32: ("INFO", "on"),
    }
)
def windows_with_wddm(m: Machine) -> None:
    m.gpu(DriverModel_v2=[0, 0])
    m.become_windows()
    m.windows = windows_says()


@expect(
    {
        4: ("OK", "MCDM"),
        18: ("OK", "off on mains"),
        32: ("OK", "off"),
        30: ("INFO", "Defender scans.*1 folders excluded"),
    }
)
def windows_with_mcdm(m: Machine) -> None:
    m.gpu(DriverModel_v2=[2, 2])
    m.become_windows()
    m.wanted = Wanted(path=Path("D:/m"))
    m.windows = windows_says(aspm="x: 0x00000000\ny: 0x00000001\n", agent={"MemoryCompression": False})


@expect({28: ("WARN", "30.0 GiB of 96.0 GiB.*40.0 GiB of weights.*error 1455")})
def windows_cannot_promise_the_model(m: Machine) -> None:
    m.gpu(DriverModel_v2=[0, 0])
    m.become_windows()
    m.wanted = Wanted(model_bytes=40 * GIB)
    m.windows = windows_says(managed=True)


@expect({22: ("WARN", "23.5 GiB of the card's memory used, 6.00 GiB of RAM.*Prefer no sysmem fallback")})
def windows_spills_to_ram(m: Machine) -> None:
    m.gpu(DriverModel_v2=[0, 0])
    m.become_windows()
    m.windows = windows_says(memory={"Name": "x", "DedicatedUsage": int(23.5 * GIB), "SharedUsage": 6 * GIB})


@expect({31: ("FAIL", "msvcp140.dll, vcruntime140.dll missing.*redistributable")})
def windows_without_the_vc_runtime(m: Machine) -> None:
    m.become_windows()
    m.libraries = False
    m.torch = Unread("torch cannot be imported: OSError: [WinError 126]")
    m.windows = windows_says(adapters=[])


@expect({1: ("FAIL", "an NVIDIA card without NVIDIA's driver")})
def windows_without_the_driver(m: Machine) -> None:
    m.become_windows()
    m.windows = windows_says()


@expect({18: ("UNKNOWN", "."), 28: ("UNKNOWN", "."), 32: ("UNKNOWN", "."), 4: ("UNKNOWN", "not told")})
def windows_that_says_nothing(m: Machine) -> None:
    m.gpu()
    m.become_windows()
    m.windows = "Zugriff verweigert\r\n"


@expect(
    {
        1: ("OK", "RTX 4090"),
        3: ("INFO", "WSL2, kernel 5.15.*pinned memory is limited"),
        4: ("INFO", "WDDM"),
        9: ("OK", "x16"),
        11: ("UNKNOWN", "bus"),
        18: ("INFO", "host's affair"),
        28: ("OK", ".wslconfig"),
        30: ("WARN", "9p on /mnt/c.*move the model to the Linux side"),
    }
)
def wsl2(m: Machine) -> None:
    m.gpu(DriverModel_v2=NVMLError(3))
    m.become_wsl()
    m.mount("/mnt/c", "9p", "C:\\134", "0:44")
    m.wanted = Wanted(path=Path("/mnt/c/models/m"))
    m.windows = windows_says()


@expect({1: ("INFO", "no NVIDIA library inside WSL2.*none inside WSL2"), 34: ("OK", "CPU")})
def wsl2_without_a_card(m: Machine) -> None:
    m.become_wsl()
    m.torch = TorchFacts("2.13.0+cpu")


@expect(
    {
        1: ("INFO", "no NVIDIA card"),
        3: ("INFO", "of Linux only"),
        27: ("OK", "64.0 GiB"),
        28: ("INFO", "of Linux and Windows"),
    }
)
def a_mac(m: Machine) -> None:
    m.become_windows()
    m.platform = "darwin"
    m.torch = TorchFacts("2.13.0")


# Threads of users that blamed the wrong thing (see the list in the repositories named).


@expect({9: ("OK", "x16"), 10: ("UNKNOWN", "gen 1 of 3 while idle")})
def misread_nvtop_6_gen_1_at_16x(m: Machine) -> None:
    m.gpu(generation=3, now=(1, 16), state=8)
    no_load(m)


@expect({9: ("OK", "x16"), 10: ("OK", "gen 5 under load")})
def misread_open_gpu_kernel_modules_1010_gen_5_under_load(m: Machine) -> None:
    m.gpu(generation=5, now=(1, 16), state=8, busy={"CurrPcieLinkGeneration": 5})


@expect({9: ("OK", "x16"), 10: ("WARN", "gen 1 of 5 under load")})
def misread_open_gpu_kernel_modules_1010_stays_at_gen_1(m: Machine) -> None:
    m.gpu(generation=5, now=(1, 16), state=8, busy={"PerformanceState": 0})


@expect({9: ("OK", "x16"), 10: ("UNKNOWN", "while idle"), 11: ("OK", "root")})
def misread_jan_183_a_riser_is_blamed(m: Machine) -> None:
    m.gpu(now=(1, 16), state=8, has_nvml=False)
    m.nvml = NO_PACKAGE
    no_load(m)


@expect({20: ("OK", "32.0 GiB"), 21: ("INFO", "of 24.0 GiB")})
def misread_nvtop_436_window_added_to_memory(m: Machine) -> None:
    m.gpu(name="NVIDIA GeForce RTX 3090", capability=(8, 6), total=24 * GIB, bar1=32 * GIB)


@expect({20: ("INFO", "window of 256 MiB.*not the card's memory"), 21: ("INFO", "of 2.00 GiB")})
def misread_monitee_295_windows_summed_to_288_mb(m: Machine) -> None:
    m.torch = TorchFacts("2.9.0+cu126", cuda="12.6", architectures=("sm_60", "sm_70"))
    m.gpu(name="NVIDIA GeForce GT 1030", capability=(6, 1), total=2 * GIB, bar1=256 * MIB, width=4, slot=(4, 16))


@expect({21: ("INFO", "308 MiB used, which counts what the driver keeps for itself")})
def misread_gpustat_141_used_while_idle(m: Machine) -> None:
    m.gpu(MemoryInfo=memory_info(24 * GIB, 308 * MIB, None))


@expect({21: ("INFO", "8.00 MiB used, 300 MiB kept by the driver")})
def misread_gpustat_141_by_the_second_version(m: Machine) -> None:
    m.gpu(MemoryInfo=memory_info(24 * GIB, 308 * MIB, 300 * MIB))


@expect({4: ("INFO", "by design"), 21: ("INFO", "how much each uses is not told here")})
def misread_nvitop_55_no_use_by_process(m: Machine) -> None:
    m.gpu(DriverModel_v2=[0, 0], ComputeRunningProcesses=[SimpleNamespace(pid=1, usedGpuMemory=None)])
    m.become_windows()
    m.windows = windows_says()


@expect(
    {
        12: ("WARN", "1.00 GiB pinned, then refused.*reads as out of memory while the card has room"),
        21: ("INFO", "free"),
    }
)
def misread_wsl_8447_out_of_memory_with_memory_free(m: Machine) -> None:
    m.gpu()
    m.become_wsl()
    m.wanted = Wanted(pinned_bytes=8 * GIB)
    m.probes.pinned = lambda num_bytes: Pinned(GIB, was_refused=True)


@expect({22: ("INFO", "a tensor larger than the card may succeed here and lie in RAM.*ignore it")})
def misread_wsl_11050_a_tensor_larger_than_the_card(m: Machine) -> None:
    m.gpu(total=16 * GIB)
    m.become_wsl()


@expect({15: ("INFO", "12.5 GB/s in and 12.1 GB/s out at once, each direction for itself"), 13: ("OK", "81 %")})
def misread_nvbandwidth_11_both_ways(m: Machine) -> None:
    m.gpu()
    m.probes.rates = LinkRates(25.5e9, 26.1e9, 9e9, 9e9, 12.5e9, 12.1e9)


@expect({21: ("INFO", "200 to 700 MB for its context, before it allocates anything")})
def misread_pytorch_28113_used_with_nothing_allocated(m: Machine) -> None:
    m.gpu(ComputeRunningProcesses=[SimpleNamespace(pid=1, usedGpuMemory=450 * MIB)])
