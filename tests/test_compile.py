"""torch.compile: compiled blocks stream as units, compiled models run without the compiler, and no graph is wrong."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fmstream
from fmstream.doors.stream import Stream
from fmstream.errors import ConfigError, MemoryBudgetError
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bound
from fmstream.payloads.seam import Seam
from tests.clients.client import client
from tests.clients.diffusion import flux_forward
from tests.kit import agree, assert_streams_fully, budget, check_frames, noise, num_faults, same, same_state

X = noise(4, 64)
FLUX = client("flux", flux_forward)
BACKENDS = ["eager", "aot_eager"]


class Block(nn.Module):
    """Several modules and a parameter of its own."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * self.gate


class Net(nn.Module):
    """Blocks between two layers, and a parameter of its own."""

    def __init__(self, depth: int = 6, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.place = nn.Parameter(torch.linspace(-1, 1, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graph of another test is there, and the counts begin at nothing."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net().eval()


@contextmanager
def streamed(modules: Any, fraction: float = 0.3, **options: Any) -> Iterator[Stream]:
    """Stream for the body; afterwards nothing of it is left in the modules."""
    memory = options.pop("memory", None) or budget(modules, fraction)
    roots = list(modules.values()) if isinstance(modules, Mapping) else [modules]
    inside = [module for root in roots for module in root.modules()]
    before = [module.__dict__.get("_compiled_call_impl") for module in inside]
    keys = [set(module.__dict__) for module in inside]
    with fmstream.stream(modules, memory=memory, **options) as handle:
        yield handle
        check_frames(handle)
        within = [module.__dict__.get("_compiled_call_impl") for module in inside]
    for module, found, present, names in zip(inside, before, within, keys, strict=True):
        # What the body compiled stays; else what was found is there again.
        assert module.__dict__.get("_compiled_call_impl") is (_call_of(present) if present is not None else found)
        assert set(module.__dict__) - names <= {"_compiled_call_impl", "forward", "_is_torch_compile"}
        assert not any(isinstance(param, Absent | Bound) for param in module._parameters.values())


def _call_of(call: Any) -> Any:
    """What a seam stands before, None if that is the module's own call."""
    if not isinstance(call, Seam):
        return call
    return call.plain if hasattr(call.plain, "_torchdynamo_orig_callable") else None


def compile_blocks(net: Net, backend: str, **options: Any) -> None:
    for block in net.blocks:
        block.compile(backend=backend, **options)


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def num_frames() -> int:
    """Frames that the compiler looked at, again where a guard failed."""
    return sum(counters["frames"].values())


def check_steps(module: Any, twin: nn.Module, x: Tensor = X) -> None:
    """Warm up, then five steps make no graph and no frame more."""
    agree(module, twin, x, times=2)
    before = (num_graphs(), num_frames())
    agree(module, twin, x, times=5)
    assert (num_graphs(), num_frames()) == before


# Blocks


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_blocks_stream_as_units_with_one_graph_for_all(net: Net, backend: str) -> None:
    twin = copy.deepcopy(net)
    compile_blocks(net, backend, fullgraph=True)
    with streamed(net, 0.3) as handle:
        check_steps(net, twin)
        assert num_graphs() == 1
        assert num_faults(handle) == 0
        assert_streams_fully(handle)
        assert not handle.telemetry.notes
    agree(net, twin, X)
    assert num_graphs() == 1  # its own parameters need no other


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_may_be_compiled_while_they_stream(net: Net, backend: str) -> None:
    twin = copy.deepcopy(net)
    with streamed(net, 0.3) as handle:
        agree(net, twin, X, times=2)
        compile_blocks(net, backend, fullgraph=True)
        check_steps(net, twin)
        assert num_graphs() == 1
        assert_streams_fully(handle)
    assert all(hasattr(block._compiled_call_impl, "_torchdynamo_orig_callable") for block in net.blocks)
    agree(net, twin, X)


def test_block_is_uncompiled_while_it_streams(net: Net) -> None:
    twin = copy.deepcopy(net)
    compile_blocks(net, "eager")
    with streamed(net, 0.3) as handle:
        agree(net, twin, X, times=2)
        for block in net.blocks:
            del block.__dict__["_compiled_call_impl"]
        agree(net, twin, X, times=3)
        assert_streams_fully(handle)


@pytest.mark.parametrize("how", ["wrapper", "forward"])
def test_block_compiled_by_torch_compile_is_a_unit(net: Net, how: str) -> None:
    twin = copy.deepcopy(net)
    for index, block in enumerate(net.blocks):
        if how == "wrapper":
            net.blocks[index] = torch.compile(block, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
        else:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    with streamed(net, 0.3) as handle:
        check_steps(net, twin)
        assert num_graphs() == 1
        assert num_faults(handle) == 0
        assert_streams_fully(handle)


def test_class_with_a_compiled_forward(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = copy.deepcopy(net)
    monkeypatch.setattr(Block, "forward", torch.compile(Block.forward, backend="aot_eager"))
    with streamed(net, 0.3) as handle:
        check_steps(net, twin)
        assert num_graphs() == 1
        assert_streams_fully(handle)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # what the backend imports
def test_inductor(net: Net) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("there is no C++ compiler")
    twin = copy.deepcopy(net)
    compile_blocks(net, "inductor", fullgraph=True)
    compile_blocks(twin, "inductor", fullgraph=True)
    with streamed(net, 0.3) as handle:
        check_steps(net, twin)
        assert num_graphs() == 1  # the twin's as well
        assert_streams_fully(handle)


def test_shapes_that_change_recompile_as_they_do_without_streaming(net: Net) -> None:
    twin = copy.deepcopy(net)
    compile_blocks(net, "aot_eager")
    with streamed(net, 0.3):
        for batch in (2, 3, 4, 5, 6):
            agree(net, twin, noise(batch, 64), times=2)
        assert num_graphs() == 2  # one for the first size, one for any


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler hides it, but from "error"
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_compiled_blocks(net: Net, backend: str) -> None:
    twin = copy.deepcopy(net)
    compile_blocks(net, backend)
    with streamed(net, 0.4):
        for step in range(4):
            ours, theirs = net(X), twin(X)
            same(ours, theirs)
            ours.square().sum().backward()
            theirs.square().sum().backward()
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                assert p.grad is not None
                assert torch.equal(p.grad, q.grad)
            if step == 1:
                before = (num_graphs(), num_frames())
        assert (num_graphs(), num_frames()) == before
        assert num_graphs() == 1
    same_state(net, twin)


def test_write_within_a_compiled_block_reaches_the_master(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        self.gate.mul_(1.5)
        return x * self.gate + self.up(x)

    monkeypatch.setattr(Block, "forward", forward)
    twin = copy.deepcopy(net)
    compile_blocks(net, "aot_eager")
    with streamed(net, 0.3):
        agree(net, twin, X, times=4)
        same_state(net, twin)
    same_state(net, twin)


def test_compiled_block_with_a_graph_break_and_hooks_inside(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x)

    monkeypatch.setattr(Block, "forward", forward)
    calls = []
    for block in net.blocks:
        block.up.register_forward_hook(lambda module, args, out: calls.append(1) or out + 1)
    twin = copy.deepcopy(net)
    compile_blocks(net, "aot_eager")
    with streamed(net, 0.3) as handle:
        check_steps(net, twin)
        assert num_faults(handle) == 0
    assert calls


def test_failure_in_a_compiled_block_leaves_it_usable(net: Net) -> None:
    twin = copy.deepcopy(net)
    compile_blocks(net, "aot_eager")
    with streamed(net, 0.3):
        agree(net, twin, X, times=2)
        with pytest.raises(RuntimeError), torch.no_grad():
            net.blocks[0](noise(4, 63))
        agree(net, twin, X, times=3)


def test_compiled_block_must_fit_as_a_whole(net: Net) -> None:
    least = fmstream.smallest_memory(net)
    net.blocks[0].compile(backend="eager")
    with pytest.raises(MemoryBudgetError, match=r"'blocks\.0' must be in memory as a whole"):
        fmstream.stream(net, memory=least)


def test_diffusers_compiles_repeated_blocks() -> None:
    built, twin = FLUX.build(), FLUX.build()
    built.modules.compile_repeated_blocks(backend="eager")
    with streamed(built.modules, 0.3) as handle, torch.no_grad():
        for step in range(6):
            same(built.call(), twin.call())
            if step == 1:
                graphs = num_graphs()
        assert num_graphs() == graphs > 0
        assert_streams_fully(handle)


# Whole models


def wrapped(net: Net, **options: Any) -> Callable[..., Any]:
    return torch.compile(net, backend="aot_eager", **options)


def within(net: Net, **options: Any) -> Callable[..., Any]:
    net.compile(backend="aot_eager", **options)
    return net


def its_forward(net: Net, **options: Any) -> Callable[..., Any]:
    net.forward = torch.compile(net.forward, backend="aot_eager", **options)  # type: ignore[method-assign]
    return net


def a_caller(net: Net, **options: Any) -> Callable[..., Any]:
    return torch.compile(lambda x: net(x) * 1.0, backend="aot_eager", **options)


WHOLE = [wrapped, within, its_forward, a_caller]


@pytest.mark.parametrize("compile_it", WHOLE)
@pytest.mark.parametrize("when", ["before", "after"])
def test_whole_model_runs_without_the_compiler(net: Net, compile_it: Callable[..., Any], when: str) -> None:
    twin = copy.deepcopy(net)
    call: Callable[..., Any] = compile_it(net) if when == "before" else net
    with streamed(net, 0.3) as handle:
        if when == "after":
            call = compile_it(net)
        check_steps(call, twin)
        assert_streams_fully(handle)
    same_state(net, twin)
    agree(call, twin, X)
    assert num_graphs() > 0  # it is compiled again


@pytest.mark.parametrize("compile_it", [wrapped, within, its_forward])
def test_report_says_that_a_model_runs_without_the_compiler(net: Net, compile_it: Callable[..., Any]) -> None:
    call = compile_it(net)
    with streamed({"denoiser": call}, 0.3) as handle, torch.no_grad():
        call(X)
        notes = [note for note in handle.report.notes if "compile its repeated blocks" in note]
        assert len(notes) == 1
        assert notes[0].startswith("denoiser is compiled as a whole")


def test_wrapper_is_handed_over(net: Net) -> None:
    twin = copy.deepcopy(net)
    call = wrapped(net, fullgraph=True)
    with streamed(call, 0.3) as handle:
        check_steps(call, twin)
        assert_streams_fully(handle)
        with torch.no_grad():
            same(net(X), twin(X))
    agree(call, twin, X)


def test_hooks_of_a_wrapper_are_called(net: Net) -> None:
    twin = copy.deepcopy(net)
    call = wrapped(net)
    call.register_forward_hook(lambda module, args, out: out + 1)  # type: ignore[attr-defined]
    with streamed(call, 0.3) as handle, torch.no_grad():
        for _ in range(4):
            same(call(X), twin(X) + 1)
        assert_streams_fully(handle)


@pytest.mark.parametrize("compile_it", [wrapped, a_caller])
def test_full_graph_of_what_streams_is_refused(net: Net, compile_it: Callable[..., Any]) -> None:
    twin = copy.deepcopy(net)
    call = compile_it(net, fullgraph=True)
    with streamed(net, 0.3), torch.no_grad():
        with pytest.raises((ConfigError, torch._dynamo.exc.Unsupported), match="compile its repeated blocks instead"):
            call(X)
        agree(net, twin, X, times=3)
    agree(call, twin, X)


def test_full_graph_of_a_wrapped_model_is_a_config_error(net: Net) -> None:
    call = wrapped(net, fullgraph=True)
    with (
        streamed(net, 0.3),
        torch.no_grad(),
        pytest.raises(ConfigError, match=r"Net streams, so it cannot be one graph.*fullgraph=True out"),
    ):
        call(X)


@pytest.mark.parametrize("compile_it", [wrapped, within, its_forward])
def test_model_that_fits_is_compiled_as_ever(net: Net, compile_it: Callable[..., Any]) -> None:
    twin = copy.deepcopy(net)
    call = compile_it(net, fullgraph=True)
    with fmstream.stream(call, memory=None) as handle:
        check_steps(call, twin)
        assert num_graphs() == 1
        assert not any("without the compiler" in note for note in handle.telemetry.notes)


@pytest.mark.parametrize("compile_it", [within, its_forward])
def test_small_root_beside_a_large_one_is_compiled(net: Net, compile_it: Callable[..., Any]) -> None:
    small = Net(depth=1, width=8).eval()
    twin, small_twin = copy.deepcopy(net), copy.deepcopy(small)
    small_call = compile_it(small)
    with streamed({"large": net, "small": small}, 0.9) as handle:
        for _ in range(3):
            agree(net, twin, X)
            agree(small_call, small_twin, noise(2, 8))
        assert num_graphs() == 1
        assert num_faults(handle) == 0


def test_function_compiled_within_a_forward_does_not_look_into_what_streams(net: Net) -> None:
    twin = copy.deepcopy(net)

    def middle(x: Tensor) -> Tensor:
        return net.blocks[2](x * 2) + net.blocks[3].up.weight.sum() + net.leave.bias

    helper = torch.compile(middle, backend="aot_eager")
    net.blocks[1].register_forward_hook(lambda module, args, out: helper(out))
    twin.blocks[1].register_forward_hook(
        lambda module, args, out: twin.blocks[2](out * 2) + twin.blocks[3].up.weight.sum() + twin.leave.bias
    )
    with streamed(net, 0.5, memory=170_000):
        agree(net, twin, X, times=4)
        before = (num_graphs(), num_frames())
        agree(net, twin, X, times=5)
        assert (num_graphs(), num_frames()) == before


def test_disabled_module_streams_as_any_other(net: Net) -> None:
    twin = copy.deepcopy(net)
    net.blocks[0].forward = torch.compiler.disable(net.blocks[0].forward)  # type: ignore[method-assign]
    with streamed(net, 0.3) as handle:
        agree(net, twin, X, times=4)
        assert_streams_fully(handle)
