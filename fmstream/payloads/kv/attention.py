"""The attention function that brings the query to a layer which chooses pages, and setting a model to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from fmstream.errors import ConfigError
from fmstream.payloads.kv.chosen_layer import ATTENTION, MARK, UNMARKED, ChosenLayer, on_the_way

BENEATH: Final = "sdpa"
"""The implementation that does the attention, here and in passes that choose nothing."""


def pages_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> Any:
    """Scaled dot product attention; for keys from a layer that chooses, over what it chooses for this query.

    Raises:
        ConfigError: the keys are not those that the cache gave, but made of them.
    """
    layer, was_expected = getattr(key, MARK, None), on_the_way.is_expected
    on_the_way.is_expected = False
    if was_expected and not isinstance(layer, ChosenLayer):
        raise ConfigError(UNMARKED)
    if isinstance(layer, ChosenLayer):
        is_biased = kwargs.get("position_bias") is not None
        if layer.is_pending and is_biased:
            key, value = layer.everything()
        elif layer.is_pending:
            key, value, attention_mask = layer.attend(query, attention_mask, scaling)
        elif not is_biased:
            layer.foresee(query, attention_mask, scaling)
        key, value, attention_mask = layer.within_window(query, key, value, attention_mask)
    return _beneath()(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _beneath() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[BENEATH]


def register() -> None:
    """Make the attention and its mask known to transformers; may be called again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, pages_attention)
    AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS[BENEATH])


@dataclass(slots=True)
class _Exchanged:
    """A model's configuration while its attention is exchanged: what it was, and by how many it is used."""

    config: Any
    before: str
    users: int = 0


_exchanged: dict[int, _Exchanged] = {}
_lock: Final = threading.Lock()


@contextlib.contextmanager
def selecting(model: Any) -> Iterator[None]:
    """Within the body a model's attention can choose pages; afterwards it is as it was.

    Bodies may lie within one another and run in several threads: the last one undoes it.

    Raises:
        ConfigError: the model's attention is not "sdpa", or cannot be exchanged.
    """
    config = model.config.get_text_config(decoder=True)
    on_the_way.is_expected = False
    with _lock:
        entry = _exchanged.get(id(config)) or _exchange(model, config)
        entry.users += 1
    try:
        yield
    finally:
        with _lock:
            entry.users -= 1
            if not entry.users:
                del _exchanged[id(config)]
                config._attn_implementation_internal = entry.before


def _exchange(model: Any, config: Any) -> _Exchanged:
    before = config._attn_implementation
    is_exchangeable = getattr(type(model), "_supports_attention_backend", False)
    if before != ATTENTION and (before != BENEATH or not is_exchangeable):
        raise ConfigError(
            f"nothing is chosen for {type(model).__name__} with attention {before!r}: kv_budget and context_window "
            "need a model whose attention is exchangeable and set to 'sdpa'; leave them out"
        )
    register()
    config._attn_implementation_internal = ATTENTION
    _exchanged[id(config)] = entry = _Exchanged(config, before)
    return entry
