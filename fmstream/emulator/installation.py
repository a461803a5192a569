"""Putting the device into PyTorch, and taking it out again."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils import backend_registration

from fmstream.emulator import autocast, cards, kernels, patches, traced
from fmstream.emulator.backlog import Execution
from fmstream.emulator.cards import Card
from fmstream.emulator.checker import Check
from fmstream.emulator.current import current
from fmstream.emulator.device_module import make_module
from fmstream.emulator.machine import Machine
from fmstream.emulator.pins import PinnedRounding
from fmstream.emulator.tensors import NAME
from fmstream.errors import ConfigError

NEEDED: Final[tuple[tuple[Any, str], ...]] = (
    (backend_registration, "_setup_privateuseone_for_python_backend"),
    (torch._C, "_from_dlpack"),
    (torch._C, "_to_dlpack"),
    (torch._C, "_acc"),
    (torch._C, "DispatchKeySet"),
    (torch._C, "DisableTorchFunction"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    (torch._ops.OpOverload, "redispatch"),
    (torch.library.Library, "fallback"),
    (torch.library.Library, "_destroy"),
    (torch.utils.flop_counter, "flop_registry"),
)
"""Private names of PyTorch that the emulator stands on, all there in 2.10 to 2.13."""


class Installation:
    """What is in force between `install` and `uninstall`."""

    def __init__(self) -> None:
        self.patches = patches.Patches()
        library: Any = torch.library.Library
        aten, every = library("aten", "IMPL"), library("_", "IMPL")
        own = library(traced.NAMESPACE, "FRAGMENT")
        self.libraries = [aten, every, own]
        kernels.register(aten, every, own)
        autocast.register(aten, every)
        patches.apply(self.patches)
        traced.keep_compiler_out()

    def remove(self) -> None:
        """Leave PyTorch as it was."""
        self.patches.undo()
        for library in self.libraries:
            library._destroy()


_installation: Installation | None = None
_is_registered = False


def missing_names() -> list[str]:
    """Of the private names that the emulator needs, those that this PyTorch has not."""
    return [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in NEEDED if not hasattr(owner, name)]


def install() -> None:
    """Make ``emu`` a device of this process; done twice, it changes nothing.

    A machine is made if there is none.  Raises ConfigError for a PyTorch that lacks what this needs, or in which
    another device has taken the place.
    """
    global _installation
    if _installation is not None:
        return
    if missing := missing_names():
        raise ConfigError(
            f"PyTorch {torch.__version__} has no {', '.join(missing)}: the emulated device works with 2.10 to 2.13"
        )
    _register_name()
    _installation = Installation()
    if not hasattr(current, "machine"):
        reset()


def _register_name() -> None:
    global _is_registered
    taken = torch._C._get_privateuse1_backend_name()
    if not _is_registered and taken != "privateuseone":
        raise ConfigError(f"another package has made {taken!r} the custom device of this process: use a process apart")
    if not _is_registered:
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=make_module())
        _is_registered = True


def uninstall() -> None:
    """Take every kernel and patch back; the device's name stays known."""
    global _installation
    if _installation is not None:
        _installation.remove()
        _installation = None


def reset(
    card: str | Card = "rtx4070-laptop",
    *,
    execution: Execution = "eager",
    check: Check = "raise",
    capacity: int | None = None,
    pinned_cap: int | None = None,
    pinned_rounding: PinnedRounding = "exact",
    poison: bool = False,
    keep_timeline: bool = True,
) -> Machine:
    """Put a new machine in place; the tensors, streams and events of the one before are dead.

    See `Machine` for the options.  Raises ConfigError for one that cannot be used.
    """
    machine = Machine(
        cards.card(card) if isinstance(card, str) else card,
        execution=execution,
        check=check,
        capacity=capacity,
        pinned_cap=pinned_cap,
        pinned_rounding=pinned_rounding,
        poison=poison,
        keep_timeline=keep_timeline,
    )
    current.replace(machine)
    return machine


def machine() -> Machine:
    """The machine in place.  Raises ConfigError before there is one."""
    if not hasattr(current, "machine"):
        raise ConfigError("there is no machine yet: call emulator.install(), then emulator.reset(card)")
    return current.machine
