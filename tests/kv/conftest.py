"""The emulated device for every test in this folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fmstream import emulator


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    """The device in PyTorch, and out again."""
    emulator.install()
    gc.collect()
    gc.freeze()  # tests collect often, and what was imported is no garbage
    yield
    gc.unfreeze()
    emulator.uninstall()


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """No cache of an earlier test is left to give its memory back to a later machine."""
    yield
    gc.collect()
