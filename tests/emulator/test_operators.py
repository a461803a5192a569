"""Operators on the emulated device give what the CPU gives, in every way of execution."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_what_the_cpu_gives(any_order: torch.device, name: str) -> None:
    program = CASES[name]
    with torch.no_grad():
        expected = program(torch.device("cpu"))
        found = program(any_order)
    assert found.device == any_order or name in {"item", "list"}
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_results_follow_the_default_dtype(device: torch.device) -> None:
    before = torch.get_default_dtype()
    assert (torch.arange(3, device=device) * 0.5).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (torch.arange(3, device=device) * 0.5).dtype == torch.float64
        assert torch.linspace(0, 1, 3, device=device).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_a_number_keeps_its_kind(device: torch.device) -> None:
    whole = torch.arange(3, device=device)
    assert [(whole * n).dtype for n in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]
    assert (whole.half() * 2.0).dtype == torch.float16
    assert (whole.half() * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float16
    assert (whole.half()[0] * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float64
