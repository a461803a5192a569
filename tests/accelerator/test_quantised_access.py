"""Quantised weights that stream to a device are read, copied and written as those that lie on it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import fmstream
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bound
from fmstream.payloads.kinds import is_dressed, is_wrapper
from tests.accelerator.cases import call
from tests.accelerator.kit import equal, here, on_host
from tests.accelerator.kit_quantised import WRAPPERS, Build, agree, assert_on_host, on_device, part_way, streamed
from tests.kit import assert_streams_fully, num_faults, same
from tests.kit_quantised import BUILDS, as_plain, assert_alike, nested, scaled, tensors_in, tenths

# What is shown


@pytest.mark.parametrize("build", BUILDS)
def test_what_is_shown_answers_as_the_parameter_on_the_device_does(build: Build, machine: Any) -> None:
    module, twin = build(), on_device(build())
    with streamed(module) as handle:
        agree(module, twin, 2)
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            assert type(ours) is type(theirs) if is_wrapper(theirs) else isinstance(ours, type(theirs))
            assert_alike(ours, theirs)
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
