"""Other ways to attend to part of a cache, which forget the rest for good: for comparison with pages that come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

NUM_EXEMPT: Final = 2
"""Layers from the first on that attend to everything, as in a paged cache."""
NUM_SINKS: Final = 16
"""Tokens at the start that a window of recent ones keeps besides (StreamingLLM, ICLR 2024)."""
CHUNK: Final = 256
"""Queries whose attention is added up at once."""
NAME: Final = "kept_tokens"


class KeptTokens:
    """An attention function that sees, of a prompt, only some tokens for each layer and KV head, and all new ones.

    Attributes:
        kept: by layer, bool [KV heads, tokens of the prompt]; empty: everything is seen.
        heavy: by layer, attention that each token of a prompt got, [KV heads, tokens], if it is added up.
        is_adding: whether passes of several tokens are added up.
    """

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}
        self.heavy: dict[int, torch.Tensor] = {}
        self.is_adding = False

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        """See transformers' attention functions."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        layer = int(module.layer_idx)
        if query.shape[2] > 1 and self.is_adding and layer >= NUM_EXEMPT:
            self._add(layer, query[0], key[0], kwargs["scaling"])
        kept = self.kept.get(layer)
        if query.shape[2] == 1 and kept is not None:
            new = key.shape[2] - kept.shape[1]
            seen = torch.nn.functional.pad(kept, (0, new), value=True)
            mask = seen.repeat_interleave(query.shape[1] // key.shape[1], 0)[None, :, None]
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    def _add(self, layer: int, query: torch.Tensor, key: torch.Tensor, scale: float) -> None:
        heads, length, dim = key.shape
        first = length - query.shape[1]
        sums = torch.zeros(heads, length)
        if layer in self.heavy:
            sums[:, : self.heavy[layer].shape[1]] = self.heavy[layer]
        places = torch.arange(length)
        for begin in range(0, query.shape[1], CHUNK):
            part = query[:, begin : begin + CHUNK].reshape(heads, -1, dim)
            at = (first + begin + torch.arange(part.shape[1] // (query.shape[0] // heads))).repeat(
                query.shape[0] // heads
            )
            scores = (part @ key.mT * scale).masked_fill(places > at[:, None], -torch.inf)
            sums += scores.softmax(-1).sum(1)
        self.heavy[layer] = sums

    def keep_recent(self, layers: int, heads: int, length: int, budget: int) -> None:
        """Keep the first tokens and the newest."""
        seen = torch.zeros(heads, length, dtype=torch.bool)
        seen[:, : min(NUM_SINKS, budget // 2)] = True
        seen[:, length - (budget - min(NUM_SINKS, budget // 2)) :] = True
        self.kept = dict.fromkeys(range(NUM_EXEMPT, layers), seen)

    def keep_heavy(self, budget: int) -> None:
        """Keep half of the newest, and of the others those that got most attention (H2O, NeurIPS 2023, in one shot)."""
        self.kept = {}
        for layer, sums in self.heavy.items():
            length, recent = sums.shape[1], budget // 2
            seen = torch.zeros(sums.shape, dtype=torch.bool)
            seen[:, length - recent :] = True
            others = sums[:, : length - recent].topk(budget - recent, dim=1).indices
            self.kept[layer] = seen.scatter(1, others, True)


@contextmanager
def attending(model: Any, attention: KeptTokens) -> Iterator[None]:
    """Let a model use such an attention for the body."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
