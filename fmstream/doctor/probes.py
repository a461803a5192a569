"""Trials on the real machine.  Each imports torch only when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from fmstream.core.reading import Unread
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.measured import Build, LinkRates, MemoryCheck, Pinned, RoundTrip
from fmstream.report.report import installed_version

if TYPE_CHECKING:
    import torch
    from torch import nn

BLOCK: Final = 256 << 20
MEMORY_TRIAL: Final = 512 << 20
MEMORY_SECONDS: Final = 10.0
LAYERS: Final = 8
FEATURES: Final = 256
CALLS: Final = 3
"""The first call is recorded, later ones follow a plan."""

HEAD_DIM, GROUP, PAGE_ELEMENTS = 128, 4, 65536
"""Of attention, where a kernel is built for one shape of it."""


class MachineProbes:
    """The trials of `fmstream.doctor.measured.Probes` on this machine."""

    def pin(self, gpu: Gpu, num_bytes: int) -> Pinned | Unread:
        """Lock host memory in blocks until all is locked or the driver refuses, and give it back."""
        import torch

        from fmstream.device.pinned import PinnedBlock

        device = _device(gpu)
        blocks: list[PinnedBlock] = []
        pinned = 0
        try:
            while pinned < num_bytes:
                blocks.append(PinnedBlock(torch.get_device_module(device), device, min(BLOCK, num_bytes - pinned)))
                if not blocks[-1].pinned:
                    return Pinned(pinned, was_refused=True)
                pinned += blocks[-1].num_bytes
        except (RuntimeError, MemoryError, OSError) as error:
            return Unread(_first_line(error))
        finally:
            for block in blocks:
                block.close()
        return Pinned(pinned, was_refused=False)

    def link_rates(self, gpu: Gpu, sample: Callable[[], None]) -> LinkRates | Unread:
        """Large copies both ways, pinned and pageable."""
        from fmstream.device.accelerator import Accelerator
        from fmstream.doctor.copies import measure_copies

        try:
            return measure_copies(Accelerator(_device(gpu)), sample)
        except (RuntimeError, MemoryError) as error:
            return Unread(_first_line(error))

    def memory_check(self, gpu: Gpu) -> MemoryCheck | Unread:
        """The patterns of ``fmstream memtest``, once over a small part of what is free."""
        from fmstream.doctor.memtest import run_memtest
        from fmstream.errors import FmstreamError

        try:
            result = run_memtest(_device_name(gpu), size=MEMORY_TRIAL, rounds=1, time_limit=MEMORY_SECONDS)
        except (FmstreamError, RuntimeError) as error:
            return Unread(_first_line(error))
        if result.ended == "interrupted":
            raise KeyboardInterrupt
        return MemoryCheck(result.tested_bytes, result.findings.num_errors, result.seconds, result.kind or "")

    def round_trip(self, gpu: Gpu | None) -> RoundTrip | Unread:
        """Stream some layers in half of their memory, and compare with what they give unstreamed."""
        from fmstream.errors import FmstreamError

        try:
            return _stream_layers("cpu" if gpu is None else _device_name(gpu))
        except (FmstreamError, RuntimeError, ImportError, OSError) as error:
            return Unread(_first_line(error))

    def build(self, architecture: str) -> Build | Unread:
        """Build the kernels of this package, each for one usual shape."""
        import torch

        from fmstream.device import page_kernel, page_packing
        from fmstream.device.nvrtc import compile_kernel

        macros = page_kernel.compiled_macros(torch.bfloat16, HEAD_DIM, GROUP)
        assert macros is not None
        kernels = {page_kernel.SOURCE: macros, page_packing.SOURCE: page_packing.compiled_macros(PAGE_ELEMENTS)}
        try:
            for source, shape in kernels.items():
                compile_kernel(source, architecture, shape)
        except ImportError:
            return Unread("the packages of the extra cuda are not installed")
        except Exception as error:  # of the compiler's own classes, which are there only if it is
            return Unread(_first_line(error))
        return Build(tuple(kernels), f"NVRTC {installed_version('nvidia-cuda-nvrtc')}")


def _device_name(gpu: Gpu) -> str:
    assert gpu.torch is not None
    return f"{gpu.torch.kind}:{gpu.torch.index}"


def _device(gpu: Gpu) -> torch.device:
    import torch

    return torch.device(_device_name(gpu))


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().partition("\n")[0] or type(error).__name__


def _stream_layers(device: str) -> RoundTrip:
    import torch

    from fmstream.doors.stream import stream

    layers = _layers()
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(4, FEATURES, generator=generator).to(device)
    with torch.inference_mode():
        expected = layers.to(device)(given)
        layers.to("cpu")
        with stream(layers, memory="50%", device=device) as streamed:
            outputs = [streamed(given) for _ in range(CALLS)]
    is_equal = all(torch.equal(output, expected) for output in outputs)
    return RoundTrip(is_equal, streamed.report.totals.streamed_bytes)


def _layers() -> nn.Module:
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(1)
    layers: list[Any] = [nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(generator=generator)
    return model
