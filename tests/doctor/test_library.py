"""The calls that are made exist in nvidia-ml-py, and a fake library under it is read right."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from fmstream.doctor import nvml
from fmstream.doctor.nvml import Nvml, load_nvml
from tests.doctor.machine import ASKED, NOT_SUPPORTED

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


def test_every_call_is_there() -> None:
    assert [name for name in sorted(ASKED) if not hasattr(pynvml, f"nvmlDeviceGet{name}")] == []
    for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):
        assert hasattr(pynvml, name)


def test_numbers_are_the_library_s() -> None:
    assert nvml.DRIVER_NOT_LOADED == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert nvml.LIBRARY_NOT_FOUND == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert nvml.GPU_IS_LOST == pynvml.NVML_ERROR_GPU_IS_LOST
    assert nvml.RESET_REQUIRED == pynvml.NVML_ERROR_RESET_REQUIRED
    assert nvml.VERSION_MISMATCH == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert nvml.WDDM == pynvml.NVML_DRIVER_WDDM
    assert nvml.TCC == pynvml.NVML_DRIVER_WDM
    assert nvml.MCDM == pynvml.NVML_DRIVER_MCDM
    assert nvml.UNCORRECTED == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    assert (nvml.VOLATILE, nvml.AGGREGATE) == (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC)
    assert nvml.SLOWDOWN_THRESHOLD == pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN


class Shared:
    """Stands for the shared library: fills what it is handed pointers to."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "nvmlDeviceGetTemperature":
            raise AttributeError(name)
        return getattr(self, f"_{name}", lambda *arguments: NOT_SUPPORTED)

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return 0

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:
        info._obj.busId = b"00000000:C1:00.0"
        return 0

    def _nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def _nvmlDeviceGetMemoryInfo_v2(self, handle: Any, info: Any) -> int:
        info._obj.total, info._obj.reserved, info._obj.free, info._obj.used = 1000, 50, 900, 50
        return 0

    def _nvmlDeviceGetRemappedRows(self, handle: Any, *values: Any) -> int:
        for number, value in enumerate(values):
            value._obj.value = number
        return 0

    def _nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, width: Any) -> int:
        width._obj.value = 16
        return 0


def test_a_library_below_the_real_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", Shared())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    library = Nvml(load_nvml)
    (card,) = library.cards()
    assert card.address == "0000:c1:00.0"
    assert card.name == "NVIDIA H200"
    assert card.width == 16
    assert "Not Supported" in str(card.replays)
    assert "Function Not Found" in str(card.temperature)
    memory, rows = card.memory, card.rows
    assert isinstance(memory, nvml.DeviceMemory)
    assert (memory.total, memory.used, memory.free, memory.reserved) == (1000, 50, 900, 50)
    assert isinstance(rows, nvml.Rows)
    assert (rows.corrected, rows.uncorrected, rows.is_pending, rows.has_failed) == (0, 1, True, True)


def test_without_the_shared_library_the_reason_has_its_number() -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        library = Nvml(load_nvml)
        assert library.trouble is not None
        assert library.trouble.code == nvml.LIBRARY_NOT_FOUND
    else:
        pytest.skip("this machine has NVIDIA's driver")
