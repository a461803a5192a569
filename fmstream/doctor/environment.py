"""Versions and hardware to paste into a bug report; names no user, no host and no folder of a home."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from fmstream.core.reading import Unread, read_text
from fmstream.device.control_groups import group_limit
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.system import System
from fmstream.report.report import DISTRIBUTION, installed_version
from fmstream.report.units import format_bytes

PACKAGES: Final = (
    "torch",
    "numpy",
    "numba",
    "safetensors",
    "psutil",
    "rich",
    "diffusers",
    "transformers",
    "accelerate",
    "torchao",
    "gguf",
    "triton",
    "nvidia-ml-py",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
)
SETTINGS: Final = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "OMP_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "HIP_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
)
"""Variables that change how things run; their values are numbers and switches, or ids that are left out."""


def describe(system: System, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Facts by name, each on one line."""
    try:
        facts = dict(_facts(system, environment))
    finally:
        system.close()
    return {name: _one_line(without_names(value, environment)) for name, value in facts.items()}


def _facts(system: System, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "fmstream", installed_version(DISTRIBUTION)
    yield "python", f"{platform.python_version()} {platform.python_implementation()}"
    yield (
        "system",
        f"{platform.system()} {platform.release()} {platform.machine()}" + (", WSL2" if system.is_wsl else ""),
    )
    libc = " ".join(platform.libc_ver()).strip()
    if libc:
        yield "libc", libc
    for package in PACKAGES:
        found = _version(package)
        if found is not None:
            yield package, found
    torch = system.torch
    if isinstance(torch, Unread):
        yield "torch's build", str(torch)
    else:
        built_for = f"CUDA {torch.cuda}" if torch.cuda else f"HIP {torch.hip}" if torch.hip else "the CPU alone"
        yield "torch's build", f"for {built_for}" + "".join(f" {name}" for name in torch.architectures)
        for number, warned in enumerate(torch.warned, start=1):
            yield f"torch warned {number}", warned
    yield "processor", f"{_processor(system)}, {os.cpu_count() or '?'} CPUs"
    yield "memory", _memory(system)
    yield "driver", str(system.nvml.driver_version)
    for gpu in system.gpus:
        yield f"GPU {gpu.number}", _card(gpu)
    for name in SETTINGS:
        if name in environment:
            yield name, "set" if "GPU-" in environment[name] else environment[name]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor(system: System) -> str:
    text = read_text(system.proc / "cpuinfo") if system.is_linux else Unread("not Linux")
    for line in [] if isinstance(text, Unread) else text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine() if system.is_linux else platform.processor() or platform.machine()


def _memory(system: System) -> str:
    memory = system.free_memory
    told = (
        str(memory) if isinstance(memory, Unread) else f"{format_bytes(memory[0])}, {format_bytes(memory[1])} available"
    )
    group = group_limit(system.proc, system.sysfs) if system.is_linux else None
    return told if group is None else f"{told}; the control group allows {format_bytes(group.limit)}"


def _card(gpu: Gpu) -> str:
    parts = [gpu.name]
    memory = Unread("NVIDIA's library does not answer for it") if gpu.nvml is None else gpu.nvml.memory
    if not isinstance(memory, Unread):
        parts.append(format_bytes(memory.total))
    elif gpu.torch is not None:
        parts.append(format_bytes(gpu.torch.total_bytes))
    if not isinstance(gpu.capability, Unread):
        parts.append("sm_{}{}".format(*gpu.capability))
    elif gpu.torch is not None and gpu.torch.architecture:
        parts.append(gpu.torch.architecture)
    parts.append(f"link {gpu.link} of {gpu.best_link}")
    parts.append(f"cuda:{gpu.torch.index}" if gpu.torch is not None else "not seen by torch")
    return ", ".join(parts)


def without_names(text: str, environment: Mapping[str, str]) -> str:
    """The text without the home folder of the user, and without the name of the host."""
    homes = {environment.get("HOME", ""), environment.get("USERPROFILE", "")}
    for home in sorted(homes, key=len, reverse=True):
        if len(Path(home).parts) > 1:
            text = text.replace(home, "~")
    host = platform.node()
    # Short names, such as "vm", are parts of other words.
    return text.replace(host, "HOST") if len(host) > 3 else text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def render(facts: Mapping[str, str]) -> str:
    """The facts as lines of Markdown that stay aligned."""
    width = max(map(len, facts), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in facts.items())
