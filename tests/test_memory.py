"""Bytes: those of fast memory are never more than given, host memory stays flat, and the report lists them all."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream.actors.prefetch import PrefetchActor
from fmstream.device.device import CpuDevice, CpuSlab
from fmstream.errors import ConfigError
from tests.kit import agree, budget, mlp, noise, same, streamed, streamed_bytes, weights_bytes
from tests.kit_runtime import ROOT, map_weights

X = noise(3, 64)


class Ledger:
    """Bytes of slabs that are alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = self.num = 0
        slab = CpuDevice.slab

        def counted(device: CpuDevice, num_bytes: int) -> Any:
            made = slab(device, num_bytes)
            assert isinstance(made, CpuSlab)
            self.num += 1
            self.now += made.num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(made, self._gone, made.num_bytes)
            return made

        monkeypatch.setattr(CpuDevice, "slab", counted)

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    return Ledger(monkeypatch)


def within(handle: fmstream.Stream, memory: int) -> None:
    """No pass used more than was given."""
    assert all(record.resident_bytes + record.window_bytes <= memory for record in handle.telemetry.passes)


def test_two_denoisers_in_turn_share_one_arena(ledger: Ledger) -> None:
    class Pipe:
        def __init__(self) -> None:
            self.components = {"high": mlp(8, 64), "low": mlp(8, 64, seed=1), "vae": mlp(3, 64, seed=2)}

        def __call__(self, x: Tensor) -> Tensor:
            for step in range(6):
                x = self.components["high" if step < 3 else "low"](x)
            return self.components["vae"](x)

    pipe, twin = Pipe(), Pipe()
    memory = budget(pipe, 0.2)
    with streamed(pipe, memory=memory) as handle:
        for _ in range(3):
            agree(pipe, twin, X)
        within(handle, memory)
    assert (ledger.num, ledger.peak <= memory) == (1, True)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.8])
def test_fast_memory_stays_within_bounds_whatever_happens(fraction: float, ledger: Ledger) -> None:
    module = mlp(8, 64)
    twin = copy.deepcopy(module)
    memory = budget(module, fraction)
    order = random.Random(4)

    def fail(*_args: Any) -> None:
        raise LookupError

    with streamed(module, memory=memory, edited=True) as handle:
        for _ in range(30):
            agree(module, twin, X)
            at = 2 * order.randrange(8)
            if order.random() < 0.3:
                hook = module[at].register_forward_hook(fail)
                with pytest.raises(LookupError), torch.no_grad():
                    module(X)
                hook.remove()
            if order.random() < 0.3:
                for part in (module, twin):
                    part[at].weight = nn.Parameter(part[at].weight.detach().clone())
            same(module[at].weight.clone(), twin[at].weight)
        within(handle, memory)
    gc.collect()
    assert ledger.peak <= memory
    assert ledger.now == 0


def test_a_slab_that_is_looked_into_after_the_pass_is_the_only_second_one(ledger: Ledger) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(8, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layers(x), self.layers[6].weight.detach()[0]

    module = Returning().eval()
    twin = copy.deepcopy(module)
    memory = budget(module)
    with streamed(module, memory=memory):
        kept = [agree(module, twin, X)[1] for _ in range(8)]
    for row in kept:
        same(row, twin.layers[6].weight[0])
    assert ledger.num <= 2
    kept.clear()
    del row
    gc.collect()
    assert ledger.now == 0


def test_nothing_stays_in_fast_memory_after_a_run(ledger: Ledger) -> None:
    module = mlp(8, 64)
    with torch.no_grad():
        expected = module(X)
        result = fmstream.run(module, X, memory=budget(module))
    same(result.output, expected)
    gc.collect()
    assert ledger.num == 1
    assert ledger.now == 0


def test_a_failed_opening_takes_no_fast_memory(ledger: Ledger) -> None:
    with pytest.raises(fmstream.MemoryBudgetError):
        fmstream.stream(mlp(), memory=100)
    assert ledger.num == 0


def test_the_report_adds_up_to_the_weights(tmp_path: Path) -> None:
    in_files, in_ram = map_weights(mlp(6, 64), tmp_path / "w.safetensors"), mlp(6, 64, seed=1)
    in_ram[0].weight = nn.Parameter(in_ram[0].weight.detach().to_sparse())
    modules = {"files": in_files, "ram": in_ram}
    memory = 60_000
    with fmstream.stream(modules, memory=memory) as handle, torch.no_grad():
        for _ in range(3):
            in_files(X)
        report = handle.report
    assert report.file_bytes == weights_bytes(in_files)
    assert report.kept_bytes > 0
    assert report.weights_bytes == report.file_bytes + report.ram_bytes + report.kept_bytes
    assert report.memory_bytes == memory
    assert report.smallest_bytes <= memory
    text = str(report)
    assert all(word in text for word in ("memory", "weights"))
    assert min(report.file_bytes, report.ram_bytes, report.kept_bytes, report.peak_rss_bytes) >= 0


@pytest.mark.parametrize("available", [0, 1, 1 << 40])
def test_automatic_memory_with_no_free_memory_reported(available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    module = mlp(8, 64)
    twin = copy.deepcopy(module)
    with fmstream.stream(module, memory="auto") as handle:
        agree(module, twin, X, times=3)
        assert fmstream.smallest_memory(twin) <= handle.report.memory_bytes <= weights_bytes(twin)
        assert (streamed_bytes(handle) > 0) == (available < 2)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "meta", "nonsense"])
