"""The size of a pool with chosen pages: budgets, limits, tiers, pressure, and runs that are broken off."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import fmstream
from fmstream import PagedCache, emulator
from fmstream.errors import CancelledRun, MemoryBudgetError
from fmstream.payloads.kv.budgeting import BudgetSizing
from fmstream.payloads.kv.chosen_pool import ChosenPool
from fmstream.payloads.kv.shape import PageShape
from tests.kv.kit import checked, fresh, generate, llama, model_on, prompt

TOKENS = 4
SHAPE = PageShape(32, 1, 128, 128, torch.bfloat16)


def test_what_a_budget_allows() -> None:
    sizing = BudgetSizing(0.135, None, 0, 32, 30)
    everything = 32 * 8 * 1024
    assert sizing.wanted(SHAPE, 8, 32 << 10) == int(0.135 * everything)
    assert BudgetSizing(0.01, None, 0, 32, 30).wanted(SHAPE, 8, 32 << 10) == sizing.least(SHAPE, 8, 32 << 10)
    by_pages = BudgetSizing(100, None, 0, 32, 30).wanted(SHAPE, 8, 32 << 10)
    assert 8 * (1024 + 30 * 100) < by_pages < 8 * (1024 + 30 * 100) * 1.2


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_pages_in_a_file(device: str, tmp_path: Path) -> None:
    fresh("late")
    model, tokens = model_on(llama, device), []
    for options in ({}, {"kv_host_memory": 0, "spill_dir": tmp_path}):
        with (
            checked(PagedCache(model.config, page_tokens=TOKENS, kv_budget=3, **options)) as cache,
            cache.selecting(model),
        ):
            tokens.append(generate(model, prompt(60), cache))
            did = cache.statistics()
    assert torch.equal(*tokens)
    assert did.file_read_bytes > 0
    assert cache.samples[-1].file_pages > cache.samples[-1].host_pages == 0


def test_a_pool_too_small_for_a_choice_attends_to_everything() -> None:
    fresh("late")
    model = model_on(llama, "emu")
    expected = generate(model, prompt(60), None)
    layer = 2 * 20
    with checked(PagedCache(model.config, layer + 4, page_tokens=TOKENS, kv_budget=3)) as cache:
        with cache.selecting(model):
            assert torch.equal(generate(model, prompt(60), cache), expected)
        assert cache.statistics().selection.decisions == 0
    small = PagedCache(model.config, 30, page_tokens=TOKENS, kv_budget=3)
    with (
        pytest.raises(MemoryBudgetError, match=r"max_pages=30 is less than one layer"),
        small.selecting(model),
    ):
        generate(model, prompt(60), small)
    small.close()


def test_a_device_whose_memory_runs_short_gets_some_back() -> None:
    machine = fresh("late", capacity=64 << 20)
    model = model_on(llama, "emu")
    held: list[torch.Tensor] = []
    with checked(PagedCache(model.config, page_tokens=TOKENS, kv_budget=0.9, cpu_offload_threshold_mb=10)) as cache:
        with cache.selecting(model), torch.no_grad():
            model(prompt(200).to("emu"), cache=cache, logits_to_keep=1)
            before = cache.statistics().device_pages
            held.append(torch.empty(54 << 20, dtype=torch.uint8, device="emu"))
            for number in range(3):
                model(prompt(1, seed=number).to("emu"), cache=cache)
        assert cache.statistics().device_pages < before
    assert not machine.reports


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_cancelled_and_generated_again(device: str) -> None:
    machine = fresh("late")
    options: dict[str, Any] = {"memory": "60%", "kv_budget": 3, "page_tokens": TOKENS, "device": device}
    wishes: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model = model_on(llama, "cpu")
    with fmstream.stream(model, **options):
        expected = model.generate(prompt(60).to(device), **wishes).cpu()
    calls, handles = [0], []

    def cancel(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 7:
            handles.pop().cancel()

    with pytest.raises(CancelledRun), fmstream.stream(model, **options) as handle:  # noqa: PT012
        handles.append(handle)
        hook = model.model.layers[2].self_attn.register_forward_hook(cancel)
        model.generate(prompt(60).to(device), **wishes)
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    del handle
    gc.collect()
    assert machine.pinned.charged_bytes == 0
    with fmstream.stream(model, **options):
        assert torch.equal(model.generate(prompt(60).to(device), **wishes).cpu(), expected)
    assert not emulator.machine().reports


class Broken(Exception):
    """A fault in the model."""


def test_a_step_that_was_left_starts_again_after_reset() -> None:
    fresh()
    model = model_on(llama, "emu")
    with checked(PagedCache(model.config, page_tokens=TOKENS, kv_budget=3)) as cache, cache.selecting(model):
        for _ in range(2):  # the pool has grown after the first: then all that follow choose alike
            expected = generate(model, prompt(60), cache)
            cache.reset()
        calls = [0]

        def fail(*_: Any) -> None:
            calls[0] += 1
            if calls[0] == 4:
                raise Broken

        hook = model.model.layers[2].self_attn.q_proj.register_forward_hook(fail)
        with pytest.raises(Broken):
            generate(model, prompt(60), cache)
        hook.remove()
        cache.check()
        cache.reset()
        assert torch.equal(generate(model, prompt(60), cache), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("length", [40, 41])
def test_a_token_that_could_not_be_stored_leaves_the_layer_as_before(
    length: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise error

    model = model_on(llama, "cpu")
    keys = torch.randn(1, 2, length + 1, 8)
    old, new = keys[:, :, :length], keys[:, :, length:]
    with checked(PagedCache(model.config, page_tokens=TOKENS, kv_budget=3)) as cache, cache.selecting(model):
        for index in range(4):
            cache.update(old, -old, index)
        for index in (2, 3):
            with monkeypatch.context() as patch:
                patch.setattr(ChosenPool, "_open_index", fails)
                with pytest.raises(error):
                    cache.update(new, -new, index)
            cache.check()
            assert torch.equal(cache.layers[index].keys, old)
            cache.update(new, -new, index)
            cache.layers[index].everything()
            assert torch.equal(cache.layers[index].keys, keys)
            assert torch.equal(cache.layers[index].values, -keys)


def test_a_step_that_was_left_can_be_taken_back() -> None:
    model = model_on(llama, "cpu")
    keys = torch.randn(1, 2, 40, 8)
    with checked(PagedCache(model.config, page_tokens=TOKENS, kv_budget=3)) as cache, cache.selecting(model):
        for index in range(4):
            cache.update(keys, keys, index)
        for _ in range(2):  # the model fails before its attention
            cache.update(keys[:, :, :1], keys[:, :, :1], 2)
            cache.layers[2].crop(-1)
        assert torch.equal(cache.layers[2].keys, keys)
