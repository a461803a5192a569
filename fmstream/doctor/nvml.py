"""NVIDIA's management library through nvidia-ml-py, loaded when it is asked for; every answer may be `Unread`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fmstream.core.reading import Unread
from fmstream.doctor.pci import same_address

DRIVER_NOT_LOADED: Final = 9
LIBRARY_NOT_FOUND: Final = 12
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
VERSION_MISMATCH: Final = 18
MAX_CARDS: Final = 64

WDDM, TCC, MCDM = 0, 1, 2
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1
GPU_SENSOR: Final = 0
SLOWDOWN_THRESHOLD: Final = 1

NO_PACKAGE: Final = Unread("nvidia-ml-py is not installed")
"""Why nothing can be read where the Python package is missing."""


def load_nvml() -> Any | Unread:
    """The module of nvidia-ml-py."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return NO_PACKAGE


class Nvml:
    """The library, open if ``trouble`` is None.  Close it when done; an instance that did not open needs it not."""

    def __init__(self, load: Callable[[], Any | Unread] = load_nvml) -> None:
        loaded = load()
        self.trouble: Unread | None = None
        if isinstance(loaded, Unread):
            self.trouble = loaded
            return
        self._module = loaded
        begun = self.call("nvmlInit")
        if isinstance(begun, Unread):
            self.trouble = begun

    @property
    def is_open(self) -> bool:
        """Whether the driver answered."""
        return self.trouble is None

    def close(self) -> None:
        """Give the library back; may be called again."""
        if self.is_open:
            self.call("nvmlShutdown")
            self.trouble = Unread("closed")

    def call(self, name: str, *arguments: Any) -> Any | Unread:
        """What a function of the library returns, or why it did not."""
        if self.trouble is not None:
            return self.trouble
        function = getattr(self._module, name, None)
        if function is None:
            return Unread(f"{name}: this nvidia-ml-py has no such call")
        try:
            return function(*arguments)
        except self._module.NVMLError as error:
            code = getattr(error, "value", None)
            return Unread(f"{name}: {error}", code if isinstance(code, int) else None)
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            # Drivers that answer half of a call: undecodable names, structures of another version.
            return Unread(f"{name}: {type(error).__name__}: {error}")

    def constant(self, name: str) -> int | Unread:
        """An integer of the module."""
        return _integer(getattr(self._module, name, None), name) if self.is_open else Unread("closed")

    @property
    def driver_version(self) -> str | Unread:
        """Version of the driver, as "580.95.05"."""
        return _text(self.call("nvmlSystemGetDriverVersion"))

    def cards(self) -> list[NvmlCard]:
        """All cards that answer for their handle."""
        count = _integer(self.call("nvmlDeviceGetCount"), "nvmlDeviceGetCount")
        if isinstance(count, Unread):
            return []
        handles = [(index, self.call("nvmlDeviceGetHandleByIndex", index)) for index in range(min(count, MAX_CARDS))]
        return [NvmlCard(self, index, handle) for index, handle in handles if not isinstance(handle, Unread)]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a card; ``reserved`` is the driver's own share, None where ``used`` counts it too."""

    total: int
    used: int
    free: int
    reserved: int | None


@dataclass(frozen=True, slots=True)
class Rows:
    """Memory rows replaced by spare ones, and whether a replacement waits for a reset or could not be made."""

    corrected: int
    uncorrected: int
    is_pending: bool
    has_failed: bool


