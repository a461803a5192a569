"""Quantised weights on a device: shells stand for wrappers, and what is shown of a subclass is dressed as it is."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fmstream
from fmstream.doors.stream import Stream
from fmstream.emulator.backlog import Execution
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bound
from fmstream.payloads.kinds import is_dressed, is_wrapper
from tests.accelerator.cases import call
from tests.accelerator.kit import ORDERS, POLICIES, Left, equal, fresh, here, on_host, streaming
from tests.kit import assert_streams_fully, mlp, num_faults, same
from tests.kit_quantised import (
    BUILDS,
    WIDTH,
    Hidden,
    Scaled,
    Tenths,
    as_plain,
    gguf,
    nested,
    scaled,
    tensors_in,
    tenths,
    torchao,
    true_bytes,
)
from tests.kit_runtime import FailAt, Injected

Build = Callable[[], nn.Module]
WRAPPERS = [pytest.param(scaled, id="wrapper"), pytest.param(torchao("Int8WeightOnlyConfig"), id="torchao-int8")]
KINDS = [*WRAPPERS, pytest.param(nested, id="nested"), pytest.param(gguf("Q8_0"), id="gguf")]


def part_way(module: nn.Module, fraction: float) -> int:
    """Memory between the least that works and all weights, whose bytes the dtypes of wrappers do not tell."""
    least = fmstream.smallest_memory(module)
    gc.collect(1)
    return least + int(fraction * (true_bytes(module) - least))


def on_device(module: nn.Module) -> nn.Module:
    """The unstreamed twin."""
    return module.to(here.name)


@contextmanager
def streamed(module: nn.Module, fraction: float = 0.35, **options: Any) -> Iterator[Stream]:
    """Stream to the device; afterwards the same objects with the same inner tensors are there, on the CPU."""
    before = [weakref.ref(tensor) for tensor in all_tensors(module)]  # who holds a tensor may write it
    memory = options.pop("memory", None) or part_way(module, fraction)
    with streaming(module, memory=memory, **options) as handle:
        yield handle
    after = all_tensors(module)
    assert len(after) == len(before)
    assert all(tensor is known() for tensor, known in zip(after, before, strict=True))
    assert_on_host(module)


def all_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters, each with the tensors in it."""
    return [tensor for param in module.parameters() for tensor in (param, *tensors_in(param))]


def assert_on_host(module: nn.Module) -> None:
    """There is nothing of a handle's in the parameters, and nothing on the device."""
    for tensor in all_tensors(module):
        assert tensor.device.type == "cpu"
        assert not isinstance(tensor, Absent | Bound)
        assert not {"shell", "detach", "master"} & tensor.__dict__.keys()


def agree(module: nn.Module, twin: nn.Module, times: int = 3) -> None:
    """Both give the same, without a wait of ours in between."""
    with torch.no_grad():
        expected = [on_host(call(twin, number)) for number in range(times)]
        found = [call(module, number) for number in range(times)]
    for ours, theirs in zip(found, expected, strict=True):
        equal(on_host(ours), theirs)


# Twins


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("build", BUILDS)
def test_streamed_steps_equal_those_of_the_twin(build: Build, execution: Execution) -> None:
    settings = (
        list(zip(POLICIES, (0.35, 0.0, 0.75), strict=True)) if execution == "eager" else [("overlap_async", 0.35)]
    )
    for policy, fraction in settings:
        fresh(execution)
        module, twin = build(), on_device(build())
        with streamed(module, fraction, policy=policy) as handle:
            agree(module, twin, 6)
            handle._session.settle_times()
            assert handle.telemetry.kept_bytes == 0
            assert handle.telemetry.weights_bytes == true_bytes(twin)
            assert num_faults(handle) == 0
            assert not handle._session.weights._exposed  # nothing is brought anew at each pass
            assert_streams_fully(handle)


