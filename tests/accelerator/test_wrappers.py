"""Which wrapper is where: shells stand for those that stream, and go nowhere else; the others lie on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import fmstream
from tests.accelerator.kit import here
from tests.accelerator.kit_quantised import agree, assert_on_host, on_device, part_way, streamed
from tests.kit import assert_streams_fully, mlp, num_faults
from tests.kit_quantised import WIDTH, Hidden, Scaled, Tenths, scaled, tenths, true_bytes


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


class Keeping(Scaled):
    """Keeps what it is given in a second place, where nothing is put later, and computes with that."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Keeping:
        made = Scaled.__new__(cls, numbers, scale)
        made.both = [numbers, scale]  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Keeping(inner["numbers"], inner["scale"])

    def plain(self) -> Tensor:
        numbers, scale = self.both  # type: ignore[attr-defined]
        return numbers.to(scale.dtype) * scale  # type: ignore[no-any-return]


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


def keeping(weight: Scaled) -> Scaled:
    """One whose tensors stand in two places."""
    return Keeping(weight.numbers, weight.scale)


@pytest.mark.parametrize("make", [hidden, copying, keeping, spread, with_graph])
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
