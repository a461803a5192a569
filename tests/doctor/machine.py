"""Made-up machines: sysfs and proc under a folder, a management library, a torch, and trials with set results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fmstream.core.reading import Unread
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.measured import Build, LinkRates, MemoryCheck, Pinned, RoundTrip
from fmstream.doctor.system import System, Wanted
from fmstream.doctor.torch_facts import TorchDevice, TorchFacts

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GTS = {1: "2.5 GT/s PCIe", 2: "5.0 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}
NOT_SUPPORTED = 3

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


ASKED = frozenset(
    {
        "Name",
        "PciInfo",
        "CudaComputeCapability",
        "CurrPcieLinkGeneration",
        "CurrPcieLinkWidth",
        "MaxPcieLinkGeneration",
        "MaxPcieLinkWidth",
        "GpuMaxPcieLinkGeneration",
        "PerformanceState",
        "PcieReplayCounter",
        "MemoryInfo",
        "BAR1MemoryInfo",
        "EccMode",
        "TotalEccErrors",
        "RemappedRows",
        "RetiredPagesPendingStatus",
        "CurrentClocksEventReasons",
        "CurrentClocksThrottleReasons",
        "Temperature",
        "TemperatureThreshold",
        "DriverModel_v2",
        "ComputeRunningProcesses",
    }
)
"""What a card may be asked for, by the end of the call's name."""


