"""Chosen pages: exact where everything is chosen or the gate says so, else what a plain choice of them gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import fmstream
from fmstream import PagedCache, Report, emulator
from fmstream.emulator.backlog import Execution
from fmstream.errors import ConfigError
from fmstream.payloads.kv.choosing import Seen, Selection
from fmstream.payloads.kv.chosen_layer import ATTENTION
from fmstream.payloads.page_select import Digests, Limits, digest, select_with_torch
from tests.kv.kit import ORDERS, checked, fresh, gemma, generate, llama, model_on, plain_cache, prompt, qwen, t5
from tests.kv.test_twin import WAYS

TOKENS = 4
LONG = prompt(60)


def chosen_cache(model: Any, budget: Any = 3, gate: float = 2.0, **options: Any) -> PagedCache:
    """A cache whose gate, unless it is given, never falls back."""
    cache = PagedCache(model.config, page_tokens=TOKENS, kv_budget=budget, **options)
    assert cache.selection is not None
    cache.selection.gate = gate
    return cache


def steps(model: Any, ids: Tensor, cache: Any, first: int, mask: Tensor | None = None) -> Tensor:
    """Logits of steps of one token behind a prompt of ``first``."""
    ids = ids.to(model.device)
    found = []
    with torch.no_grad():
        for begin, end in [(0, first), *((at, at + 1) for at in range(first, ids.shape[1]))]:
            more = {} if mask is None else {"attention_mask": mask[:, :end].to(model.device)}
            found.append(model(ids[:, begin:end], cache=cache, logits_to_keep=1, **more).logits.cpu())
    return torch.cat(found[1:], 1)


@contextmanager
def always_choosing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps choose also where everything is chosen."""
    with monkeypatch.context() as patch:
        patch.setattr(Selection, "has_choice", lambda self, limits, complete: limits is not None and complete > 0)
        yield


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("build", [llama, qwen, gemma], ids=lambda build: build.__name__)
def test_a_gate_that_is_always_shut_gives_the_exact_bits(build: Callable[[], nn.Module], execution: Execution) -> None:
    fresh(execution)
    model, ids = model_on(build, "emu"), prompt(60, 2)
    expected = steps(model, ids, plain_cache(model), 50)
    with checked(chosen_cache(model, gate=0.0)) as cache, cache.selecting(model):
        assert torch.equal(steps(model, ids, cache, 50), expected)
        did = cache.statistics().selection
    assert did.fallbacks == did.decisions > 0 or build is gemma  # which has two full layers, and these are exempt
    assert not emulator.machine().reports


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_everything_chosen_gives_the_exact_bits(
    device: str, execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(execution)
    model, ids = model_on(llama, device), prompt(61, 2)
    expected = steps(model, ids, plain_cache(model), 50)
    with always_choosing(monkeypatch), checked(chosen_cache(model, 30)) as cache, cache.selecting(model):
        assert torch.equal(steps(model, ids, cache, 50), expected)
        did = cache.statistics().selection
    assert did.fallbacks == 0
    assert did.chosen == 4 * 2 * sum(at // TOKENS for at in range(50, 61))


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("mode", ["gate", "everything"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_every_way_to_generate(way: dict[str, Any], mode: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh("late")
    model = model_on(llama, device)
    expected = generate(model, cache=plain_cache(model), **way)
    budget, gate = (3, 0.0) if mode == "gate" else (40, 2.0)
    with always_choosing(monkeypatch), checked(chosen_cache(model, budget, gate)) as cache, cache.selecting(model):
        assert torch.equal(generate(model, cache=cache, **way), expected)
        did = cache.statistics().selection
    assert did.decisions > 0
    assert did.fallbacks == (did.decisions if mode == "gate" else 0)


def test_prompt_lookup_takes_tokens_back() -> None:
    fresh("late")
    model, ids = model_on(llama, "emu"), prompt(6).repeat(1, 9)
    expected = generate(model, ids, plain_cache(model), prompt_lookup_num_tokens=4)
    with checked(chosen_cache(model, gate=0.0)) as cache, cache.selecting(model):
        assert torch.equal(generate(model, ids, cache, prompt_lookup_num_tokens=4), expected)


class Reference:
    """Attention to the same pages, chosen by PyTorch operations from tensors that hold everything."""

    def __init__(self, num_chosen: int) -> None:
        self.limits = Limits(num_chosen, num_chosen, 0, 1, 1)
        self.num_left_out = 0

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        batch, heads, length, dim = key.shape
        pages = (length - 1) // TOKENS
        if query.shape[2] == 1 and module.layer_idx >= 2 and pages > self.limits.num_chosen:
            centre, radius = digest(key[:, :, : pages * TOKENS].reshape(batch, heads, pages, TOKENS, dim))
            allowed = torch.ones(batch, heads, length, dtype=torch.bool)
            if mask is not None:
                reachable = mask[:, :, 0, : pages * TOKENS].reshape(batch, -1, pages, TOKENS).any(-1)
                centre = centre.masked_fill(~reachable.unsqueeze(-1), 0)
                radius = radius.masked_fill(~reachable.unsqueeze(-1), -(2.0**14))
                allowed &= mask[:, :, 0]
            there = torch.zeros(batch, heads, pages, dtype=torch.bool)
            known = Digests(
                centre.contiguous(),
                radius.contiguous(),
                there,
                (torch.ones(dim), torch.zeros(dim)),
                kwargs["scaling"],
                pages,
            )
            chosen = select_with_torch(query[:, :, 0], known, self.limits).chosen
            inside = torch.zeros(batch, heads, pages, dtype=torch.bool).scatter_(-1, chosen.long(), True)
            inside = inside.repeat_interleave(TOKENS, -1)
            self.num_left_out += int((~inside).sum())
            allowed[:, :, : pages * TOKENS] &= inside
            mask = allowed.repeat_interleave(query.shape[1] // heads, 1).unsqueeze(2)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


@contextmanager
def attending(model: Any, reference: Reference) -> Iterator[None]:
    AttentionInterface.register("reference", reference)
    AttentionMaskInterface.register("reference", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("reference")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("device", "execution"), [("cpu", "eager"), ("emu", "late"), ("emu", 1)])
def test_chosen_pages_are_those_of_the_digests(device: str, execution: Execution, padded: bool) -> None:
    fresh(execution)
    ids, mask = prompt(75, 2), None
    if padded:
        mask = torch.ones(2, 75, dtype=torch.long)
        ids[1, :13], mask[1, :13] = 0, 0
    twin, reference = model_on(llama, "cpu"), Reference(5)
    with attending(twin, reference):
        expected = steps(twin, ids, DynamicCache(config=twin.config), 50, mask)
    exact = steps(twin, ids, DynamicCache(config=twin.config), 50, mask)
    model = model_on(llama, device)
    with checked(chosen_cache(model, 8)) as cache, cache.selecting(model):
        cache.selection.stay = 0.0  # the reference does not know what is in frames
        limits = cache.selection.limits
        cache.selection.__class__ = Five
        found = steps(model, ids, cache, 50, mask)
        cache.selection.__class__ = Selection
        did = cache.statistics()
    assert limits(5) is not None
    torch.testing.assert_close(found, expected)
    assert (expected - exact).abs().max() > 1e-3
    assert reference.num_left_out > 0
    assert did.recalled_bytes > 0
    assert did.selection.chosen == 5 * did.selection.decisions > 0


class Five(Selection):
    """Chooses five pages, whatever there is room for."""

    __slots__ = ()

    def limits(self, num_frames: int) -> Limits | None:
        return Limits(5, num_frames, 0, 1, 1, self.stay) if num_frames >= 5 else None


def test_sequences_of_a_batch_and_beams_share_pages() -> None:
    fresh("late")
    model = model_on(llama, "emu")
    with checked(chosen_cache(model, 4)) as cache, cache.selecting(model):
        generate(model, LONG.repeat(3, 1), cache, max_new_tokens=12, num_beams=2)
        pool = next(iter(cache.pools))
        assert pool.frames.refs.max() >= 6
        assert cache.statistics().selection.recalled > 0


def test_a_fork_goes_its_own_way() -> None:
    fresh("late")
    model, ids = model_on(llama, "emu"), torch.cat([LONG, prompt(8, seed=3)], 1)
    with checked(chosen_cache(model, 4)) as cache, cache.selecting(model):
        steps(model, LONG, cache, 58)
        other = copy.deepcopy(cache)
        before = cache.layers[3].keys.cpu()
        steps(model, ids[:, 60:], other, 1)
        assert torch.equal(cache.layers[3].keys.cpu(), before)
        assert other.get_seq_length() == 68
        other.check()
        other.close()


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_a_context_window_hides_what_is_older(device: str, budget: int | None) -> None:
    """Of one layer, where a token sees no further through those it attends to."""
    fresh("late")
    model = model_on(llama, device)
    window = 21
    for index in (0, 3):
        seen: list[Tensor] = []
        with checked(chosen_cache(model, budget, context_window=window)) as cache, cache.selecting(model):
            hook = model.model.layers[index].self_attn.register_forward_hook(
                lambda module, args, output, seen=seen: seen.append(output[0].detach().cpu())  # type: ignore[misc]
            )
            inputs: list[Tensor] = []
            taken = model.model.layers[index].self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, inputs=inputs: inputs.append(kwargs["hidden_states"].cpu()),  # type: ignore[misc]
                with_kwargs=True,
            )
            steps(model, LONG, cache, 50)
            hook.remove()
            taken.remove()
        found, hidden = torch.cat(seen, 1), torch.cat(inputs, 1)
        twin = model_on(llama, "cpu")
        places = torch.arange(60)
        back = places[:, None] - places[None]
        inside = (back >= 0) & (back < window)
        rotary = twin.model.rotary_emb(hidden, places[None])
        with torch.no_grad():
            expected = twin.model.layers[index].self_attn(hidden, rotary, inside[None, None])[0]
        if budget is None or index == 0:
            torch.testing.assert_close(found, expected)
        else:  # a step attends to some of what the window leaves
            torch.testing.assert_close(found[:, :50], expected[:, :50])
            assert torch.isfinite(found).all()
            assert cache.selection.counts.chosen > 0


def test_nothing_outside_the_window_is_attended_to() -> None:
    fresh()
    model = model_on(llama, "cpu")
    with checked(chosen_cache(model, 3, context_window=10)) as cache, cache.selecting(model), torch.no_grad():
        model(LONG[:, :50], cache=cache, logits_to_keep=1)
        for layer in cache.layers:
            layer._keys_before = layer.keys.clone()
        seen = []
        cache.selection.watch = lambda decision: seen.append(decision)
        model(LONG[:, 50:51], cache=cache)
        layer = cache.layers[3]
        keys, _, mask = layer.attend(torch.randn(1, 4, 1, 8), None, None)
        assert mask is not None
        assert int(mask[0, 0, 0].sum()) <= 10
        assert keys.shape[2] == mask.shape[-1]
    assert seen


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_a_streamed_model_chooses_within_generate(device: str) -> None:
    fresh("late")
    model = model_on(llama, "cpu")
    before = set(model.__dict__)
    options = {"memory": "60%", "page_tokens": TOKENS, "kv_budget": 0.5, "device": device}
    wishes = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    inside: list[str] = []
    hook = model.model.register_forward_pre_hook(lambda *_: inside.append(model.config._attn_implementation))
    with fmstream.stream(model, **options) as handle:
        found = model.generate(LONG.to(device), **wishes)
        assert model.config._attn_implementation == "sdpa"
    hook.remove()
    assert set(inside) == {ATTENTION}
    assert set(model.__dict__) == before
    pages = handle.report.pages
    assert pages is not None
    assert pages.chosen > pages.recalled > 0
    assert len(pages.samples) == 10
    assert pages.samples[-1].host_pages > 0
    assert "attended to" in str(handle.report)
    assert Report.from_dict(handle.report.to_dict()) == handle.report
    other = model_on(llama, device)
    with checked(PagedCache(other.config, page_tokens=TOKENS, kv_budget=0.5)) as cache, cache.selecting(other):
        assert torch.equal(generate(other, LONG, cache, max_new_tokens=10), found.cpu())


def test_a_report_of_before_has_no_pages() -> None:
    fresh()
    with fmstream.stream(model_on(llama, "cpu"), device="cpu") as handle:
        pass
    data = handle.report.to_dict() | {"schema": 1}
    assert data.pop("pages") is None
    assert Report.from_dict(data) == handle.report


def test_a_cache_given_by_hand_needs_the_attention_that_chooses() -> None:
    fresh()
    model = model_on(llama, "cpu")
    cache = chosen_cache(model)
    with pytest.raises(ConfigError, match=r"the model has 'sdpa': use fmstream.run"):
        generate(model, LONG, cache)
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM with attention 'eager'"), cache.selecting(model):
        pass
    assert model.config._attn_implementation == "eager"


def test_keys_that_do_not_reach_the_attention_function_are_noticed() -> None:
    fresh()
    model = model_on(llama, "cpu")
    cache = chosen_cache(model)
    keys = torch.randn(1, 2, 50, 8)
    with cache.selecting(model), torch.no_grad():
        for index in range(4):
            cache.update(keys, keys, index)
        cache.update(keys[:, :, :1], keys[:, :, :1], 2)
        with pytest.raises(ConfigError, match="does not hand its keys to the attention function"):
            cache.update(keys[:, :, :1], keys[:, :, :1], 2)


def test_an_encoder_decoder_attends_to_everything_across() -> None:
    fresh()
    model = model_on(t5, "cpu")
    options = {"memory": "60%", "page_tokens": TOKENS, "kv_budget": 0.5, "device": "cpu"}
    expected = generate(model_on(t5, "cpu"), LONG, None)
    with fmstream.stream(model, **options):
        try:
            found = generate(model, LONG, None)
        except ConfigError as error:
            assert "T5ForConditionalGeneration" in str(error)  # noqa: PT017
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_budget": 0.0}, r"kv_budget=0.0 is neither a part"),
        ({"kv_budget": 1.5}, r"kv_budget=1.5 is neither a part"),
        ({"kv_budget": 0}, r"kv_budget=0 is neither .* nor a number of pages"),
        ({"kv_budget": True}, r"kv_budget=True is neither"),
        ({"context_window": 0}, r"context_window=0 is no number of tokens"),
        ({"context_window": 2.5}, r"context_window=2.5 is no number of tokens"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagedCache(model_on(llama, "cpu").config, **options)
    with pytest.raises(ConfigError, match=message):
        fmstream.StreamConfig(**options)


@pytest.mark.parametrize("budget", [0.4, 0.9])
def test_what_lies_on_the_device_is_within_the_budget(budget: float) -> None:
    machine = fresh()
    model = model_on(llama, "emu")
    with checked(chosen_cache(model, budget)) as cache, cache.selecting(model):
        generate(model, prompt(250), cache, max_new_tokens=40)
        whole = 4 * 2 * -(-289 // TOKENS)
        assert cache.statistics().device_pages <= budget * whole
        pool = next(iter(cache.pools))
        assert pool.frames.num_taken() <= pool.frames.num_frames
    assert not machine.reports


def test_another_choice_can_be_put_in() -> None:
    fresh()
    model = model_on(llama, "cpu")
    asked = []

    def first(query: Tensor, digests: Digests, limits: Limits, resident: Any) -> Any:
        from fmstream.payloads.kv.choosing import Decision

        asked.append((query.shape, limits.num_chosen, resident.shape))
        rows = len(resident)
        chosen = np.tile(np.arange(limits.num_chosen, dtype=np.int32), (rows, 1))
        nothing = np.full((rows, 0), -1, np.int32)
        return Decision(chosen, nothing, nothing, np.zeros(rows, np.float32))

    cache = PagedCache(model.config, page_tokens=TOKENS, kv_budget=3, choose=first)
    with checked(cache), cache.selecting(model):
        steps(model, LONG, cache, 50)
        did = cache.statistics().selection
    prompts, decided = asked[:2], asked[2:]  # two layers choose
    assert [shape for *_, shape in prompts] == [(2, 12)] * 2
    assert len(decided) == did.decisions // 2 == 20
    assert did.chosen == 2 * sum(chosen for _, chosen, _ in decided)
    assert asked[0] == ((1, 4, 8), asked[0][1], (2, 12))


def test_chosen_pages_stay_while_other_layers_pass() -> None:
    fresh("eager")
    model, ids = model_on(llama, "cpu"), prompt(240)
    missing = 0

    def count(seen: Seen) -> None:
        nonlocal missing
        pages, meant = seen.decision.chosen, seen.layer._meant
        missing += int((~np.take_along_axis(meant, pages, 1)).sum())

    with checked(chosen_cache(model, 12, kv_cache_max_pages=220)) as cache, cache.selecting(model):
        cache.selection.watch = count
        steps(model, ids, cache, 200)
        (pool,) = cache.pools
        assert pool.transit_frames() < 2 * 60  # the layers that attend to everything do not fit in what is theirs
        did = cache.statistics().selection
        assert did.recalled <= missing
