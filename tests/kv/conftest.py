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
    yield
    gc.collect()
    emulator.uninstall()
