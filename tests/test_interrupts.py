"""Ctrl-C at awkward moments: the interrupt reaches the caller, and everything is as it should be."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fmstream
from fmstream.actors import prefetch
from fmstream.actors.compute import Executor
from fmstream.payloads.weights import Weights
from tests.kit import agree, assert_plain, budget, mlp, noise
from tests.kit_runtime import map_weights

X = noise(4, 64)


def interrupt_at(n: int, function: Any, *, after: bool) -> Any:
    """The function, interrupted at its n-th call before or after it did its work."""
    calls = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == n and not after:
            raise KeyboardInterrupt
        result = function(*args, **kwargs)
        if calls == n:
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("n", [1, 3, 8, 13])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (prefetch._Crew, "submit"),
        (prefetch._Job, "let_go"),
        (Executor, "_bind"),
        (Executor, "_unbind"),
        (Executor, "_give_back"),
        (Executor, "_top_up"),
        (Executor, "activate"),
    ],
)
def test_an_interrupt_within_a_pass(
    owner: Any, name: str, n: int, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mlp(6, 64)
    twin = copy.deepcopy(module)
    map_weights(module, tmp_path / "w.safetensors")
    with fmstream.stream(module, memory=budget(module)) as handle, torch.no_grad():
        monkeypatch.setattr(owner, name, interrupt_at(n, getattr(owner, name), after=after))
        for _ in range(4):
            try:
                agree(module, twin, X)
            except KeyboardInterrupt:
                monkeypatch.undo()
        monkeypatch.undo()
        agree(module, twin, X, times=3)
        handle._session._executor.pages.check()
    assert_plain(module)
    agree(module, twin, X)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Weights, "uninstall"),
        (Weights, "close_files"),
        (Executor, "close"),
        (prefetch.PrefetchActor, "close"),
    ],
)
def test_an_interrupt_while_closing_is_raised_when_the_modules_are_back(
    owner: Any, name: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mlp(6, 64)
    twin = copy.deepcopy(module)
    map_weights(module, tmp_path / "w.safetensors")
    originals = list(module.parameters())
    handle = fmstream.stream(module, memory=budget(module))
    agree(module, twin, X, times=3)
    monkeypatch.setattr(owner, name, interrupt_at(1, getattr(owner, name), after=after))
    with pytest.raises(KeyboardInterrupt):
        handle.close()
    assert handle.closed
    assert_plain(module)
    assert all(a is b for a, b in zip(module.parameters(), originals, strict=True))
    agree(module, twin, X)
