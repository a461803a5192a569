"""Whatever ends a run, at whatever point: modules are as they were, nothing is pinned, device memory is given back."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream.actors.staging import StagingRing
from fmstream.actors.uploads import Uploads
from fmstream.device import pinned
from fmstream.device.accelerator import Accelerator
from fmstream.payloads import placement
from fmstream.payloads.pinning import PinnedHomes
from tests.accelerator.cases import WIDTH, Counting, call
from tests.accelerator.kit import (
    Left,
    equal,
    fresh,
    here,
    named,
    on_host,
    run_until_interrupted,
    same_states,
    stream_and_compare,
    streaming,
    twin_on,
)
from tests.kit import budget, mlp, noise
from tests.kit_runtime import FailAt, Injected, assert_all_in_files, map_weights

POINTS: dict[str, tuple[Any, str]] = {
    "enqueue": (Accelerator, "copying"),
    "wait": (Accelerator, "wait"),
    "mark": (Accelerator, "mark"),
    "slab": (Accelerator, "slab"),
    "settle": (Accelerator, "settle"),
    "pin": (pinned, "_register"),
    "unpin": (pinned.PinnedBlock, "close"),
    "move": (PinnedHomes, "_move"),
    "place": (placement, "_on_device"),
    "bring back": (placement, "_bring_back"),
    "arrive": (Uploads, "arrive"),
    "follow": (Uploads, "_follow"),
    "release": (Uploads, "released"),
    "take staging": (StagingRing, "take"),
    "leave staging": (StagingRing, "leave"),
    "read": (Uploads, "_read"),
    "complete": (Uploads, "complete"),
}
"""Functions of the path to a device, each of which a Ctrl-C may come just before."""


def counting() -> nn.Module:
    """Layers, norms that count, and buffers that change."""
    return Counting()


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, point: str, n: int) -> Iterator[FailAt]:
    """A Ctrl-C in the n-th call of a function."""
    owner, name = POINTS[point]
    fail = FailAt(getattr(owner, name), n, KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail.as_method() if isinstance(owner, type) else fail)
        yield fail


@pytest.mark.parametrize("options", [{}, {"pinned": 0}], ids=["pinned", "staged"])
@pytest.mark.parametrize("point", POINTS)
def test_an_interrupt_leaves_everything_as_it_was(
    point: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = 0
    for n in (1, 2, 5, 11):
        fresh()
        module = counting()
        before, values = Left(module), [p.detach().clone() for p in module.parameters()]
        allocated = here.allocated()
        with interrupted(monkeypatch, point, n) as fail:
            run_until_interrupted(module, call, 0.4, **options)
        fired += fail.fired
        before.check(module)
        here.check()
        assert here.allocated() == allocated
        equal(list(module.parameters()), values)
        stream_and_compare(module, call, 3, **options)
    staged_only = point in ("take staging", "leave staging", "read", "complete")
    assert fired or (staged_only and not options) or (point == "move" and options)


@pytest.mark.parametrize("at", range(0, 6, 2))
@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
def test_an_exception_in_a_forward_leaves_a_handle_that_works(at: int, error: type[BaseException]) -> None:
    fresh()
    module = counting()
    twin = twin_on(module)
    before = Left(module)

    def fail(*_args: Any) -> None:
        raise error

    with torch.no_grad(), fmstream.stream(module, memory=budget(module, 0.4), device=here.name):
        equal(on_host(call(module, 0)), on_host(call(twin, 0)))
        for part in (module, twin):
            hook = part.layers[at].register_forward_pre_hook(fail)
            with pytest.raises(error):
                call(part, 1)
            hook.remove()
        for number in range(2, 5):
            equal(on_host(call(module, number)), on_host(call(twin, number)))
    before.check(module)
    same_states(module, twin)
    here.check()


def test_buffers_come_back_with_what_the_forward_wrote() -> None:
    fresh()
    module = counting()
    own = dict(named(module, "_buffers"))
    _, outputs = stream_and_compare(module, call, 4)
    assert len(outputs) == 4
    assert module.calls.item() == 4
    for name, buffer in named(module, "_buffers"):
        if not name.endswith("total"):  # the forward exchanges that one
            assert buffer is own[name], name


def _resize(tensor: Tensor) -> None:
    tensor.resize_(8).fill_(1.0)


def _replace_by_more(tensor: Tensor) -> None:
    tensor.data = torch.ones(8, device=tensor.device)


def _replace_by_less(tensor: Tensor) -> None:
    tensor.data = torch.ones(1, device=tensor.device)


def _widen(tensor: Tensor) -> None:
    tensor.data = tensor.data.double() + 1.0


class Scaled(nn.Module):
    """Layers beside a buffer, and two parameters in one storage, which are not streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(6, WIDTH)
        self.register_buffer("buffer", torch.zeros(4))
        self.whole = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.part = nn.Parameter(self.whole.data[:2], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.buffer.sum() * self.whole.sum() + self.part.sum()


@pytest.mark.parametrize("name", ["buffer", "whole", "part"])
@pytest.mark.parametrize("change", [_resize, _replace_by_more, _replace_by_less, _widen])
def test_what_is_not_streamed_comes_back_in_the_shape_that_it_has(change: Callable[[Tensor], None], name: str) -> None:
    module = Scaled().eval()
    twin = twin_on(module)
    with streaming(module, edited=True, keeps=True), torch.no_grad():
        for number in range(3):
            equal(on_host(call(module, number)), on_host(call(twin, number)))
            if number == 0:
                change(getattr(module, name))
                change(getattr(twin, name))
    equal(on_host(getattr(module, name)), on_host(getattr(twin, name)))


def test_what_is_not_streamed_is_converted_with_the_others() -> None:
    module = Scaled().eval()
    twin = twin_on(module)
    x = noise(3, WIDTH).to(here.name)
    with streaming(module, edited=True, keeps=True), torch.no_grad():
        equal(on_host(module(x)), on_host(twin(x)))
        module.double()
        twin.double()
        equal(on_host(module(x.double())), on_host(twin(x.double())))
    same_states(module, twin)


def test_a_buffer_that_was_not_written_is_not_touched() -> None:
    fresh()
    module = mlp(6, WIDTH)
    module.register_buffer("table", torch.ones(4))
    version = module.table._version
    stream_and_compare(module, call, 2)
    assert module.table._version == version


def test_buffers_made_by_a_forward_come_to_the_host() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(6, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "cached"):
                self.register_buffer("cached", x.new_ones(WIDTH))
            return self.layers(x) + self.cached

    fresh()
    module = Caching()
    with torch.no_grad(), fmstream.stream(module, memory=budget(module), device=here.name):
        call(module, 0)
    assert module.cached.device.type == "cpu"


def test_buffers_made_in_inference_mode_take_what_was_written() -> None:
    fresh()
    with torch.inference_mode():
        module = counting()
    with torch.inference_mode(), fmstream.stream(module, memory=budget(module), device=here.name):
        for number in range(3):
            call(module, number)
    assert module.calls.item() == 3


@pytest.mark.parametrize("pinned_option", ["auto", 0])
def test_weights_in_files_are_mapped_again(pinned_option: Any, tmp_path: Path) -> None:
    fresh()
    module = map_weights(mlp(8, WIDTH), tmp_path / "w.safetensors")
    stream_and_compare(module, call, 3, pinned=pinned_option)
    with fmstream.stream(module, memory=budget(module), device=here.name, pinned=0) as handle:
        assert_all_in_files(handle)
        del handle
    gc.collect()


def test_weights_spilled_to_a_file_come_back(tmp_path: Path) -> None:
    fresh()
    module = mlp(8, WIDTH)
    values = copy.deepcopy(module.state_dict())
    stream_and_compare(module, call, 3, spill_dir=tmp_path)
    equal(list(module.state_dict().values()), list(values.values()))
    assert list(tmp_path.iterdir()) == []


def test_opening_that_fails_leaves_everything_as_it_was() -> None:
    machine = fresh()
    module = counting()
    before = Left(module)
    allocated = here.allocated()
    refusals: list[Callable[[], Any]] = [
        lambda: fmstream.stream(module, memory="1KiB", device=here.name),
        lambda: fmstream.stream(module, memory="50%", device=f"{here.name}:7"),
        lambda: fmstream.stream(module, memory="50%", device="meta"),
    ]
    for refusal in refusals:
        with pytest.raises(fmstream.FmstreamError):
            refusal()
        before.check(module)
    assert here.allocated() == allocated
    assert machine.pinned.charged_bytes == 0


def test_many_handles_in_a_row_take_no_more() -> None:
    machine = fresh()
    module = mlp(8, WIDTH)
    figures = []
    for number in range(5):
        with torch.no_grad(), fmstream.stream(module, memory=budget(module), device=here.name):
            call(module, number)
        figures.append((here.allocated(), machine.pinned.charged_bytes, machine.pinned.peak_bytes))
    assert set(figures[1:]) == {figures[1]}