class NVMLError(Exception):
    """As the library's own: a number with a text."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class FakeCard:
    """Answers by the end of the call's name; a missing one is not supported.  ``busy`` holds while copies run."""

    answers: dict[str, Any]
    busy: dict[str, Any] = field(default_factory=dict)
    is_busy: bool = False

    def ask(self, name: str, *arguments: Any) -> Any:
        answer = (
            self.busy[name] if self.is_busy and name in self.busy else self.answers.get(name, NVMLError(NOT_SUPPORTED))
        )
        if callable(answer):
            answer = answer(*arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeNvml:
    """Stands for the module of nvidia-ml-py."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028

    def __init__(self, cards: list[FakeCard], trouble: int | None = None, driver: Any = b"580.95.05") -> None:
        self.cards = cards
        self.trouble = trouble
        self.driver = driver
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.trouble is not None:
            raise NVMLError(self.trouble)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    @staticmethod
    def names() -> frozenset[str]:
        """What a card is asked for."""
        return ASKED

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return lambda card, *arguments: card.ask(name.removeprefix("nvmlDeviceGet"), *arguments)


def memory_info(total: int, used: int, reserved: int | None) -> Callable[..., Any]:
    """The two versions of the call; None for ``reserved`` makes the second one fail."""

    def answer(version: int | None = None) -> Any:
        if version is None:
            return SimpleNamespace(total=total, used=used, free=total - used)
        if reserved is None:
            return NVMLError(999)
        return SimpleNamespace(total=total, used=used - reserved, free=total - used, reserved=reserved)

    return answer


@dataclass
class FakeProbes:
    """Trials with results that were set; ``cards`` become busy while copies run."""

    cards: list[FakeCard] = field(default_factory=list)
    pinned: Callable[[int], Pinned | Unread] = lambda num_bytes: Pinned(num_bytes, was_refused=False)
    rates: LinkRates | Unread = field(default_factory=lambda: LinkRates(26e9, 25.5e9, 9e9, 8e9, 20e9, 20e9))
    memory: MemoryCheck | Unread = field(default_factory=lambda: MemoryCheck(512 * MIB, 0, 1.5))
    trip: RoundTrip | Unread = field(default_factory=lambda: RoundTrip(is_equal=True, streamed_bytes=6 * MIB))
    built: Build | Unread = field(default_factory=lambda: Build(("a small kernel",), "NVRTC 13.0"))
    during: Callable[[], None] = lambda: None
    asked: list[str] = field(default_factory=list)

    def pin(self, gpu: Gpu, num_bytes: int) -> Pinned | Unread:
        self.asked.append("pin")
        return self.pinned(num_bytes)

    def link_rates(self, gpu: Gpu, sample: Callable[[], None]) -> LinkRates | Unread:
        self.asked.append("link_rates")
        for card in self.cards:
            card.is_busy = True
        sample()
        sample()
        self.during()
        for card in self.cards:
            card.is_busy = False
        return self.rates

    def memory_check(self, gpu: Gpu) -> MemoryCheck | Unread:
        self.asked.append("memory_check")
        return self.memory

    def round_trip(self, gpu: Gpu | None) -> RoundTrip | Unread:
        self.asked.append("round_trip on the CPU" if gpu is None else "round_trip")
        return self.trip

    def build(self, architecture: str) -> Build | Unread:
        self.asked.append(f"build {architecture}")
        return self.built


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class Machine:
    """A desktop with 64 GiB and Linux; calls put cards and faults into it."""

    def __init__(self, folder: Path) -> None:
        self.sysfs, self.proc = folder / "sys", folder / "proc"
        self.cards: list[FakeCard] = []
        self.devices: list[TorchDevice] = []
        self.folders: list[Path] = []
        self.probes = FakeProbes(self.cards)
        self.wanted = Wanted()
        self.nvml: Any = None
        self.torch: TorchFacts | Unread = TorchFacts("2.13.0+cu130", cuda="13.0", architectures=ARCHITECTURES)
        self.platform = "linux"
        self.windows: str | Unread = Unread("powershell.exe is not found")
        self.cpus: frozenset[int] | Unread = frozenset(range(16))
        self.locked: int | Unread | None = 8 * GIB
        self.libraries = True
        write(self.proc / "sys/kernel/osrelease", "6.8.0-48-generic\n")
        write(self.proc / "sys/vm/overcommit_memory", "0\n")
        self.set_memory(64 * GIB, 48 * GIB)
        write(self.proc / "self/cgroup", "0::/user.slice\n")
        self.mount("/", "ext4", "/dev/nvme0n1p2", "259:2")
        write(self.sysfs / "fs/cgroup/user.slice/memory.max", "max\n")
        write(self.sysfs / "fs/cgroup/user.slice/memory.current", "1000\n")
        write(self.sysfs / "module/pcie_aspm/parameters/policy", "[default] performance powersave powersupersave\n")
        write(self.sysfs / "devices/system/node/node0/cpulist", "0-15\n")
        write(self.sysfs / "dev/block/259:2/queue/rotational", "0\n")

    def set_memory(self, total: int, available: int, **more: int) -> None:
        """Sizes of the host's memory in bytes."""
        sizes = {"MemTotal": total, "MemAvailable": available, "SwapTotal": 8 * GIB} | more
        write(self.proc / "meminfo", "".join(f"{name}:  {size // KIB} kB\n" for name, size in sizes.items()))

    def mount(self, point: str, kind: str, source: str, device: str = "0:30") -> None:
        """Mount something more."""
        path = self.proc / "self/mountinfo"
        before = path.read_text() if path.exists() else ""
        write(path, f"{before}36 25 {device} / {point} rw,relatime shared:1 - {kind} {source} rw\n")

    def port(
        self, address: str, *, generation: int = 4, width: int = 16, now: tuple[int, int] | None = None, under: str = ""
    ) -> str:
        """Add a port; the path of its folder below the root complex is returned, to put something under it."""
        place = f"{under or 'pci0000:00'}/{address}"
        self._device(place, {"class": "0x060400", "vendor": "0x8086"}, (generation, width), now or (generation, width))
        return place

    def gpu(
        self,
        *,
        name: str = "NVIDIA GeForce RTX 4090",
        address: str = "0000:01:00.0",
        capability: tuple[int, int] = (8, 9),
        generation: int = 4,
        width: int = 16,
        now: tuple[int, int] | None = None,
        slot: tuple[int, int] | None = None,
        under: str | None = None,
        state: int = 0,
        total: int = 24 * GIB,
        bar1: int = 32 * GIB,
        busy: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        has_nvml: bool = True,
        has_torch: bool = True,
        vendor: str = "0x10de",
        **answers: Any,
    ) -> FakeCard:
        """Add a card: to the bus, to the library, to torch.  ``answers`` replace those of the library."""
        now = now or (generation, width)
        slot = slot or (generation, width)
        if under is None:
            under = self.port(f"0000:00:{len(self.folders) + 1:02x}.0", generation=slot[0], width=slot[1], now=now)
        facts = {
            "class": "0x030000",
            "vendor": vendor,
            "numa_node": "-1",
            "power/runtime_status": "active",
            "resource": _resources(16 * MIB, bar1),
            "resource1_resize": f"{bar1 >> 20 | 0x100:016x}",
        } | {f"aer_dev_{kind}": _aer(kind) for kind in ("correctable", "nonfatal", "fatal")}
        folder = self._device(f"{under}/{address}", facts | (files or {}), (generation, width), now)
        (folder / "driver").symlink_to(self.sysfs / "bus/pci/drivers/nvidia")
        self.folders.append(folder)
        card = FakeCard(
            {
                "Name": name.encode(),
                "PciInfo": SimpleNamespace(busId=f"0000{address}".upper().encode()),
                "CudaComputeCapability": capability,
                "CurrPcieLinkGeneration": now[0],
                "CurrPcieLinkWidth": now[1],
                "MaxPcieLinkGeneration": min(generation, slot[0]),
                "MaxPcieLinkWidth": min(width, slot[1]),
                "GpuMaxPcieLinkGeneration": generation,
                "PerformanceState": state,
                "PcieReplayCounter": 0,
                "MemoryInfo": memory_info(total, 500 * MIB, 400 * MIB),
                "BAR1MemoryInfo": SimpleNamespace(bar1Total=bar1),
                "ComputeRunningProcesses": [],
                "CurrentClocksEventReasons": 1,
                "Temperature": 45,
                "TemperatureThreshold": 93,
            }
            | answers,
            busy or {},
        )
        if has_nvml:
            self.cards.append(card)
        if has_torch:
            self.devices.append(
                TorchDevice(len(self.devices), name, address, capability, total_bytes=total - 400 * MIB)
            )
        return card

    def _device(self, place: str, facts: dict[str, str], best: tuple[int, int], now: tuple[int, int]) -> Path:
        folder = self.sysfs / "devices" / place
        links = {
            "max_link_speed": GTS[best[0]],
            "max_link_width": f"{best[1]}",
            "current_link_speed": GTS[now[0]],
            "current_link_width": f"{now[1]}",
        }
        for name, text in (links | facts).items():
            write(folder / name, text + "\n")
        link = self.sysfs / "bus/pci/devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder

    def become_windows(self) -> None:
        """No proc, no sysfs."""
        self.platform = "win32"
        self.sysfs = self.proc = self.sysfs / "none"

    def become_wsl(self) -> None:
        """The kernel of WSL2; the card is not on the bus."""
        write(self.proc / "sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")
        self.sysfs = self.sysfs / "none"

    @property
    def system(self) -> System:
        """The view that the checks get."""
        library = self.nvml
        if library is None:
            library = FakeNvml(self.cards) if self.cards else FakeNvml([], trouble=12)
        torch = self.torch
        if not isinstance(torch, Unread) and not torch.devices:
            torch = replace(torch, devices=tuple(self.devices))
        return System(
            self.probes,
            self.wanted,
            platform=self.platform,
            sysfs=self.sysfs,
            proc=self.proc,
            load_nvml=lambda: library,
            read_torch=lambda: torch,
            ask_windows=lambda *, from_wsl: self.windows,
            allowed_cpus=lambda: self.cpus,
            locked_limit=lambda: self.locked,
            host_memory=lambda: (64 * GIB, 48 * GIB),
            loads_library=lambda name: self.libraries,
        )


def _resources(*sizes: int) -> str:
    lines, start = [], 0x1000000000
    for size in (*sizes, 0, 32 * MIB):
        lines.append(f"0x{start:016x} 0x{start + size - 1:016x} 0x0000000000140204" if size else "0x0 0x0 0x0")
        start += 1 << 37
    return "\n".join(lines)


def _aer(kind: str) -> str:
    names = {
        "correctable": ("RxErr", "BadTLP", "BadDLLP"),
        "nonfatal": ("UnsupReq", "TLP"),
        "fatal": ("DLP", "MalfTLP"),
    }
    total = {"correctable": "COR", "nonfatal": "NONFATAL", "fatal": "FATAL"}[kind]
    return "".join(f"{name} 0\n" for name in names[kind]) + f"TOTAL_ERR_{total} 0"
