"""Settings for the zoo."""

import os
from collections.abc import Iterator

import pytest
import torch

# Model libraries must not look for a hub: everything here is random and made on the spot.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The split of a reduction among threads is not what is tested here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
