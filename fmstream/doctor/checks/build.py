"""Checks 7 and 8: whether torch and the kernels are built for the card."""

from __future__ import annotations

import re
from typing import Final

from fmstream.core.reading import Unread
from fmstream.doctor.checks.check import per_card
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.system import System
from fmstream.doctor.verdict import Result, fail, info, not_here, ok, unknown, warn

TOPIC: Final = "builds"

_BUILT: Final = re.compile(r"(sm|compute)_(\d{1,2})(\d)([af]?)", re.ASCII)


def runs_on(built: str, capability: tuple[int, int]) -> bool:
    """Whether code that was built for ``built`` runs on a card.

    Machine code ("sm_86") runs on cards of its major version with at least its minor one; code for one chip ("sm_90a")
    on that one; intermediate code ("compute_80") is translated for any later card (CUDA C++ Programming Guide, 3.1).
    """
    match = _BUILT.fullmatch(built)
    if match is None:
        return False
    target, is_machine_code = (int(match[2]), int(match[3])), match[1] == "sm"
    if match[4] == "a":
        return target == capability
    if is_machine_code or match[4] == "f":
        return target[0] == capability[0] and target[1] <= capability[1]
    return target <= capability


@per_card(7, "torch's build", TOPIC)
def torch_build(system: System, gpu: Gpu) -> Result:
    """Whether torch has code that runs on the card."""
    torch = system.torch
    if isinstance(torch, Unread):
        return fail(
            str(torch), "an import that works", "install torch anew; on Windows see the check of the VC runtime"
        )
    if not gpu.is_nvidia:
        return info(f"torch {torch.version} drives it") if torch.hip else not_here("no NVIDIA card")
    if torch.cuda is None:
        return warn(
            f"torch {torch.version} is built without CUDA",
            "a build with CUDA",
            "install torch from the index for the driver's CUDA version; until then the card is not used",
        )
    if not torch.architectures:
        said = f": {torch.warned[0]}" if torch.warned else ""
        return unknown(
            f"torch {torch.version} (CUDA {torch.cuda}) sees no card{said}",
            "see the checks of the driver, and CUDA_VISIBLE_DEVICES",
        )
    capability = gpu.capability
    if isinstance(capability, Unread):
        return unknown(f"torch has {' '.join(torch.architectures)}; of the card: {capability}")
    wanted = "sm_{}{}".format(*capability)
    fitting = [built for built in torch.architectures if runs_on(built, capability)]
    if not fitting:
        return fail(
            f"torch {torch.version} has {' '.join(torch.architectures)}",
            f"code that runs on {wanted}",
            f"install a build of torch whose list has sm_{capability[0]}x",
        )
    machine_code = [built for built in fitting if built.startswith("sm_")]
    if not machine_code:
        return info(f"only {fitting[-1]}: translated for {wanted} at first use", advice="the first start takes minutes")
    return ok(f"{machine_code[-1]} runs on {wanted}")


@per_card(8, "kernels' build", TOPIC)
def kernel_build(system: System, gpu: Gpu) -> Result:
    """Whether the compiler at run time builds the kernels for this very card."""
    if not gpu.is_nvidia:
        return not_here("no NVIDIA card")
    capability = gpu.capability
    if isinstance(capability, Unread):
        return unknown(f"of the card: {capability}")
    architecture = "sm_{}{}".format(*capability)
    build = system.probes.build(architecture)
    if isinstance(build, Unread):
        return warn(
            f"NVRTC does not build for {architecture}: {build}",
            f"machine code for {architecture}",
            "pip install 'fmstream-runtime[cuda]'; until then PyTorch's operations do it, more slowly",
        )
    return ok(f"{build.compiler} built {', '.join(build.sources)} for {architecture}")
