"""torch.compile on a device: compiled blocks stream as units, a model compiled as a whole runs without the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import dropout, scaled_dot_product_attention, silu

import fmstream
from fmstream.emulator.backlog import Execution
from fmstream.errors import ConfigError
from tests.accelerator.cases import WIDTH, Block, x
from tests.accelerator.kit import ORDERS, equal, fresh, here, named, on_host, streaming, twin_on
from tests.clients.client import client
from tests.clients.diffusion import flux_forward
from tests.kit import assert_streams_fully, num_faults
from tests.kit_quantised import gguf, scaled, torchao, true_bytes

DEPTH = 6
FLUX = client("flux", flux_forward)
BACKENDS = ["eager", "aot_eager"]


class Pictures(nn.Module):
    """A convolution and a norm of groups, on the width's number taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return silu(self.norm(self.conv(x.view(-1, 8, 8, 8)))).view(x.shape)


class Trained(nn.Module):
    """Running statistics, and numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(self.norm(self.layer(x.flatten(0, 1))), 0.25, training=True).view(x.shape)


class Masked(nn.Module):
    """Attention with a mask made on the device, to fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.rest(x).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)


BLOCKS: list[Callable[[], nn.Module]] = [Block, Pictures, Trained, Masked]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graph of another test is there, and the counts begin at nothing."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Stack(nn.Sequential):
    """Has a forward of its own: the compiler does not begin with one of PyTorch's."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


def stack(block: Callable[[], nn.Module] = Block) -> Stack:
    """Some blocks in a row, that compute as they do in training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Stack(*(block() for _ in range(DEPTH)))


def compile_blocks(module: nn.Sequential, backend: str) -> None:
    """Each block by itself, without a break in its graph."""
    for block in module:
        block.compile(backend=backend, fullgraph=True)


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def steps(module: Callable[..., Any], count: int = 5) -> tuple[list[Tensor], list[int]]:
    """What some calls give, and the number of graphs after each; nothing waits in between."""
    torch.manual_seed(2)
    outputs, graphs = [], []
    for number in range(count):
        outputs.append(module(x(2, 4, WIDTH, seed=number)))
        graphs.append(num_graphs())
    return outputs, graphs


def check_steps(module: Callable[..., Any], twin: nn.Module) -> None:
    """Five steps give what the uncompiled twin gives, and no more graphs after the second."""
    found, graphs = steps(module)
    equal(on_host(found), on_host(steps(twin)[0]))
    assert graphs[1:] == [graphs[1]] * 4


# Blocks


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", BLOCKS)
def test_compiled_blocks_stream_as_units(block: Callable[[], nn.Module], backend: str, execution: Execution) -> None:
    fresh(execution)
    module = stack(block)
    twin = twin_on(module)
    with torch.no_grad():
        with streaming(module, edited=True) as handle:
            compile_blocks(module, backend)
            check_steps(module, twin)
            assert 1 <= num_graphs() <= 2  # gradients may be allowed or not
            assert num_faults(handle) == 0
            handle._session.settle_times()
            assert_streams_fully(handle)
        for kind in ("_parameters", "_buffers"):
            assert all(tensor.device.type == "cpu" for _, tensor in named(module, kind))
        equal([t for _, t in named(module, "_buffers")] or [torch.ones(1)], buffers_of(twin))


def buffers_of(module: nn.Module) -> list[Tensor]:
    return on_host([t for _, t in named(module, "_buffers")]) or [torch.ones(1)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_that_were_compiled_before(backend: str) -> None:
    fresh()
    module = stack()
    twin = twin_on(module)
    compile_blocks(module, backend)
    with torch.inference_mode(), streaming(module, edited=True) as handle:
        check_steps(module, twin)
        assert num_graphs() == 1
        handle._session.settle_times()
        assert_streams_fully(handle)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler hides it, but from "error"
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [Block, Trained])
def test_gradients_of_compiled_blocks(block: Callable[[], nn.Module], backend: str) -> None:
    fresh()
    module = stack(block)
    twin = twin_on(module)
    compile_blocks(module, backend)
    with streaming(module, edited=True, keeps=True):
        graphs = []
        for number in range(4):
            found = []
            for each in (module, twin):
                torch.manual_seed(number)
                found.append(each(x(2, 4, WIDTH, seed=number)))
                found[-1].square().sum().backward()
            equal(on_host(found[0]), on_host(found[1]))
            graphs.append(num_graphs())
        assert graphs[1:] == [graphs[1]] * 3
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        equal([ours.grad], on_host(theirs.grad))


