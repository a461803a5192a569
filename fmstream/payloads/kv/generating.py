"""The seam in ``generate``: where transformers makes a cache of its own, it gets a paged one."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fmstream.config import StreamConfig
from fmstream.core.choices import SelectionCounts
from fmstream.core.telemetry import Telemetry
from fmstream.device.accelerator import Accelerator
from fmstream.device.device import Device

HOOK: Final = "_prepare_cache_for_generation"
"""The method of a model that puts a cache among the arguments, if the user gave none."""
CALL: Final = "generate"
"""The method within which pages can be chosen."""
NAMES: Final = ("cache", "past_key_values")
"""The argument for the cache, in new and in older versions of transformers."""
MEBIBYTE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class KvOptions:
    """The options of `PagedCache` that a handle passes on."""

    max_pages: int | None
    page_tokens: int
    threshold_mb: int
    host_memory: int | str
    spill_dir: str | os.PathLike[str] | None
    budget: float | int | None = None
    context_window: int | None = None

    @property
    def chooses(self) -> bool:
        """Whether tokens attend to less than everything."""
        return self.budget is not None or self.context_window is not None

    @classmethod
    def of(cls, config: StreamConfig) -> KvOptions:
        """Those of a handle."""
        return cls(
            config.kv_cache_max_pages,
            config.page_tokens,
            config.cpu_offload_threshold_mb,
            config.kv_host_memory,
            config.spill_dir,
            config.kv_budget,
            config.context_window,
        )


class GenerateSeam:
    """Lets ``generate`` use paged caches: where a size is given, or where the plain one would not fit."""

    def __init__(self, options: KvOptions, device: Device, telemetry: Telemetry) -> None:
        self._options = options
        self._device = device
        self._telemetry = telemetry
        self._note = telemetry.notes.append
        self._hooked: list[nn.Module] = []
        self._moves: list[list[Any]] = []
        """What the caches that were made have moved."""

    def put(self, modules: Iterable[nn.Module]) -> None:
        """Put the seam into those that generate."""
        options = self._options
        if options.max_pages is None and not options.chooses and not isinstance(self._device, Accelerator):
            return
        for module in modules:
            if callable(getattr(module, HOOK, None)) and HOOK not in module.__dict__:
                _seams[module] = self
                self._hooked.append(module)
                module.__dict__[HOOK] = MethodType(_prepare_cache_for_generation, module)
                if options.chooses and callable(getattr(module, CALL, None)) and CALL not in module.__dict__:
                    module.__dict__[CALL] = MethodType(_generate, module)

    def take_out(self) -> None:
        """Leave the modules as they were; may be called again."""
        while self._hooked:
            module = self._hooked[-1]
            module.__dict__.pop(HOOK, None)
            if getattr(module.__dict__.get(CALL), "__func__", None) is _generate:
                del module.__dict__[CALL]
            _seams.pop(module, None)
            self._hooked.pop()
        made, self._moves = self._moves, []
        if made:
            moves = [move for cache in made for move in cache]
            recalled = sum(move.pages.recalled_bytes for move in moves)
            spilled = sum(move.page_bytes * move.pages.spilled for move in moves)
            self._note(
                f"keys and values lay in pages in {len(made)} caches: {recalled} bytes of them were recalled to the "
                f"device and {spilled} written home from it"
            )

    def replace(self, module: nn.Module, generation_config: Any, arguments: dict[str, Any], sizes: list[int]) -> None:
        """Put a paged cache in place of the one that was just made."""
        sizes.append(getattr(generation_config, "num_beams", None) or 1)
        for name in NAMES:
            if arguments.get(name) is not None:
                arguments[name] = self._paged(module, arguments[name], sizes)

    def _paged(self, module: nn.Module, cache: Any, sizes: list[int]) -> Any:
        """A paged cache in place of a plain one that was just made."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        if type(cache) is EncoderDecoderCache:
            parts = (cache.self_attention_cache, cache.cross_attention_cache)
            if all(type(part) is DynamicCache and not part.offloading for part in parts) and self._is_wanted(
                module, cache, sizes
            ):
                return EncoderDecoderCache(self._new(module), self._new(module))
        elif type(cache) is DynamicCache and not cache.offloading and self._is_wanted(module, cache, sizes):
            return self._new(module)
        return cache

    def _new(self, module: nn.Module) -> Any:
        from fmstream.payloads.kv.cache import PagedCache

        options = self._options
        made = PagedCache(
            module.config,
            options.max_pages,
            page_tokens=options.page_tokens,
            cpu_offload_threshold_mb=options.threshold_mb,
            kv_host_memory=options.host_memory,
            spill_dir=options.spill_dir,
            note=self._note,
            kv_budget=options.budget,
            context_window=options.context_window,
        )
        self._moves.append(made.moves)
        counts = made.selection.counts if made.selection is not None else SelectionCounts()
        self._telemetry.kv.append((counts, made.history))
        return made

    def _is_wanted(self, module: nn.Module, cache: Any, sizes: list[int]) -> bool:
        if self._options.max_pages is not None or self._options.chooses:
            return True
        assert isinstance(self._device, Accelerator)
        free = self._device.available_bytes() - self._options.threshold_mb * MEBIBYTE
        return plain_bytes(module, cache, sizes) > free


_seams: WeakKeyDictionary[nn.Module, GenerateSeam] = WeakKeyDictionary()


def _prepare_cache_for_generation(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Stands in a module for its class's method of the same name, so that copies and pickles of it find that one."""
    given = any(model_kwargs.get(name) is not None for name in NAMES)
    result = getattr(type(self), HOOK)(self, generation_config, model_kwargs, *args, **kwargs)
    seam = _seams.get(self)
    if seam is not None and not given:
        sizes = [value for value in (*args, *kwargs.values()) if type(value) is int]
        seam.replace(self, generation_config, model_kwargs, sizes)
    return result


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in a module for its class's method; within it the module's attention can choose pages."""
    from fmstream.payloads.kv.attention import selecting

    with selecting(self) if self in _seams else contextlib.nullcontext():
        return getattr(type(self), CALL)(self, *args, **kwargs)


def plain_bytes(module: nn.Module, cache: Any, sizes: list[int]) -> int:
    """Bytes that keys and values will take at the end; ``sizes`` are the batch, the largest length and the beams."""
    config: Any = module.config
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    heads: int = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None) or 0
    dim: int = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(1, heads)
    dtype: Any = getattr(module, "dtype", torch.float32)
    layers = cache.layers if hasattr(cache, "layers") else cache.self_attention_cache.layers
    return 2 * len(layers) * heads * dim * math.prod(sizes) * int(dtype.itemsize)
