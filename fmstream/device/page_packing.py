"""Pages of keys and values that cross the link in three quarters of their bytes: packed by the host, unpacked by the
device.

Two operators of PyTorch, so that each device has its own: packing is for the CPU, by native code, and unpacking for
CUDA, by a kernel built for the card at hand.  The format is in `fmstream.core.page_pack`.
"""

from __future__ import annotations

import threading
from functools import cache, lru_cache
from typing import Any, Final

import torch

from fmstream.device.nvrtc import compile_kernel

__all__ = ["compiled_macros", "pack_pages", "packed_bytes", "unpack_pages", "why_not_unpacked"]

SOURCE: Final = "page_unpack.cu"
THREADS: Final = 256
NAMESPACE: Final = "fmstream_pages"
MAX_ELEMENTS: Final = 1 << 23
"""An entry of the list has 23 bits for the number of an element."""


def packed_bytes(dtype: torch.dtype, elements: int) -> int | None:
    """Bytes of a packed page of so many elements; None where such pages cannot be packed."""
    from fmstream.core import page_pack  # it is compiled, which a cache without packed pages need not wait for

    if dtype is not torch.bfloat16 or elements % page_pack.BLOCK or not 0 < elements <= MAX_ELEMENTS:
        return None
    return page_pack.packed_bytes(elements)


def compiled_macros(elements: int) -> dict[str, int]:
    """What the source is specialised with."""
    return {"ELEMENTS": elements, "THREADS": THREADS}


def pack_pages(pages: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Pack pages on the host.

    Args:
        pages: uint8 [n, page bytes], contiguous: the bytes of bfloat16 numbers.
        packed: uint8 [n, packed bytes], contiguous, written.

    Returns:
        bool [n]: which pages fit; what ``packed`` holds of the others means nothing.
    """
    fits: torch.Tensor = _operators().pack_pages.default(pages, packed)
    return fits


def unpack_pages(packed: torch.Tensor, pages: torch.Tensor) -> None:
    """Enqueue the unpacking of pages on the current stream.

    Args:
        packed: uint8 [n, packed bytes], contiguous.
        pages: uint8 [n, page bytes], contiguous, on the same device, written.
    """
    _operators().unpack_pages.default(packed, pages)


def why_not_unpacked(device: torch.device, elements: int) -> str | None:
    """Why a device cannot unpack pages of so many elements; None if it can.  On a card this builds the kernel, once."""
    if device.type != "cuda":
        return _try(device)
    found = _kernel(torch.cuda.current_device() if device.index is None else device.index, elements)
    return found if isinstance(found, str) else None


@cache
def _try(device: torch.device) -> str | None:
    """The same of a device that runs other operators of ours, or does not."""
    elements = 512
    size = packed_bytes(torch.bfloat16, elements)
    assert size is not None
    try:
        unpack_pages(*(torch.zeros((1, num), dtype=torch.uint8, device=device) for num in (size, 2 * elements)))
    except NotImplementedError:
        return f"there is none for {device.type!r}"
    return None


def _operators() -> Any:
    """The operators, defined when they are first needed."""
    with _defining:
        return _defined()


@cache
def _defined() -> Any:
    make: Any = torch.library.Library
    library = make(NAMESPACE, "DEF")
    library.define("pack_pages(Tensor pages, Tensor(a!) packed) -> Tensor")
    library.define("unpack_pages(Tensor packed, Tensor(a!) pages) -> ()")
    library.impl("pack_pages", _pack_on_host, "CPU")
    library.impl("unpack_pages", _unpack_on_host, "CPU")
    library.impl("unpack_pages", _unpack_on_card, "CUDA")
    _libraries.append(library)
    return getattr(torch.ops, NAMESPACE)


_defining = threading.Lock()
_libraries: list[Any] = []
"""Operators last as long as the library that defined them."""


def _pack_on_host(pages: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    from fmstream.core.page_pack import pack

    fits = torch.empty(len(pages), dtype=torch.bool)
    pack(pages.view(torch.uint16).numpy(), packed.numpy(), fits.numpy())
    return fits


def _unpack_on_host(packed: torch.Tensor, pages: torch.Tensor) -> None:
    from fmstream.core.page_pack import unpack

    unpack(packed.numpy(), pages.view(torch.uint16).numpy())


def _unpack_on_card(packed: torch.Tensor, pages: torch.Tensor) -> None:
    from cuda.core import LaunchConfig, Stream, launch

    index = pages.device.index
    kernel = _kernel(index, pages.shape[1] // 2)
    assert not isinstance(kernel, str), kernel
    with torch.cuda.device(index):
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        launch(stream, LaunchConfig(grid=len(pages), block=THREADS), kernel, packed.data_ptr(), pages.data_ptr())


@lru_cache(maxsize=64)
def _kernel(index: int, elements: int) -> Any:
    """The kernel, or why there is none."""
    major, minor = torch.cuda.get_device_capability(index)
    try:
        compiled = compile_kernel(SOURCE, f"sm_{major}{minor}", compiled_macros(elements))
        return compiled.get_kernel("page_unpack")
    except Exception as error:  # no package, a card or a driver that it does not know: pages travel as they are
        return f"{type(error).__name__}: {error}"
