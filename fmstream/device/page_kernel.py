"""The page selection kernel on CUDA cards: built for the card at hand, launched on PyTorch's current stream."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch

from fmstream.device.nvrtc import compile_kernel

__all__ = ["PageKernel", "compiled_macros", "find"]

SOURCE: Final = "page_select.cu"
THREADS: Final = 256
DIGESTS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
HEAD_DIMS: Final = (32, 64, 96, 128, 160, 192, 256)
MAX_GROUP: Final = 16
BLOCKS_FOR_EACH_PROCESSOR: Final = 2


def compiled_macros(digest: torch.dtype, head_dim: int, group: int) -> dict[str, int] | None:
    """What the source is specialised with, or None where it cannot be."""
    if digest not in DIGESTS or head_dim not in HEAD_DIMS or not 1 <= group <= MAX_GROUP:
        return None
    return {"HEAD_DIM": head_dim, "GROUP": group, "DIGEST": DIGESTS[digest], "THREADS": THREADS}


def find(device: torch.device, digest: torch.dtype, head_dim: int, group: int) -> PageKernel | None:
    """The kernel for a card and a layer's shape; None, with one warning, where it cannot be built."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _find(index, digest, head_dim, group)


@lru_cache(maxsize=64)
def _find(index: int, digest: torch.dtype, head_dim: int, group: int) -> PageKernel | None:
    macros = compiled_macros(digest, head_dim, group)
    if macros is None:
        return None
    major, minor = torch.cuda.get_device_capability(index)
    try:
        kernel = compile_kernel(SOURCE, f"sm_{major}{minor}", macros).get_kernel("page_select")
    except Exception as error:  # no package, a card or a driver that it does not know: the answer is the same
        warnings.warn(
            f"pages are chosen by PyTorch operations, which takes longer: the kernel was not built ({error}); "
            "pip install 'fmstream-runtime[cuda]'",
            stacklevel=3,
        )
        return None
    return PageKernel(kernel, index)


class PageKernel:
    """One kernel on one card."""

    def __init__(self, kernel: Any, index: int) -> None:
        self._kernel = kernel
        self._index = index
        self._num_processors = torch.cuda.get_device_properties(index).multi_processor_count
        # Of each stream and size: counters that are zero between launches.
        self._arrived: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(
        self,
        inputs: tuple[torch.Tensor, ...],
        results: tuple[torch.Tensor, ...],
        num_pages: int,
        num_frames: int,
        num_sinks: int,
        num_recent: int,
        scale: float,
        stay: float,
    ) -> None:
        """Launch on the current stream.

        Args:
            inputs: query, centre, radius, mean cos, mean sin, resident; contiguous, as in the source.
            results: chosen, ahead, victims, left out.
            num_pages, num_frames, num_sinks, num_recent, scale, stay: as in the source.
        """
        from cuda.core import LaunchConfig, Stream, launch

        batch, heads, page_stride, _ = inputs[1].shape
        group = inputs[0].shape[1] // heads
        blocks = -(-BLOCKS_FOR_EACH_PROCESSOR * self._num_processors // (batch * heads))
        blocks = max(1, min(blocks, -(-num_pages // (THREADS // 32))))
        with torch.cuda.device(self._index):
            stream = torch.cuda.current_stream()
            device = inputs[1].device
            bounds = torch.empty((batch, heads, group, page_stride), device=device)
            scores = torch.empty((2, batch, heads, page_stride), device=device)
            role = torch.empty((batch, heads, page_stride), dtype=torch.uint8, device=device)
            tensors = (*inputs, bounds, scores[0], scores[1], role, self._counters(stream, batch * heads), *results)
            sizes = (
                num_pages,
                page_stride,
                results[0].shape[2],
                results[1].shape[2],
                num_frames,
                num_sinks,
                num_recent,
            )
            launch(
                Stream.from_handle(stream.cuda_stream),
                LaunchConfig(grid=(blocks, heads, batch), block=THREADS),
                self._kernel,
                *(tensor.data_ptr() for tensor in tensors),
                *(np.int32(size) for size in sizes),
                np.float32(scale),
                np.float32(stay),
            )

    def _counters(self, stream: torch.cuda.Stream, size: int) -> torch.Tensor:
        key = (stream.cuda_stream, size)
        if key not in self._arrived:
            self._arrived[key] = torch.zeros(size, dtype=torch.int32, device=stream.device)
        return self._arrived[key]
