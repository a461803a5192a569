"""What does not fit a paged cache is refused with the value, the limit and the remedy, and changes nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, MistralConfig

from fmstream import PagedCache
from fmstream.errors import ConfigError, IdsError
from fmstream.payloads.kv.chosen_layer import ATTENTION
from tests.kv.kit import (
    HEADS,
    PAGE_TOKENS,
    SMALL,
    fresh,
    gemma,
    generate,
    llama,
    model_on,
    plain_cache,
    prompt,
)


def cache_with(rows: int = 3, dtype: torch.dtype = torch.float32) -> tuple[PagedCache, Tensor]:
    """A cache whose first layer holds something, and what that is."""
    cache = PagedCache(model_on(llama, "cpu").config, page_tokens=PAGE_TOKENS)
    keys = torch.randn(rows, 2, 9, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache.update(keys, -keys, 0)
    return cache, keys


def holds(cache: PagedCache, keys: Tensor) -> bool:
    """Whether the first layer has just these keys, and its laws hold."""
    cache.check()
    layer: Any = cache.layers[0]
    return torch.equal(layer.keys, keys) and torch.equal(layer.values, -keys)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 2, 1, 8), "it has 3 sequences"),
        ((4, 2, 1, 8), "it has 3 sequences"),
        ((3, 4, 1, 8), "it has 2 heads of 8 and 8"),
        ((3, 2, 1, 16), "it has 2 heads of 8 and 8"),
        ((0, 2, 1, 8), "of at least one sequence"),
        ((3, 1, 8), "they must be .batch, heads, tokens, dim."),
    ],
)
def test_tokens_of_another_shape(shape: tuple[int, ...], message: str) -> None:
    cache, keys = cache_with()
    with pytest.raises(ConfigError, match=rf"do not fit this cache: .*{message}.*; give another model a cache of its"):
        cache.update(torch.ones(shape), torch.ones(shape), 0)
    assert holds(cache, keys)


def test_tokens_of_a_wider_type_are_refused_and_narrower_ones_widened() -> None:
    cache, keys = cache_with(dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"of torch.float32 on cpu do not fit this cache: it holds torch.bfloat16"):
        cache.update(keys.float(), keys.float(), 0)
    assert holds(cache, keys)
    wide, first = cache_with()
    found, _ = wide.update(keys, keys, 0)
    assert torch.equal(found, torch.cat([first, keys], 2))


def test_tokens_on_another_device() -> None:
    fresh()
    cache, keys = cache_with()
    with pytest.raises(ConfigError, match=r"on emu:0 do not fit this cache: it is on cpu"):
        cache.update(keys.to("emu"), keys.to("emu"), 0)
    assert holds(cache, keys)


def test_an_empty_cache_takes_what_another_model_gives() -> None:
    cache, _ = cache_with()
    for dtype, shape in ((torch.float32, (2, 4, 5, 16)), (torch.float16, (1, 2, 9, 8))):
        cache.reset()
        keys = torch.randn(shape).to(dtype)
        found, values = cache.update(keys, -keys, 0)
        assert found.dtype == dtype
        assert torch.equal(found, keys)
        assert torch.equal(values, -keys)
        cache.check()


def test_no_tokens_at_first() -> None:
    cache = PagedCache(model_on(llama, "cpu").config, page_tokens=PAGE_TOKENS)
    none, some = torch.ones(1, 2, 0, 8), torch.ones(1, 2, 3, 8)
    assert cache.update(none, none, 0)[0].shape == none.shape
    assert torch.equal(cache.update(some, some, 0)[1], some)
    cache.check()


@pytest.mark.parametrize(
    "indices",
    [
        torch.tensor([0, 1, 3]),
        torch.tensor([-4]),
        torch.tensor([[0, 1, 2]]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([True, False]),
        torch.tensor(1),
    ],
    ids=str,
)
def test_sequences_that_are_not_there(indices: Tensor) -> None:
    cache, keys = cache_with()
    for choose in (cache.reorder_cache, cache.batch_select_indices):
        with pytest.raises(IdsError, match=r"chooses no sequences of this cache, which has 3: .* from 0 to 2"):
            choose(indices)
        assert holds(cache, keys)


def test_sequences_from_the_end() -> None:
    cache, keys = cache_with()
    cache.batch_select_indices(torch.tensor([-1, 0]))
    assert holds(cache, keys[[-1, 0]])


def test_keys_and_values_cannot_be_set() -> None:
    cache, keys = cache_with()
    layer: Any = cache.layers[0]
    for name in ("keys", "values"):
        with pytest.raises(ConfigError, match=rf"{name} of a layer in pages cannot be set: .*DynamicCache"):
            setattr(layer, name, torch.zeros_like(keys))
    assert holds(cache, keys)


@pytest.mark.parametrize("config", [None, {"num_hidden_layers": 4}, torch.nn.Linear(1, 1)], ids=str)
def test_what_is_no_configuration(config: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{type(config).__name__} is no configuration .* give PagedCache model"):
        PagedCache(config)


def test_a_folder_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    config = model_on(llama, "cpu").config
    (tmp_path / "file").touch()
    for folder in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"no file for KV pages can be made in .*: give another spill_dir"):
            PagedCache(config, spill_dir=folder)
    with pytest.raises(ConfigError, match=r"spill_dir='' is no folder"):
        PagedCache(config, spill_dir="")
    PagedCache(config, spill_dir=tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("pages", [None, 60])
@pytest.mark.parametrize("budget", [None, 3])
def test_sequences_that_multiply_can_be_read(pages: int | None, budget: int | None) -> None:
    model = model_on(llama, "cpu")
    cache = PagedCache(model.config, pages, page_tokens=4, kv_budget=budget)
    keys = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    with cache.selecting(model):
        cache.update(keys, -keys, 0)
        cache.batch_repeat_interleave(9 if pages is None else 2)
        assert holds(cache, keys.repeat(9 if pages is None else 2, 1, 1, 1))


def deepseek() -> Any:
    """A model that makes its keys of what it keeps."""
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    torch.manual_seed(0)
    dense = SMALL | {"num_attention_heads": 4, "first_k_dense_replace": 4}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**dense, **sizes)).eval()


@pytest.mark.parametrize("options", [{"kv_budget": 3}, {"context_window": 9}], ids=str)
def test_a_model_that_makes_other_keys_is_refused_at_its_first_layer(options: dict[str, Any]) -> None:
    model = deepseek()
    cache = PagedCache(model.config, page_tokens=4, **options)
    with cache.selecting(model):
        with pytest.raises(ConfigError, match=r"does not hand its keys .* leave kv_budget and context_window out"):
            generate(model, prompt(30), cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [30, 0, 0, 0]
    assert model.config._attn_implementation == "sdpa"
    plain = generate(model, prompt(30), plain_cache(model))
    assert torch.equal(generate(model, prompt(30), PagedCache(model.config, 24, page_tokens=4)), plain)


def test_a_pool_without_a_size_grows_for_every_layer() -> None:
    cache = PagedCache(model_on(llama, "cpu").config, page_tokens=8)
    new = torch.randn(1, 2, 900, 8)
    for index, length in ((0, 8), (1, 8), (1, 892)):
        cache.update(new[:, :, -length:], new[:, :, -length:], index)
    assert torch.equal(cache.layers[1].keys[:, :, 8:], new[:, :, 8:])
    cache.check()


def test_a_window_that_is_narrower_than_a_layers_own() -> None:
    config = model_on(gemma, "cpu").config
    with pytest.raises(ConfigError, match=r"context_window=11 is less than the 12 tokens .* give at least 12"):
        PagedCache(config, context_window=11)
    PagedCache(config, context_window=12)


def test_options_without_effect_are_told() -> None:
    slides = MistralConfig(**SMALL, **HEADS, sliding_window=16)
    (note,) = PagedCache(slides, 9).notes
    assert note.startswith("nothing lies in pages here: 0 of 4 layers keep all tokens")
    (note,) = PagedCache(model_on(gemma, "cpu").config, kv_budget=0.5).notes
    assert note.startswith("kv_budget chooses nothing here: 2 of 4 layers keep all tokens, of which the first 2 always")
    assert not PagedCache(model_on(llama, "cpu").config, kv_budget=0.5).notes


def test_a_cache_made_of_a_copy_of_the_configuration_chooses() -> None:
    model = model_on(llama, "cpu")
    cache = PagedCache(copy.deepcopy(model.config), page_tokens=4, kv_budget=3)
    with cache.selecting(model):
        generate(model, prompt(60), cache)
    assert cache.statistics().selection.decisions > 0
    with pytest.raises(ConfigError, match="need the attention that chooses pages, and the model has 'sdpa'"):
        generate(model, prompt(100), cache)


def test_the_last_body_that_ends_gives_the_attention_back() -> None:
    model = model_on(llama, "cpu")
    caches = [PagedCache(model.config, page_tokens=4, kv_budget=3) for _ in range(2)]
    first, second = (cache.selecting(model) for cache in caches)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as two threads may
    assert model.config._attn_implementation == ATTENTION
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"
