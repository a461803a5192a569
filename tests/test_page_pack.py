"""Packed pages: native code, the kernel and plain arithmetic agree, and no bit is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fmstream.core import page_pack
from fmstream.device.nvrtc import compile_kernel
from fmstream.device.page_packing import (
    MAX_ELEMENTS,
    compiled_macros,
    pack_pages,
    packed_bytes,
    unpack_pages,
    why_not_unpacked,
)
from tests.kit_cuda import COMPILER, Kernel, kernel_source

ELEMENTS = 2048
Bits = NDArray[np.uint16]


def normal(pages: int, seed: int = 0, elements: int = ELEMENTS) -> torch.Tensor:
    """What a model computes, more or less."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((pages, elements), generator=generator).bfloat16()


def packed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed pages, and which of them fit."""
    size = packed_bytes(torch.bfloat16, pages.shape[1])
    assert size is not None
    room = torch.full((len(pages), size), 0xA5, dtype=torch.uint8)
    return room, pack_pages(pages.view(torch.uint8), room)


def unpacked(room: torch.Tensor, elements: int = ELEMENTS) -> torch.Tensor:
    """The bits of packed pages, int16 [n, elements]."""
    pages = torch.full((len(room), 2 * elements), 0x5A, dtype=torch.uint8)
    unpack_pages(room, pages)
    return pages.view(torch.int16)


def by_the_book(page: Bits) -> NDArray[np.uint8] | None:
    """A packed page as the format is described; None if it does not fit."""
    exponents = (page >> 7 & 255).astype(int).reshape(-1, page_pack.BLOCK)
    bases = np.maximum(exponents.max(1) - 14, 0)
    above = exponents - bases[:, None]
    codes = np.where(exponents == 0, 0, np.where(above > 0, above, 15))
    half = page_pack.BLOCK // 2
    listed = [index * 256 + exponents.flat[index] for index in np.flatnonzero(codes == 15)]
    if len(listed) > len(page) // 128:
        return None
    parts = [page >> 8 & 128 | page & 127, codes[:, :half] | codes[:, half:] << 4, bases]
    flat = np.concatenate([part.ravel().astype(np.uint8) for part in parts])
    words = np.array([len(listed), *listed], np.int32).view(np.uint8)
    return np.concatenate([flat, np.zeros(-len(flat) % 4, np.uint8), words])


@pytest.mark.parametrize("elements", [512, 1024, 2048, 1536])
def test_the_format_is_what_is_described(elements: int) -> None:
    pages = normal(8, elements=elements)
    pages[1, ::200] = 0
    pages[2, 5:9] = 1e-20
    pages[3, :] = 0
    pages[4, :512] *= 1e-30
    pages[5] = torch.logspace(-30, 30, elements).bfloat16()
    room, fits = packed(pages)
    for page, row, fit in zip(pages.view(torch.uint16).numpy(), room.numpy(), fits.tolist(), strict=True):
        expected = by_the_book(page)
        assert fit is (expected is not None)
        if expected is not None:
            at = (elements * 3 // 2 + elements // 512 + 3) // 4 * 4
            end = elements * 3 // 2 + elements // 512
            assert row[:end].tolist() == expected[:end].tolist()
            assert row[at : len(expected)].tolist() == expected[at:].tolist()
    assert fits.tolist().count(False) == 1


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 16), st.sampled_from(["bits", "normal", "wide"]))
def test_no_bit_is_lost(seed: int, num_odd: int, kind: str) -> None:
    choose = np.random.default_rng(seed)
    page = choose.standard_normal((3, ELEMENTS)).astype(np.float32)
    if kind == "wide":
        page *= np.exp2(choose.integers(-3, 3, page.shape))
    bits = torch.from_numpy(page).bfloat16().view(torch.int16)
    if kind == "bits":
        bits = torch.from_numpy(choose.integers(-(1 << 15), 1 << 15, page.shape, np.int16))
    for at in choose.integers(ELEMENTS, size=num_odd):  # infinities, NaNs, subnormal numbers, negative zero
        bits[1, at] = int(choose.choice([0x7F80, -0x80, 0x7FC1, 1, -0x8000, 0x80]))
    room, fits = packed(bits.view(torch.bfloat16))
    back = unpacked(room)
    for number, fit in enumerate(fits.tolist()):
        assert fit is (by_the_book(bits[number].view(torch.uint16).numpy()) is not None)
        assert not fit or torch.equal(back[number], bits[number])
    assert kind == "bits" or fits[0]


def test_a_page_that_lists_as_much_as_there_is_room_for_fits_and_one_more_does_not() -> None:
    room_for = ELEMENTS // 128
    pages = normal(2).abs().clamp(0.5)
    pages[0, :room_for] = pages[1, : room_for + 1] = 1e-20
    room, fits = packed(pages)
    assert fits.tolist() == [True, False]
    assert torch.equal(unpacked(room)[0], pages[0].view(torch.int16))


def test_pages_are_three_quarters_of_their_size() -> None:
    size = packed_bytes(torch.bfloat16, 65536)
    assert size is not None
    assert size / (2 * 65536) == pytest.approx(0.7666, abs=1e-4)


@pytest.mark.parametrize(
    ("dtype", "elements"),
    [(torch.float16, 512), (torch.float32, 512), (torch.bfloat16, 500), (torch.bfloat16, 0),
     (torch.bfloat16, MAX_ELEMENTS + 512)],
)  # fmt: skip
def test_other_pages_are_left_as_they_are(dtype: torch.dtype, elements: int) -> None:
    assert packed_bytes(dtype, elements) is None


def test_a_device_without_the_operator_says_so() -> None:
    assert "'meta'" in (why_not_unpacked(torch.device("meta"), 512) or "")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    macros = {"ELEMENTS": ELEMENTS}
    return Kernel(kernel_source("page_unpack.cu"), "page_unpack", 64, macros, tmp_path_factory.mktemp("kernel"))


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_unpacks_as_native_code_does(kernel: Kernel, seed: int) -> None:
    pages = normal(6, seed)
    pages[2, ::150] = 0
    pages[3, 1000:1010] = 1e-20
    pages[4, :512] *= 1e-30
    room, fits = packed(pages)
    assert fits.all()
    margin = 4096
    found = torch.full((len(pages) * ELEMENTS + margin,), -7, dtype=torch.int16)
    kernel((len(pages), 1, 1), room, found)
    assert torch.equal(found[:-margin].view(len(pages), ELEMENTS), pages.view(torch.int16))
    assert (found[-margin:] == -7).all()


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_the_kernel_compiles_for_every_architecture(architecture: str) -> None:
    assert bytes(compile_kernel("page_unpack.cu", architecture, compiled_macros(65536)).code[:4]) == b"\x7fELF"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
def test_a_card_unpacks_what_the_host_packed() -> None:
    assert why_not_unpacked(torch.device("cuda"), ELEMENTS) is None
    pages = normal(40)
    pages[3, 1000:1010] = 1e-20
    room, fits = packed(pages)
    assert fits.all()
    found = torch.empty((len(pages), 2 * ELEMENTS), dtype=torch.uint8, device="cuda")
    unpack_pages(room.cuda(), found)
    assert torch.equal(found.view(torch.int16).cpu(), pages.view(torch.int16))
