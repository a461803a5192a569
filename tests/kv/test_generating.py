"""``generate`` of a streamed model uses pages by itself; a cancelled run leaves nothing; wrong uses are refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

import fmstream
from fmstream import PagedCache, emulator
from fmstream.errors import CancelledRun, ConfigError
from fmstream.payloads.kv import compat
from fmstream.payloads.kv.generating import HOOK
from tests.kv.kit import fresh, gemma, generate, llama, model_on, plain_cache, prompt, t5

OPTIONS: dict[str, Any] = {"memory": "60%", "kv_cache_max_pages": 7, "page_tokens": 8}
WISHES: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


class Seen:
    """The caches that a model's forward was given."""

    def __init__(self, module: nn.Module) -> None:
        self.caches: list[Any] = []
        self._handle = module.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not any(kwargs["cache"] is cache for cache in self.caches):
            self.caches.append(kwargs["cache"])

    def close(self) -> list[Any]:
        self._handle.remove()
        return self.caches


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("build", [llama, gemma, t5], ids=lambda build: build.__name__)
def test_a_streamed_model_pages_by_itself(build: Callable[[], nn.Module], device: str) -> None:
    fresh("late")
    expected = generate(model_on(build, device), prompt(30), None)
    model = model_on(build, "cpu")
    before = set(model.__dict__)
    seen = Seen(model)
    with fmstream.stream(model, device=device, **OPTIONS) as handle:
        assert HOOK in model.__dict__
        found = model.generate(prompt(30).to(device), **WISHES)
        assert torch.equal(found.cpu(), expected)
    assert set(model.__dict__) == before
    (cache,) = seen.close()
    paged = cache.cross_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    assert type(paged) is PagedCache
    assert paged.statistics().recalled_bytes > 0
    paged.check()
    note = next(note for note in handle.report.notes if "keys and values lay in pages" in note)
    assert " 0 bytes" not in note
    assert not emulator.machine().reports


def test_run_passes_options_on_from_a_configuration() -> None:
    fresh()
    expected = generate(model_on(llama, "emu"), prompt(30), None)
    model = model_on(llama, "cpu")
    seen = Seen(model)
    run = fmstream.run(model, prompt(30).to("emu"), method="generate", device="emu", config=OPTIONS, **WISHES)
    assert torch.equal(run.output.cpu(), expected)
    assert type(seen.close()[0]) is PagedCache


def test_a_cache_that_the_user_gives_is_used_under_either_name() -> None:
    fresh()
    model = model_on(llama, "emu")
    expected = generate(model, prompt(30), None)
    cache = PagedCache(model.config, 7, page_tokens=8)
    with pytest.warns(FutureWarning, match="past_key_values"):
        found = model.generate(prompt(30).to("emu"), past_key_values=cache, **WISHES)
    assert torch.equal(found.cpu(), expected)
    assert cache.statistics().recalled_bytes > 0
    mine = DynamicCache(config=model.config)
    host = model_on(llama, "cpu")
    with fmstream.stream(host, device="emu", **OPTIONS):
        host.generate(prompt(30).to("emu"), cache=mine, **WISHES)
    assert mine.get_seq_length() == 49


@pytest.mark.parametrize("implementation", ["static", "quantized"])
def test_a_cache_of_another_kind_that_the_user_wants_is_left(implementation: str) -> None:
    fresh()
    model = model_on(llama, "cpu")
    seen = Seen(model)
    with fmstream.stream(model, device="cpu", **OPTIONS):
        try:
            model.generate(prompt(9), cache_implementation=implementation, **WISHES)
        except ImportError:  # the package for it is not there
            assert implementation == "quantized"
    assert not any(type(cache) is PagedCache for cache in seen.close())


