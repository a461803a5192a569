"""The same on a card of NVIDIA's: twins, order under load, memory, undo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fmstream
from fmstream.actors.uploads import Uploads
from tests.accelerator.cases import CASES, WIDTH, Block, Case, Counting, call
from tests.accelerator.kit import POLICIES, Left, equal, here, named, on_host, stream_and_compare, streaming, twin_on
from tests.kit import assert_streams_fully, budget, mlp, noise, num_faults
from tests.kit_quantised import BUILDS, true_bytes
from tests.kit_runtime import Injected, map_weights

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
]

CYCLES = 2_000_000
"""About a millisecond of a card."""


@pytest.fixture(autouse=True)
def on_the_card() -> Iterator[None]:
    """The card, computing the same each time."""
    here.name = "cuda"
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # the library takes its workspace now
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    here.name = "emu"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_streamed_steps_equal_those_of_the_twin(case: Case, policy: str) -> None:
    stream_and_compare(case.build(), case.step, 5, 0.35, edited=case.edited, policy=policy)


QUANTISED = [param for param in BUILDS if param.id not in ("torchao-int8-dynamic", "torchao-float8-dynamic")]
"""Those whose products have no least number of rows on a card."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("build", QUANTISED)
def test_quantised_weights_stream(build: Any, policy: str) -> None:
    module, twin = build(), build().to(here.name)
    least = fmstream.smallest_memory(module)
    memory = least + (true_bytes(module) - least) // 3
    with torch.no_grad(), streaming(module, memory=memory, policy=policy) as handle:
        found = [call(module, number) for number in range(6)]
        for number, output in enumerate(found):
            equal(on_host(output), on_host(call(twin, number)))
        handle._session.settle_times()
        assert num_faults(handle) == 0
        assert_streams_fully(handle)
        del found, output


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_blocks_stream(backend: str) -> None:
    torch._dynamo.reset()
    module = nn.Sequential(*(Block() for _ in range(6))).eval()
    twin = twin_on(module)
    for part in (*module, *(twin if backend == "inductor" else ())):
        part.compile(backend=backend, fullgraph=True)
    with torch.no_grad(), streaming(module, edited=True, keeps=True) as handle:
        graphs = []
        for number in range(6):
            inputs = noise(2, 4, WIDTH, seed=number).to(here.name)
            equal(on_host(module(inputs)), on_host(twin(inputs)))
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[1:] == [graphs[1]] * 5
        handle._session.settle_times()
        assert_streams_fully(handle)
    torch._dynamo.reset()


def drowsy(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let the card sleep a while before copies and behind them, so that what does not wait is late or early."""
    generator = torch.Generator().manual_seed(seed)

    def sleep(stream: Any) -> None:
        cycles = int(torch.randint(0, CYCLES, (), generator=generator))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)

    enqueue, follow = Uploads._enqueue, Uploads._follow

    def slow_enqueue(loads: Uploads, *args: Any) -> Any:
        sleep(loads.device.copies)
        return enqueue(loads, *args)

    def slow_follow(loads: Uploads, *args: Any) -> None:
        follow(loads, *args)
        sleep(torch.cuda.current_stream())

    monkeypatch.setattr(Uploads, "_enqueue", slow_enqueue)
    monkeypatch.setattr(Uploads, "_follow", slow_follow)


@pytest.mark.parametrize("options", [{}, {"pinned": 0}, {"policy": "one_ahead"}], ids=["pinned", "staged", "one_ahead"])
@pytest.mark.parametrize("seed", range(3))
def test_order_holds_when_streams_are_late(seed: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    drowsy(monkeypatch, seed)
    stream_and_compare(mlp(8, 512, seed), lambda m, n: m(torch.ones(4, 512, device=here.name) * n), 20, **options)


def test_a_missing_wait_is_seen_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    drowsy(monkeypatch, 0)
    monkeypatch.setattr(Uploads, "_wait_for_uses", lambda *_: None)
    monkeypatch.setattr(Uploads, "_follow", lambda *_: None)
    module = mlp(8, 512)
    twin = twin_on(module)
    with torch.no_grad(), fmstream.stream(module, memory=budget(module, 0.2), device=here.name):
        found = [module(torch.ones(4, 512, device=here.name)) for _ in range(10)]
        expected = on_host(twin(torch.ones(4, 512, device=here.name)))
        assert not all(torch.equal(on_host(output)[0], expected[0]) for output in found)


@pytest.mark.parametrize("policy", POLICIES)
def test_peak_stays_within_the_memory(policy: str) -> None:
    module = mlp(16, 1024)
    memory = budget(module, 0.3)
    inputs = torch.ones(8, 1024, device=here.name)
    allocated = here.allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad(), streaming(module, memory=memory, policy=policy):
        for _ in range(5):
            module(inputs)
        peak = torch.cuda.max_memory_allocated()
    workspace = 64 << 20  # of the library of matrix products
    assert peak - allocated <= memory + 4 * inputs.numel() * 4 + workspace


@pytest.mark.parametrize("source", ["ram", "file", "spilled"])
def test_everything_is_as_it_was(source: str, tmp_path: Path) -> None:
    module: nn.Module = Counting()
    options: dict[str, Any] = {}
    if source == "file":
        map_weights(module, tmp_path / "w.safetensors")
    if source == "spilled":
        options["spill_dir"] = tmp_path
    before, values = Left(module), copy.deepcopy(dict(named(module, "_parameters")))

    def fail(*_args: Any) -> None:
        raise Injected

    with torch.no_grad(), fmstream.stream(module, memory=budget(module), device=here.name, **options):
        call(module, 0)
        hook = module.layers[3].register_forward_pre_hook(fail)
        with pytest.raises(Injected):
            call(module, 1)
        hook.remove()
        call(module, 2)
    before.check(module)
    equal([param for _, param in named(module, "_parameters")], list(values.values()))


def test_gradients_equal_the_twins() -> None:
    module = mlp(8, WIDTH)
    twin = twin_on(module)
    with streaming(module, keeps=True):
        for number in range(3):
            for part in (module, twin):
                call(part, number).square().sum().backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        equal([ours.grad], [theirs.grad.cpu()])
