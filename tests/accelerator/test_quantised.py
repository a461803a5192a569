"""Quantised weights stream to a device as their twins lie on it, and come back whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fmstream
from fmstream.emulator.backlog import Execution
from fmstream.payloads.kinds import is_wrapper
from tests.accelerator.cases import call
from tests.accelerator.kit import ORDERS, POLICIES, Left, equal, fresh, here, on_host
from tests.accelerator.kit_quantised import KINDS, Build, agree, all_tensors, on_device, part_way, streamed
from tests.kit import assert_streams_fully, num_faults
from tests.kit_quantised import BUILDS, WIDTH, nested, scaled, tensors_in, torchao, true_bytes
from tests.kit_runtime import FailAt, Injected


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
