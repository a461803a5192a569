"""Modules whose weights stay in their checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fmstream.device.checkpoint import open_checkpoint
from fmstream.errors import CheckpointError

_EMPTY = {torch.empty, torch.empty_strided, torch.empty_permuted}


class _EmptyOnMeta(TorchFunctionMode):
    """Uninitialised tensors are made without memory.

    Modules make their parameters with ``torch.empty`` and fill them afterwards, and compute their buffers: so
    parameters cost nothing until the checkpoint gives them values, and buffers that no checkpoint holds are real.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _EMPTY and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def load(
    factory: Callable[..., nn.Module],
    checkpoint: str | os.PathLike[str],
    *args: Any,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build a module whose parameters are mapped from a checkpoint: no copy of them is made, ever.

    Args:
        factory: a class or function that builds the module.  A diffusers or transformers class is built from the
            configuration in the checkpoint's folder; any other is called with ``args`` and ``kwargs``.
        checkpoint: a safetensors file, a folder with one, or with shards and their index.
        strict: whether every parameter must be in the checkpoint, and every tensor of it in the module.
        dtype: cast floating-point parameters to this type; those that differ are copied to RAM.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or does not fit the module.
    """
    source = open_checkpoint(checkpoint)
    with _EmptyOnMeta():
        module = _build(factory, checkpoint, args, kwargs)
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"{factory!r} built a {type(module).__name__}, not an nn.Module")
    source.load_into(module, strict=strict, dtype=dtype)
    return module.eval()


def _build(
    factory: Any, checkpoint: str | os.PathLike[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> nn.Module:
    folder = os.fspath(checkpoint)
    if os.path.isdir(folder) and not args and not kwargs:
        if hasattr(factory, "load_config") and hasattr(factory, "from_config"):  # diffusers
            return factory.from_config(factory.load_config(folder))  # type: ignore[no-any-return]
        config_class = getattr(factory, "config_class", None)
        if config_class is not None and hasattr(config_class, "from_pretrained"):  # transformers
            return factory(config_class.from_pretrained(folder))  # type: ignore[no-any-return]
    if not args and not kwargs and hasattr(factory, "config_class") and not os.path.isdir(folder):
        raise CheckpointError(
            f"{factory.__name__} is built from a configuration, and {folder} is a file: give the folder that holds "
            "config.json and the weights, or a function that builds the module"
        )
    return factory(*args, **kwargs)  # type: ignore[no-any-return]
