"""PyTorch's modes of a thread, carried to another one."""

from __future__ import annotations

from contextlib import ExitStack

import torch


class Modes:
    """The caller's thread-local torch modes, to be entered in another thread."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()

    def entered(self) -> ExitStack:
        """A context of another thread in which they hold."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, enabled in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
        if self._default_device.type != "cpu":
            stack.enter_context(self._default_device)
        return stack