@pytest.mark.parametrize("where", ["staged", "spilled", "files"])
@pytest.mark.parametrize("build", KINDS)
def test_wherever_masters_lie(build: Build, where: str, tmp_path: Path, machine: Any) -> None:
    module, twin = build(), on_device(build())
    options: dict[str, Any] = {}
    if where == "staged":
        options["pinned"] = 0
    elif where == "spilled":
        options["spill_dir"] = tmp_path
    else:
        show_file(module, tmp_path / "w.safetensors")
    with streamed(module, **options) as handle:
        agree(module, twin, 5)
        handle._session.settle_times()
        assert_streams_fully(handle)
    agree(on_device(module), twin)


def show_file(module: nn.Module, path: Path) -> None:
    """Write all tensors to a file, and let them show it."""
    with torch.no_grad():
        held = {str(number): tensor for number, tensor in enumerate(all_tensors(module)) if not is_wrapper(tensor)}
        save_file({key: tensor.data.as_subclass(Tensor) for key, tensor in held.items()}, path)
        for key, mapped in load_file(path).items():
            held[key].data = mapped


def test_all_of_it_fits(machine: Any) -> None:
    module, twin = torchao("Int8WeightOnlyConfig")(), on_device(torchao("Int8WeightOnlyConfig")())
    with fmstream.stream(module, memory=2 * true_bytes(module), device=here.name) as handle:
        agree(module, twin)
        handle._session.settle_times()
        assert handle.telemetry.passes[-1].streamed_bytes == 0
    here.check()


def test_memory_that_is_found_out(machine: Any) -> None:
    module, twin = scaled(), on_device(scaled())
    with fmstream.stream(module, device=here.name) as handle:
        agree(module, twin, 6)
        assert num_faults(handle) == 0
    here.check()


def test_gradients_of_inputs_pass_through(machine: Any) -> None:
    module, twin = torchao("Int8WeightOnlyConfig")(), on_device(torchao("Int8WeightOnlyConfig")())
    with streamed(module, keeps=True) as handle:
        for seed in range(4):
            found = []
            for each in (module, twin):
                x = torch.ones(3, WIDTH, device=here.name).mul_(seed + 1).requires_grad_()
                each(x).square().sum().backward()
                found.append(x.grad)
            equal(on_host(found[0]), on_host(found[1]))
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            if theirs.requires_grad:
                equal(on_host(ours.grad), on_host(theirs.grad))
        assert_streams_fully(handle)


# What is shown


@pytest.mark.parametrize("build", BUILDS)
def test_what_is_shown_answers_as_the_parameter_on_the_device_does(build: Build, machine: Any) -> None:
    module, twin = build(), on_device(build())
    with streamed(module) as handle:
        agree(module, twin, 2)
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            assert type(ours) is type(theirs) if is_wrapper(theirs) else isinstance(ours, type(theirs))
            assert isinstance(ours, nn.Parameter)
            assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
            assert ours.requires_grad == theirs.requires_grad
            for name in ("quant_type", "quant_shape", "kind", "block_size"):
                assert getattr(ours, name, None) == getattr(theirs, name, None)
        assert num_faults(handle) == 0


@pytest.mark.parametrize("build", BUILDS)
def test_reads_outside_a_forward_see_the_truth_on_the_device(build: Build, machine: Any) -> None:
    module, twin = build(), on_device(build())
    with streamed(module, keeps=True) as handle, torch.no_grad():
        agree(module, twin, 2)
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            for reading in ("dequantize", "plain"):
                if hasattr(type(theirs), reading) and type(theirs) is not nn.Parameter:
                    read = getattr(ours, reading)()
                    assert read.device.type == here.name
                    equal(on_host(read), on_host(getattr(theirs, reading)()))
        assert num_faults(handle) > 0 or type(next(twin.parameters())).__name__ == "GGUFParameter"


@pytest.mark.parametrize("build", [p for p in BUILDS if "gguf" not in str(p.id) and p.id != "subclass"])
def test_copies_lie_on_the_host_and_are_independent(build: Build, machine: Any) -> None:
    module, twin, plain = build(), on_device(build()), build()
    with streamed(module) as handle:
        agree(module, twin, 2)
        copied = copy.deepcopy(module)
        assert num_faults(handle) == 0
        for ours, theirs in zip(copied.parameters(), plain.parameters(), strict=True):
            assert type(ours) is type(theirs)
            assert ours.device.type == "cpu"
            assert ours.__dict__.keys() == theirs.__dict__.keys()
            same(as_plain(ours), as_plain(theirs))
        with torch.no_grad():
            for param in copied.parameters():
                for tensor in tensors_in(param):
                    tensor.zero_()
        agree(module, twin)


