"""Transforms of ``torch.func``: streaming itself takes place outside them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

are_active = torch._C._are_functorch_transforms_active
"""Whether a function is being transformed on this thread: tensors made now would be wrapped."""


def outside() -> AbstractContextManager[Any]:
    """Context in which no transform is active; to those that are active outside it, tensors made in it are constants.

    So a parameter belongs to the graph around the transforms, as it does where it stays in place.
    """
    if not are_active():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()
