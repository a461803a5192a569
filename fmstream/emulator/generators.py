"""Random numbers of the device: counter-based, so that the order in which kernels run does not change them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from fmstream.emulator.tensors import NAME

DEFAULT_SEED: Final = 67280421310721
"""The seed of PyTorch's own default generators."""
STATE_BYTES: Final = 16
"""Seed and number of draws, as on CUDA."""
REAL_GENERATOR: Final = torch._C.Generator
MARK: Final = 0x656D_7500_0000_0000
"""Seeds from here on mark C++ generators as parts of a `DeviceGenerator`."""

_numbers = itertools.count(1)
_by_mark: weakref.WeakValueDictionary[int, DeviceGenerator] = weakref.WeakValueDictionary()


class DeviceGenerator(torch._C.Generator):
    """A generator whose ``device`` is the emulated one.

    Each kernel draws from a generator of its own, made when it is enqueued from the seed and the number of kernels
    before it.  Operators are handed only its C++ part, whose own seed says whose part it is.
    """

    def __init__(self, device: object = None) -> None:
        mark = MARK + next(_numbers)
        super().manual_seed(mark)
        _by_mark[mark] = self
        self._seed = DEFAULT_SEED
        self._num_draws = 0
        self._lock = threading.Lock()

    def __new__(cls, device: object = None) -> DeviceGenerator:
        made: DeviceGenerator = REAL_GENERATOR.__new__(cls, "cpu")  # type: ignore[call-arg]
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The emulated device."""
        return torch.device(NAME, 0)

    def manual_seed(self, seed: int) -> DeviceGenerator:
        """Start anew."""
        self._seed, self._num_draws = int(seed), 0
        return self

    def seed(self) -> int:
        """Start anew from a seed of the system's; returns it."""
        self.manual_seed(torch.Generator("cpu").seed())
        return self._seed

    def initial_seed(self) -> int:
        """The seed in use."""
        return self._seed

    def get_state(self) -> torch.Tensor:
        """Sixteen bytes on the CPU."""
        words = torch.tensor([self._seed & (2**63 - 1), self._num_draws], dtype=torch.int64, device="cpu")
        return words.view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> DeviceGenerator:
        """Go on from what ``get_state`` gave; raises ValueError for anything else."""
        if state.numel() != STATE_BYTES or state.dtype != torch.uint8:
            raise ValueError(f"a state of {STATE_BYTES} bytes is needed, not {state.numel()} of {state.dtype}")
        self._seed, self._num_draws = map(int, state.clone().view(torch.int64).tolist())
        return self

    def clone_state(self) -> DeviceGenerator:
        """Another generator in the same state."""
        twin = DeviceGenerator()
        twin._seed, twin._num_draws = self._seed, self._num_draws
        return twin

    def fork(self) -> torch.Generator:
        """The CPU generator of the next kernel."""
        with self._lock:
            number = self._num_draws
            self._num_draws += 1
        return REAL_GENERATOR("cpu").manual_seed(hash((self._seed, number)) & (2**63 - 1))


def owner_of(generator: torch.Generator) -> DeviceGenerator:
    """The device's generator that an operator was given.  Raises RuntimeError for one of the CPU, as CUDA does."""
    found = _by_mark.get(generator.initial_seed())
    if found is None:
        raise RuntimeError(f"expected a generator of the device {NAME!r} but found one of {generator.device.type!r}")
    return found


class _AnyGenerator(type):
    """Lets one name make generators of both kinds."""

    def __call__(cls, device: Any = "cpu") -> torch._C.Generator:
        kind = torch.device(device).type if not isinstance(device, int) else NAME
        return DeviceGenerator() if kind == NAME else REAL_GENERATOR(device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, REAL_GENERATOR)


class Generator(metaclass=_AnyGenerator):
    """What ``torch.Generator`` is while the emulator is installed."""


def seeded(run: Callable[[], Any], generator: torch.Generator) -> Any:
    """Run a kernel that draws from the CPU's default generator, and leave that as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator.initial_seed())
        return run()