@pytest.mark.parametrize("build", BUILDS)
def test_state_dicts_are_saved_from_the_host(build: Build, machine: Any) -> None:
    module, twin, plain = build(), on_device(build()), build()
    with streamed(module):
        agree(module, twin, 2)
        state, expected = module.state_dict(), plain.state_dict()
        assert list(state) == list(expected)
        saved = {}
        for key, value in expected.items():
            if is_dressed(value):
                continue  # these have no way to be saved
            file = io.BytesIO()
            torch.save(state[key], file)
            saved[key] = file.getvalue()
    for key, content in saved.items():
        loaded = torch.load(io.BytesIO(content), weights_only=False)
        assert type(loaded) is type(expected[key])
        assert loaded.device.type == "cpu"
        same(as_plain(loaded), as_plain(expected[key]))


@pytest.mark.parametrize("build", WRAPPERS)
def test_what_was_detached_outlives_the_handle(build: Build, machine: Any) -> None:
    module, plain = build(), build()
    with streamed(module, keeps=True):
        with torch.no_grad():
            call(module, 0)
        detached = module[0].weight.detach()  # type: ignore[operator]
        assert type(detached) is type(plain[0].weight)
        assert not isinstance(detached, nn.Parameter)
        assert detached.device.type == here.name
    copied = copy.deepcopy(detached.detach())
    assert copied.device.type == "cpu"
    same(as_plain(copied), as_plain(plain[0].weight))  # type: ignore[arg-type]


# Writes


@pytest.mark.parametrize("build", [scaled, nested])
def test_writes_reach_the_tensors_in_the_users_wrapper(build: Build, machine: Any) -> None:
    module, twin = build(), on_device(build())
    with streamed(module):
        agree(module, twin)
        with torch.no_grad():
            for each in (module, twin):
                each[0].weight.mul_(2.0) if build is scaled else each[0].weight.scale.scale.mul_(2.0)  # type: ignore
                each[2].weight.numbers.neg_()  # type: ignore[union-attr, operator]
        agree(module, twin)
    agree(on_device(module), twin)


def test_a_write_within_a_forward_reaches_the_wrapper(machine: Any) -> None:
    def grow(layer: Any, args: Any) -> None:
        layer.weight.mul_(1.25)

    module, twin = scaled(), on_device(scaled())
    for each in (module, twin):
        each[4].register_forward_pre_hook(grow)
    with streamed(module):
        agree(module, twin, 5)
    agree(on_device(module), twin)


def test_a_write_to_a_subclass_reaches_its_bytes(machine: Any) -> None:
    module, twin = tenths(), on_device(tenths())
    with streamed(module):
        agree(module, twin)
        with torch.no_grad():
            for each in (module, twin):
                each[0].weight.neg_()  # type: ignore[operator]
        agree(module, twin)
    agree(on_device(module), twin)


@pytest.mark.parametrize("build", WRAPPERS)
def test_a_state_dict_is_loaded(build: Build, machine: Any) -> None:
    module, twin, other = build(), on_device(build()), build()
    with torch.no_grad():
        for param in other.parameters():
            for tensor in tensors_in(param) or [param]:
                if tensor.is_floating_point():
                    tensor.mul_(1.5)
    with streamed(module) as handle:
        agree(module, twin)
        for each in (module, twin):
            each.load_state_dict(other.state_dict())
        agree(module, twin, 4)
        handle._session.settle_times()
        assert_streams_fully(handle)
    agree(on_device(module), twin)