@dataclass(frozen=True, slots=True)
class NvmlCard:
    """One card of the library."""

    library: Nvml
    index: int
    handle: Any

    def _ask(self, name: str, *arguments: Any) -> Any | Unread:
        return self.library.call(f"nvmlDeviceGet{name}", self.handle, *arguments)

    def _count(self, name: str, *arguments: Any) -> int | Unread:
        return _integer(self._ask(name, *arguments), name)

    @property
    def name(self) -> str | Unread:
        """What the card calls itself."""
        return _text(self._ask("Name"))

    @property
    def address(self) -> str | Unread:
        """Its place on the bus, spelled as in sysfs."""
        info = self._ask("PciInfo")
        text = info if isinstance(info, Unread) else _text(getattr(info, "busId", None))
        return text if isinstance(text, Unread) else same_address(text)

    @property
    def capability(self) -> tuple[int, int] | Unread:
        """Compute capability, major and minor."""
        answer = self._ask("CudaComputeCapability")
        if isinstance(answer, Unread):
            return answer
        try:
            major, minor = (_integer(value, "CudaComputeCapability") for value in answer)
        except (TypeError, ValueError):
            return Unread(f"CudaComputeCapability: {answer!r}")
        if isinstance(major, Unread) or isinstance(minor, Unread):
            return Unread(f"CudaComputeCapability: {answer!r}")
        return major, minor

    @property
    def generation(self) -> int | Unread:
        """Generation of its link now."""
        return _positive(self._count("CurrPcieLinkGeneration"))

    @property
    def width(self) -> int | Unread:
        """Lanes of its link now."""
        return _positive(self._count("CurrPcieLinkWidth"))

    @property
    def max_generation(self) -> int | Unread:
        """The most that card and slot can do together."""
        return _positive(self._count("MaxPcieLinkGeneration"))

    @property
    def own_generation(self) -> int | Unread:
        """The most that the card itself can do."""
        return _positive(self._count("GpuMaxPcieLinkGeneration"))

    @property
    def max_width(self) -> int | Unread:
        """Lanes that card and slot have together."""
        return _positive(self._count("MaxPcieLinkWidth"))

    @property
    def performance_state(self) -> int | Unread:
        """0 at full clocks to 15 when idle."""
        state = self._count("PerformanceState")
        return Unread("PerformanceState: unknown") if not isinstance(state, Unread) and state > 15 else state

    @property
    def replays(self) -> int | Unread:
        """Packets that were sent again over its link since the driver was loaded."""
        return self._count("PcieReplayCounter")

    @property
    def memory(self) -> DeviceMemory | Unread:
        """Memory by the second version of the call, or the first where that one does not answer."""
        version = self.library.constant("nvmlMemory_v2")
        if not isinstance(version, Unread):
            found = _device_memory(self._ask("MemoryInfo", version), with_reserved=True)
            if not isinstance(found, Unread):
                return found
        return _device_memory(self._ask("MemoryInfo"), with_reserved=False)

    @property
    def bar1_bytes(self) -> int | Unread:
        """Size of the window through which the host and other cards see its memory."""
        answer = self._ask("BAR1MemoryInfo")
        return answer if isinstance(answer, Unread) else _positive(_integer(_field(answer, "bar1Total"), "BAR1"))

    @property
    def has_ecc(self) -> bool | Unread:
        """Whether error correction is on."""
        answer = self._ask("EccMode")
        if isinstance(answer, Unread):
            return answer
        current = answer[0] if isinstance(answer, list | tuple) and answer else answer
        value = _integer(current, "EccMode")
        return value if isinstance(value, Unread) else value == 1

    def ecc_errors(self, kind: int, since: int) -> int | Unread:
        """Errors of a kind (`CORRECTED`, ...) since the driver was loaded (`VOLATILE`) or ever (`AGGREGATE`)."""
        return self._count("TotalEccErrors", kind, since)

    @property
    def rows(self) -> Rows | Unread:
        """Replaced rows of cards from Ampere on."""
        answer = self._ask("RemappedRows")
        if isinstance(answer, Unread):
            return answer
        values = [_integer(v, "RemappedRows") for v in answer] if isinstance(answer, list | tuple) else []
        numbers = [value for value in values if not isinstance(value, Unread)]
        if len(numbers) != 4:
            return Unread(f"RemappedRows: {answer!r}")
        return Rows(numbers[0], numbers[1], bool(numbers[2]), bool(numbers[3]))

    @property
    def has_pending_pages(self) -> bool | Unread:
        """Whether pages of memory wait for a reset to be retired, on cards before Ampere."""
        value = self._count("RetiredPagesPendingStatus")
        return value if isinstance(value, Unread) else value == 1

    @property
    def clock_reasons(self) -> int | Unread:
        """Bits that say why clocks are not higher; older drivers call them throttle reasons."""
        reasons = self._count("CurrentClocksEventReasons")
        return self._count("CurrentClocksThrottleReasons") if isinstance(reasons, Unread) else reasons

    @property
    def temperature(self) -> int | Unread:
        """Degrees Celsius of the chip."""
        return self._count("Temperature", GPU_SENSOR)

    @property
    def slowdown_temperature(self) -> int | Unread:
        """Degrees Celsius at which the hardware slows itself down."""
        return _positive(self._count("TemperatureThreshold", SLOWDOWN_THRESHOLD))

    @property
    def driver_model(self) -> int | Unread:
        """`WDDM`, `TCC` or `MCDM` on Windows."""
        answer = self._ask("DriverModel_v2")
        return answer if isinstance(answer, Unread) else _integer(_first(answer), "DriverModel_v2")

    @property
    def process_bytes(self) -> list[int | None] | Unread:
        """Memory of each process that computes on it; None for one whose memory is not told."""
        answer = self._ask("ComputeRunningProcesses")
        if isinstance(answer, Unread):
            return answer
        if not isinstance(answer, list | tuple):
            return Unread(f"ComputeRunningProcesses: {answer!r}")
        used = [_integer(_field(process, "usedGpuMemory"), "usedGpuMemory") for process in answer]
        return [None if isinstance(value, Unread) else value for value in used]


def _first(answer: Any) -> Any:
    return answer[0] if isinstance(answer, list | tuple) and answer else answer


def _field(answer: Any, name: str) -> Any:
    return getattr(answer, name, None)


def _integer(value: Any, name: str) -> int | Unread:
    if isinstance(value, Unread):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return Unread(f"{name}: {value!r} is no count")
    return value


def _positive(value: int | Unread) -> int | Unread:
    return Unread("reads as 0") if value == 0 else value


def _text(value: Any) -> str | Unread:
    if isinstance(value, Unread):
        return value
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    return value.strip("\0 ") if isinstance(value, str) else Unread(f"{value!r} is no text")


def _device_memory(answer: Any, *, with_reserved: bool) -> DeviceMemory | Unread:
    if isinstance(answer, Unread):
        return answer
    names = ("total", "used", "free", *(("reserved",) if with_reserved else ()))
    values = [_integer(_field(answer, name), f"MemoryInfo.{name}") for name in names]
    for value in values:
        if isinstance(value, Unread):
            return value
    numbers = [value for value in values if not isinstance(value, Unread)]
    if not numbers[0]:
        return Unread("MemoryInfo: total reads as 0")
    return DeviceMemory(numbers[0], numbers[1], numbers[2], numbers[3] if with_reserved else None)
