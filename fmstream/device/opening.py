"""The device of a name."""

from __future__ import annotations

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