@pytest.mark.parametrize("build", [scaled, torchao("Int8WeightOnlyConfig"), gguf("Q8_0")])
def test_quantised_layers_in_compiled_blocks(build: Callable[[], Any]) -> None:
    fresh()
    layers, twin = build(), build().to(here.name)
    module = nn.Sequential(*(layers[i : i + 2] for i in range(0, len(layers), 2)))
    memory = fmstream.smallest_memory(module) + true_bytes(module) // 4
    with torch.no_grad(), streaming(module, memory=memory, edited=True) as handle:
        for block in module:
            block.compile(backend="aot_eager")
        check_steps(module, twin)
        assert num_faults(handle) == 0
        handle._session.settle_times()
        assert_streams_fully(handle)


def test_diffusers_compiles_repeated_blocks() -> None:
    fresh()
    built, twin = FLUX.build(), FLUX.build()
    twin.modules.to(here.name)
    built.modules.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    with torch.no_grad(), streaming(built.modules, edited=True) as handle:
        outputs, graphs = [], []
        for _ in range(5):
            outputs.append(built.call(here.name))
            graphs.append(num_graphs())
        expected = on_host(twin.call(here.name))
        for output in outputs:
            equal(on_host(output), expected)
        assert graphs == [graphs[0]] * 5
        assert num_faults(handle) == 0
        handle._session.settle_times()
        assert_streams_fully(handle)
        del outputs, output


def test_a_failure_in_a_compiled_block_leaves_it_usable() -> None:
    fresh()
    module = stack()
    twin = twin_on(module)
    compile_blocks(module, "aot_eager")
    with torch.no_grad(), streaming(module, edited=True):
        steps(module, 2)
        with pytest.raises(RuntimeError):
            module[0](x(2, 4, WIDTH - 1))
        check_steps(module, twin)


# Whole models


def wrapped(module: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(module, backend="aot_eager", **options)


def within(module: nn.Module, **options: Any) -> Callable[..., Any]:
    module.compile(backend="aot_eager", **options)
    return module


def its_forward(module: nn.Module, **options: Any) -> Callable[..., Any]:
    module.forward = torch.compile(module.forward, backend="aot_eager", **options)  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("compile_it", [wrapped, within, its_forward])
def test_a_whole_model_runs_without_the_compiler_and_the_report_says_so(compile_it: Callable[..., Any]) -> None:
    fresh()
    module = stack()
    twin = twin_on(module)
    call = compile_it(module)
    with torch.no_grad(), streaming({"denoiser": call}, edited=True) as handle:
        check_steps(call, twin)
        assert num_graphs() == 0
        handle._session.settle_times()
        assert_streams_fully(handle)
        notes = [note for note in handle.report.notes if "compile its repeated blocks" in note]
        assert len(notes) == 1
        assert notes[0].startswith("denoiser is compiled as a whole")


def test_a_whole_model_as_one_graph_is_refused() -> None:
    fresh()
    module = stack()
    twin = twin_on(module)
    call = wrapped(module, fullgraph=True)
    with torch.no_grad(), streaming(module, edited=True):
        with pytest.raises(ConfigError, match="compile its repeated blocks instead"):
            call(x(2, 4, WIDTH))
        check_steps(module, twin)


def test_a_model_that_fits_is_compiled_as_ever() -> None:
    fresh()
    module = stack()
    twin = twin_on(module)
    call = within(module, fullgraph=True)
    with torch.no_grad(), fmstream.stream(module, memory="1GiB", device=here.name):
        check_steps(call, twin)
        assert num_graphs() >= 1
    here.check()


# The emulated device


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [Block, Masked, Pictures])
def test_a_graph_takes_as_long_as_the_same_calls(block: Callable[[], nn.Module], backend: str) -> None:
    machine = fresh()
    module = stack(block).to(here.name)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    seconds = []
    with torch.no_grad():
        for call in (module, compiled):
            call(x(2, 4, WIDTH))  # what is made once is made
            here.module.synchronize()
            began = machine.now
            call(x(2, 4, WIDTH))
            here.module.synchronize()
            seconds.append(machine.now - began)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.3)  # with other operators, such as `addmm` for a layer


def test_kernels_are_not_compiled_where_a_graph_breaks() -> None:
    class Breaking(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x / (1 + abs(x.sum().item()))

    fresh()
    module = stack(Breaking).to(here.name)
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, backend="aot_eager")
    with torch.no_grad():
        check_steps(compiled, twin)
    seen = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
    files = {code.co_filename for code in seen if code is not None}
    assert files
    assert not any("emulator" in file for file in files)
