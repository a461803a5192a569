"""Machines of people who blamed the wrong thing in public: repository and number of the thread are in the name."""

from __future__ import annotations

from types import SimpleNamespace

from fmstream.doctor.measured import LinkRates, Pinned
from fmstream.doctor.nvml import NO_PACKAGE
from fmstream.doctor.system import Wanted
from fmstream.doctor.torch_facts import TorchFacts
from tests.doctor.machine import GIB, MIB, Machine, memory_info
from tests.doctor.scenario import expect, no_load
from tests.doctor.scenarios.windows import windows_says


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