def test_a_device_that_is_not_there_is_refused_before_anything_changes(device: str) -> None:
    module = mlp()
    params = list(module.parameters())
    with pytest.raises(ConfigError, match=device):
        fmstream.stream(module, memory=budget(module), device=device)
    assert all(a is b for a, b in zip(params, module.parameters(), strict=True))
    assert not torch.cuda.is_initialized()


def test_many_small_parameters_are_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    submit = PrefetchActor.submit

    def counted(actor: PrefetchActor, ticket: int, pieces: Any, keep: object, name: str) -> None:
        asked.append(name)
        submit(actor, ticket, pieces, keep, name)

    monkeypatch.setattr(PrefetchActor, "submit", counted)

    class Many(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.rows = nn.ParameterList(noise(16, seed=100 * seed + row) / 8 for row in range(64))
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            for row in self.rows:
                x = x + row
            return self.linear(x)

    module = nn.Sequential(*(Many(seed) for seed in range(8))).eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, noise(2, 16), times=3)
        asked.clear()
        agree(module, twin, noise(2, 16), times=4)
    assert 0 < len(asked) <= 4 * 16


@pytest.mark.parametrize("policy", ["overlap_async", "one_ahead", "sync"])
@pytest.mark.parametrize("in_file", [True, False])
def test_what_is_streamed_is_moved_once(policy: str, in_file: bool, tmp_path: Path) -> None:
    module = mlp(8, 64)
    if in_file:
        map_weights(module, tmp_path / "w.safetensors")
    twin = copy.deepcopy(module)
    with streamed(module, policy=policy) as handle:
        agree(module, twin, X, times=5)
        executor = handle._session._executor
        assert executor is not None
        executor.settle()
        issued = streamed_bytes(handle) + executor.streamed_bytes + executor.resident_bytes
        assert streamed_bytes(handle) <= handle.telemetry.link_bytes <= issued


def measure(code: str, *args: str, **environment: str) -> str:
    """What a script prints that runs alone, so that no other test's memory is counted."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


HOST = """
    import gc, sys, psutil, torch
    import fmstream
    from torch import nn
    from tests.kit_runtime import map_weights

    def rss():
        gc.collect()
        return psutil.Process().memory_info().rss

    make = lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(50)))
    with torch.no_grad():
        x = torch.ones(1, 1024)
        small = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
        with fmstream.stream(small, memory=6 << 20) as handle:
            handle(x), handle(x)
        base = rss()
        module = make()
        total = sum(p.numel() * p.element_size() for p in module.parameters())
        expected = module(x)
        memory = total // 10
        for _ in range(3):
            with fmstream.stream(module, memory=memory) as handle:
                opened = rss() - base
                for _ in range(3):
                    assert torch.equal(module(x), expected)
                streamed = rss() - base
            closed = rss() - base
            print(opened / total, streamed / total, closed / total)
"""


def test_host_memory_after_opening_streaming_and_closing_is_that_of_the_model() -> None:
    lines = [[float(value) for value in line.split()] for line in measure(HOST).splitlines()]
    assert len(lines) == 3
    for opened, streaming, closed in lines:
        assert opened <= 1.1
        assert streaming <= 1.2 + 0.05  # the arena is a tenth of the weights, and lies in RAM too
        assert closed <= 1.1
    assert abs(lines[2][2] - lines[0][2]) <= 0.05


def test_a_machine_that_hides_its_accelerators_streams() -> None:
    code = """
        import copy, torch, fmstream
        from tests.kit import agree, budget, mlp, noise
        module = mlp()
        twin = copy.deepcopy(module)
        for _ in range(2):
            with fmstream.stream(module, memory=budget(module)) as handle:
                agree(module, twin, noise(2, 32), times=3)
                assert handle.report.device == "cpu"
        print(torch.cuda.is_initialized())
        """
    assert measure(code, CUDA_VISIBLE_DEVICES="") == "False\n"