def test_without_a_size_pages_are_used_only_where_the_plain_cache_would_not_fit() -> None:
    fresh(capacity=64 << 20)
    model = model_on(llama, "cpu")
    seen = Seen(model)
    with fmstream.stream(model, device="emu", memory="60%") as _:
        model.generate(prompt(9).to("emu"), **WISHES)
    with fmstream.stream(model, device="emu", memory="60%", cpu_offload_threshold_mb=67) as _:
        model.generate(prompt(30, 8).to("emu"), **WISHES)
    plain, paged = seen.close()
    assert type(plain) is DynamicCache
    assert type(paged) is PagedCache


def test_copies_of_a_streamed_model_make_plain_caches() -> None:
    fresh()
    model = model_on(llama, "cpu")
    with fmstream.stream(model, device="cpu", **OPTIONS):
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        seen = Seen(twin)
        twin.generate(prompt(9), **WISHES)
        assert type(seen.close()[0]) is DynamicCache


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("at_call", [1, 9, 15])
def test_cancelled_and_generated_again(device: str, at_call: int) -> None:
    machine = fresh("late")
    expected = generate(model_on(llama, device), prompt(30), None)
    model = model_on(llama, "cpu")
    calls, handles = [0], []

    def cancel(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == at_call:
            handles.pop().cancel()

    with pytest.raises(CancelledRun), fmstream.stream(model, device=device, **OPTIONS) as handle:  # noqa: PT012
        handles.append(handle)
        hook = model.model.layers[1].self_attn.register_forward_hook(cancel)
        model.generate(prompt(30).to(device), **WISHES)
    hook.remove()
    del handle  # it holds the error, whose frames hold the cache
    gc.collect()
    assert machine.pinned.charged_bytes == 0
    with fmstream.stream(model, device=device, **OPTIONS):
        assert torch.equal(model.generate(prompt(30).to(device), **WISHES).cpu(), expected)
    assert not machine.reports


class Broken(Exception):
    """A fault in the model."""


def test_a_cache_that_was_left_within_a_pass_starts_again_after_reset() -> None:
    fresh()
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, 7, page_tokens=8)

    def fail(*_: Any) -> None:
        raise Broken

    hook = model.model.layers[2].mlp.register_forward_hook(fail)
    with pytest.raises(Broken):
        generate(model, prompt(30), cache)
    hook.remove()
    cache.check()
    cache.reset()
    assert torch.equal(generate(model, prompt(30), cache), generate(model, prompt(30), None))
    cache.close()
    assert torch.equal(generate(model, prompt(30), cache), generate(model, prompt(30), None))


def test_who_keeps_keys_goes_on_to_see_them() -> None:
    fresh("late")
    model = model_on(llama, "emu")
    plain = plain_cache(model)
    cache = PagedCache(model.config, 9, page_tokens=8)
    expected, found = generate(model, prompt(30), plain), generate(model, prompt(30), cache)
    assert torch.equal(expected, found)
    kept = [(layer.keys, layer.values) for layer in cache.layers]
    for layer, (keys, values) in zip(plain.layers, kept, strict=True):
        assert torch.equal(layer.keys.cpu(), keys.cpu())
        assert torch.equal(layer.values.cpu(), values.cpu())
    assert cache.statistics().num_lent == 2 * (len(kept) - 1)
    del kept, keys, values
    generate(model, found, cache, max_new_tokens=2)
    assert cache.statistics().num_lent == 6


def test_a_copy_shares_pages_until_either_goes_its_own_way() -> None:
    fresh("late")
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, 40, page_tokens=8)
    start = generate(model, prompt(30), cache, max_new_tokens=3)
    pages = next(iter(cache.pools)).frames.refs.sum()
    other = copy.deepcopy(cache)
    assert next(iter(other.pools)) is next(iter(cache.pools))
    assert next(iter(cache.pools)).frames.refs.max() == 2
    one = torch.cat([start, prompt(4, seed=3)], 1)
    two = torch.cat([start, prompt(4, seed=4)], 1)
    ours = [generate(model, one, cache, max_new_tokens=9), generate(model, two, other, max_new_tokens=9)]
    theirs = [generate(model, one, None, max_new_tokens=9), generate(model, two, None, max_new_tokens=9)]
    assert all(map(torch.equal, ours, theirs))
    cache.check()
    del other
    gc.collect()
    cache.reset()
    assert torch.equal(generate(model, prompt(30), cache, max_new_tokens=3), start)
    cache.check()
    assert next(iter(cache.pools)).frames.refs.sum() == pages