@pytest.mark.parametrize("where", ["host", "device", "of the module"])
def test_an_inner_tensor_that_the_user_replaces_is_used(where: str, machine: Any) -> None:
    module, twin = scaled(), on_device(scaled())
    own = module[0].weight
    with fmstream.stream(module, memory=part_way(module, 0.3), device=here.name) as handle:
        agree(module, twin)
        value = twin[0].weight.scale * 3  # type: ignore[union-attr, operator]
        twin[0].weight.scale = value  # type: ignore[union-attr]
        given = {"host": value.cpu(), "device": value.clone(), "of the module": module[0].weight.scale * 3}[where]  # type: ignore
        module[0].weight.scale = given  # type: ignore[union-attr]
        del given
        agree(module, twin, 5)
        handle._session.settle_times()
        assert_streams_fully(handle)
    assert module[0].weight is own
    assert not isinstance(own.scale, Absent | Bound)  # type: ignore[union-attr]
    assert own.scale.device.type == "cpu"  # type: ignore[union-attr]
    agree(on_device(module), twin)


def test_writes_to_a_wrapper_that_the_user_holds_are_seen(machine: Any) -> None:
    module, twin = scaled(), on_device(scaled())
    held, scale = module[0].weight, module[2].weight.scale  # type: ignore[union-attr]
    with streamed(module):
        agree(module, twin)
        with torch.no_grad():
            for each in (held, twin[0].weight):
                each.scale.data.mul_(2)  # type: ignore[union-attr, operator]
            for each in (scale, twin[2].weight.scale):  # type: ignore[union-attr]
                each.data.mul_(3)
        agree(module, twin)
    agree(on_device(module), twin)


@pytest.mark.parametrize("build", WRAPPERS)
def test_a_module_that_is_moved_meanwhile_comes_back(build: Build, machine: Any) -> None:
    module, twin = build(), on_device(build())
    own = [id(param) for param in module.parameters() if is_wrapper(param)]
    with fmstream.stream(module, memory=part_way(module, 0.3), device=here.name):
        agree(module, twin)
        module.to(here.name)
        agree(module, twin)
    assert [id(param) for param in module.parameters() if is_wrapper(param)] == own
    assert_on_host(module)
    agree(on_device(module), twin)


# Which wrapper is where


def test_a_shared_wrapper_is_streamed_once(machine: Any) -> None:
    def build() -> nn.Module:
        module = scaled()
        module[6].weight = module[0].weight  # type: ignore[union-attr]
        return module

    module, twin = build(), on_device(build())
    with streamed(module) as handle:
        agree(module, twin, 5)
        assert module[6].weight is module[0].weight
        assert handle.telemetry.weights_bytes == true_bytes(twin)
        assert_streams_fully(handle)


@pytest.mark.parametrize("how", ["shown", "detached"])
def test_a_shell_that_is_put_into_another_module_leaves_no_trace(how: str, machine: Any) -> None:
    module, twin = scaled(), on_device(scaled())
    with fmstream.stream(module, memory=part_way(module, 0.3), device=here.name):
        agree(module, twin)
        for each in (module, twin):
            weight = each[0].weight
            each[6].weight = weight if how == "shown" else nn.Parameter(weight.detach(), False)  # type: ignore
        del weight, each
        agree(module, twin)
    assert_on_host(module)
    agree(on_device(module), twin)


def test_another_wrapper_on_the_device_is_brought_to_the_host(machine: Any) -> None:
    module, twin = scaled(), on_device(scaled())
    with fmstream.stream(module, memory=part_way(module, 0.3), device=here.name):
        agree(module, twin)
        twin[0].weight = nn.Parameter(twin[2].weight.detach(), False)  # type: ignore[union-attr, operator]
        module[0].weight = nn.Parameter(twin[2].weight.detach().clone(), False)  # type: ignore[union-attr, operator]
        agree(module, twin)
    assert_on_host(module)
    agree(on_device(module), twin)


