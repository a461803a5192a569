"""Lets packages that ask for CUDA by name run unmodified on the emulated device, within one process.

Only the process that runs such a peer uses it; nothing of it belongs to the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.peers.shim import clocks, cuda, devices
from bench.peers.shim.patches import Patches


@contextmanager
def cuda_names(packages: tuple[str, ...]) -> Iterator[None]:
    """Answer to ``cuda`` and `torch.cuda` with the emulated device, which must be installed; undone at the end.

    ``packages`` are the modules, submodules included, to which an emulated device says that its type is ``cuda``.
    What these imported meanwhile keeps the names it found, so a peer is imported in the process that measures it only.
    """
    with Patches() as patches:
        devices.install(patches, packages)
        cuda.install(patches)
        clocks.install(patches)
        yield