def test_a_cache_says_how_to_keep_it_when_it_is_pickled() -> None:
    fresh()
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, 40, page_tokens=8)
    start = generate(model, prompt(30), cache, max_new_tokens=3)
    for attempt in (pickle.dumps, lambda given: torch.save(given, io.BytesIO())):
        with pytest.raises(ConfigError, match=r"cannot be pickled.*copy\.deepcopy.*layer\.keys"):
            attempt(cache)
    other = copy.copy(cache)
    other.crop(-20)
    assert (cache.get_seq_length(), other.get_seq_length()) == (start.shape[1] - 1, start.shape[1] - 21)
    cache.check()
    cache.close()


def test_gradients_are_refused_before_anything_is_stored() -> None:
    fresh()
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, 7, page_tokens=8)
    with pytest.raises(ConfigError, match=r"no gradients: call the model under torch.no_grad"):
        model(prompt(9).to("emu"), cache=cache)
    assert cache.get_seq_length() == 0


def test_inference_mode_and_side_streams() -> None:
    machine = fresh("late")
    model = model_on(llama, "emu")
    plain, cache = plain_cache(model), PagedCache(model.config, 7, page_tokens=8)
    ids, stream = prompt(50).to("emu"), torch.emu.Stream()  # type: ignore[attr-defined]
    with torch.inference_mode():
        theirs = [model(ids[:, at : at + 10], cache=plain).logits.cpu() for at in range(0, 50, 10)]
    machine.synchronize()
    ours = []
    for number, at in enumerate(range(0, 50, 10)):
        with torch.inference_mode(number % 2 == 0), torch.no_grad():
            if number in (1, 2):
                with torch.emu.stream(stream):  # type: ignore[attr-defined]
                    ours.append(model(ids[:, at : at + 10], cache=cache).logits.cpu())
            else:
                ours.append(model(ids[:, at : at + 10], cache=cache).logits.cpu())
    assert all(map(torch.equal, ours, theirs))
    assert cache.statistics().recalled_bytes > 0
    assert not machine.reports


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_max_pages": 0}, r"kv_cache_max_pages=0 is no number of pages"),
        ({"kv_cache_max_pages": True}, r"kv_cache_max_pages=True is no number"),
        ({"page_tokens": 0}, r"page_tokens=0 is no int from 1 to 65536: 32"),
        ({"cpu_offload_threshold_mb": -1}, r"cpu_offload_threshold_mb=-1 is no number of mebibytes"),
        ({"kv_host_memory": "much"}, r"kv_host_memory='much' is no size"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagedCache(model_on(llama, "cpu").config, **options)
    with pytest.raises(ConfigError, match=message):
        fmstream.StreamConfig(**options)


def test_what_versions_of_transformers_differ_in() -> None:
    assert compat.length_of_query(7) == compat.length_of_query(torch.arange(7)) == 7
    assert compat.length_to_keep(-3, 10) == compat.length_to_keep(7, 10, version=(5, 12)) == 7
    assert compat.length_to_keep(-30, 10) == 0
    assert compat.length_to_keep(30, 10, version=(5, 0)) == 10
    layer: Any = PagedCache(model_on(llama, "cpu").config, 7).layers[0]
    assert layer.get_max_cache_shape() == layer.get_max_length() == -1


def test_crop_of_a_positive_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"crop\(3\)"):
        PagedCache(model_on(llama, "cpu").config, 7).crop(3)  # also with nothing in it
