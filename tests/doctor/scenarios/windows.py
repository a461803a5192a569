"""Windows and WSL2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fmstream.core.reading import Unread
from fmstream.doctor.system import Wanted
from fmstream.doctor.torch_facts import TorchFacts
from tests.doctor.machine import GIB, MIB, Machine, NVMLError
from tests.doctor.scenario import expect

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
    """What Windows answers when it is asked for all, with some answers changed."""
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
