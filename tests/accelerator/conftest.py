"""The emulated device for every test in this folder, and nothing left of a handle after each."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fmstream import emulator
from tests.accelerator.kit import fresh
from tests.kit_runtime import leaves_nothing

__all__ = ["leaves_nothing"]


@pytest.fixture(autouse=True, scope="module")
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device in PyTorch, and out again; tests of a real card do without."""
    if request.module.__name__.endswith("test_cuda"):
        yield
        return
    emulator.install()
    gc.collect()
    gc.freeze()  # tests collect often, and what was imported is no garbage
    yield
    gc.unfreeze()
    emulator.uninstall()


@pytest.fixture
def machine(installed: None) -> emulator.Machine:
    """A machine of its own: eager, checked."""
    return fresh()
