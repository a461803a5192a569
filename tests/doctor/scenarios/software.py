"""The driver, and what PyTorch and kernels were built for."""

from __future__ import annotations

from types import SimpleNamespace

from fmstream.core.reading import Unread
from fmstream.doctor.measured import Build
from fmstream.doctor.nvml import NO_PACKAGE
from fmstream.doctor.torch_facts import TorchFacts
from tests.doctor.machine import FakeNvml, Machine, NVMLError, write
from tests.doctor.scenario import expect

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
