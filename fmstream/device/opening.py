"""The device of a name."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from fmstream.device.accelerator import Accelerator
from fmstream.device.device import CpuDevice, Device
from fmstream.errors import ConfigError


def open_device(name: str | torch.device | None) -> Device:
    """The device of that name; None is the CUDA card where there is one, else the CPU.

    Raises:
        ConfigError: torch does not know it, it is not here, or it has no streams.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is no device that torch knows; use 'cpu', 'cuda' or 'cuda:0'") from error
    if device.type == "cpu":
        return CpuDevice()
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "Stream") or not hasattr(module, "mem_get_info"):
        raise ConfigError(f"device={str(device)!r} has no streams to copy in beside computing; use 'cpu' or 'cuda'")
    if not module.is_available():
        raise ConfigError(f"device={str(device)!r} is not available on this machine; use device='cpu'")
    if device.index is not None and device.index >= module.device_count():
        raise ConfigError(
            f"device={str(device)!r} does not exist: this machine has {module.device_count()} of them; "
            f"use '{device.type}:0'"
        )
    return Accelerator(device)


def device_name(device: Device) -> str:
    """What the maker calls a device: the card, or for the CPU the processor."""
    if isinstance(device, Accelerator):
        return str(device.module.get_device_properties(device.torch_device).name)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
