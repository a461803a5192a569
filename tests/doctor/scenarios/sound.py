"""Machines with nothing wrong with them."""

from __future__ import annotations

from fmstream.doctor.measured import LinkRates
from fmstream.doctor.nvml import NO_PACKAGE
from fmstream.doctor.torch_facts import TorchFacts
from tests.doctor.machine import GIB, Machine
from tests.doctor.scenario import expect


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
