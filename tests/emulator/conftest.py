"""The emulated device in PyTorch for the tests that ask for it, and out again after each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fmstream import emulator

MIB = 1 << 20


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    emulator.install()
    yield
    emulator.uninstall()


@pytest.fixture
def device(installed: None) -> torch.device:
    """A machine of its own: eager, checked, with 256 MiB whose free bytes are NaN."""
    emulator.reset(capacity=256 * MIB, poison=True)
    return torch.device("emu", 0)


@pytest.fixture(params=["eager", "late", 7], ids=["eager", "late", "seed"])
def any_order(installed: None, request: pytest.FixtureRequest) -> torch.device:
    """The same in each way of execution."""
    emulator.reset(capacity=256 * MIB, poison=True, execution=request.param)
    return torch.device("emu", 0)
