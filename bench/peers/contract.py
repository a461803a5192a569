"""What a peer is to the benchmark: a package that runs a model whose weights stay in RAM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from torch import Tensor

from bench.peers.model import Net

Row = dict[str, Any]
TIGHT, MIDDLE, AMPLE = 0.12, 0.40, 0.65
"""Device memory that a peer may be given, as shares of the weights.

The larger two are enough for cache-dit at its best speed with a quarter and a half of the modules persistent.
"""


class Unavailable(RuntimeError):
    """A peer cannot run here; says why."""


@dataclass(frozen=True, slots=True)
class Running:
    """A model in a peer's hands.

    Attributes:
        call: a step: takes the input on the device, returns the output there.
        close: gives back what outlives the model (threads, files, settings of the process); ends the use of it.
    """

    call: Callable[[Tensor], Tensor]
    close: Callable[[], object] = lambda: None


class Peer(Protocol):
    """One peer with one choice of settings.

    Attributes:
        name: the package and the way of offloading.
        settings: what differs from the peer's defaults, as the row shows it.
        share: the device memory that the peer is given, as a share of the weights.
        packages: modules that must find CUDA; empty where the peer takes any device.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def settings(self) -> str: ...

    @property
    def share(self) -> float: ...

    @property
    def packages(self) -> tuple[str, ...]: ...

    def prepare(self, model: Net, budget: int) -> Running:
        """Take over a model that lies in RAM; ``budget``: bytes of device memory in all.

        Raises `Unavailable` or `ImportError` where the peer cannot run here.
        """
        ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """A `Peer` made of a function that takes the model, the budget and the settings by name.

    ``distribution`` is the name under which the package is installed.
    """

    name: str
    distribution: str
    share: float
    build: Callable[..., Running]
    options: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """Of the package; "" where it is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""

    @property
    def settings(self) -> str:
        """The options as ``name=value``."""
        return ", ".join(f"{key}={value}" for key, value in self.options.items())

    def prepare(self, model: Net, budget: int) -> Running:
        """As `Peer.prepare` says."""
        if not self.version:
            raise Unavailable(f"{self.distribution} is not installed: pip install -r bench/requirements-peers.txt")
        return self.build(model, budget, **self.options)