class Copying(Scaled):
    """Keeps copies of what it is given, so that nothing can be put in their place."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Copying(inner["numbers"].clone(), inner["scale"].clone())


def spread(weight: Scaled) -> Scaled:
    """One scale for all rows, expanded from far apart."""
    return Scaled(weight.numbers, weight.scale.new_ones(64 * len(weight.scale), 1)[::64])


def with_graph(weight: Scaled) -> Scaled:
    """One that needs a gradient."""
    return weight.requires_grad_()  # type: ignore[return-value]


def hidden(weight: Scaled) -> Scaled:
    """One whose tensors cannot be exchanged."""
    return Hidden(weight.numbers, weight.scale)


def copying(weight: Scaled) -> Scaled:
    """One of a class that would not take stand-ins."""
    return Copying(weight.numbers, weight.scale)


@pytest.mark.parametrize("make", [hidden, copying, spread, with_graph])
def test_a_wrapper_that_has_no_shell_is_on_the_device_whole(make: Callable[[Scaled], Scaled], machine: Any) -> None:
    def build() -> nn.Module:
        module = mlp(8, WIDTH)
        weight = make(Scaled.of(module[0].weight.detach()))  # type: ignore[operator]
        module[0].weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        return module

    module, twin = build(), on_device(build())
    own, numbers = module[0].weight, module[0].weight.numbers  # type: ignore[union-attr]
    with streamed(module, memory=part_way(module, 0.5)) as handle:
        agree(module, twin, 4)
        assert any(note.startswith("0.weight") for note in handle.telemetry.notes)
        assert module[0].weight.device.type == here.name  # type: ignore[union-attr]
        assert num_faults(handle) == 0
    assert module[0].weight is own
    assert own.numbers is numbers  # type: ignore[union-attr]


class Moving(Tenths):
    """Means something else where it is moved to."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        moved.places = [*getattr(self, "places", []), str(moved.device)]
        return moved


def test_a_subclass_with_a_way_of_its_own_to_move_is_not_streamed(machine: Any) -> None:
    module, twin = tenths(), on_device(tenths())
    module[0].weight = Moving(module[0].weight.data, "tenths")  # type: ignore[operator]
    with streamed(module) as handle:
        agree(module, twin, 4)
        assert any("0.weight" in note and "it is a Moving" in note for note in handle.telemetry.notes)


# Ends


@pytest.mark.parametrize("build", KINDS)
@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
def test_an_exception_in_a_forward_leaves_everything_as_it_was(
    build: Build, error: type[BaseException], machine: Any
) -> None:
    module, twin = build(), on_device(build())

    def fail(*_args: Any) -> None:
        raise error

    for at in (0, 5, 14):
        with streamed(module):
            agree(module, twin, 2)
            hook = module[at].register_forward_pre_hook(fail)  # type: ignore[operator]
            with pytest.raises(error), torch.no_grad():
                call(module, 1)
            hook.remove()
            agree(module, twin)


@pytest.mark.parametrize("point", ["show", "put_back"])
def test_an_interrupt_on_the_way_leaves_everything_as_it_was(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fmstream.payloads import shells, weights

    for owner, name in [(weights, point), (shells.Shell, "install" if point == "show" else "give_back")]:
        for n in (1, 3):
            fresh()
            module, twin = nested(), on_device(nested())
            before, own = Left(module), [id(t) for param in module.parameters() for t in tensors_in(param)]
            fail = FailAt(getattr(owner, name), n, KeyboardInterrupt)
            handle = None
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail.as_method() if isinstance(owner, type) else fail)
                try:
                    handle = fmstream.stream(module, memory=part_way(module, 0.3), device=here.name)
                    agree(module, twin)
                    handle.close()
                except KeyboardInterrupt:
                    if handle is not None:
                        handle.close()
                if handle is not None:
                    handle.close()
            assert fail.fired or n > 1
            before.check(module)
            assert [id(t) for param in module.parameters() for t in tensors_in(param)] == own
            here.check()
            with streamed(module):
                agree(module, twin)


def test_the_least_memory_is_the_same_while_it_streams(machine: Any) -> None:
    module = torchao("Int8WeightOnlyConfig")()
    least = fmstream.smallest_memory(module)
    with streamed(module), torch.no_grad():
        call(module, 0)
        assert fmstream.smallest_memory(module) == least
