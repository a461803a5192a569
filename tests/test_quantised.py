"""Quantised weights: wrappers around plain tensors, and parameters of classes that say what their bytes mean."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import fmstream
from fmstream.doors.stream import Stream
from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bound
from fmstream.payloads.kinds import is_wrapper, parts_of
from tests.kit import agree, assert_streams_fully, check_frames, mlp, noise, num_faults, same

X = noise(4, 64)
WIDTH, DEPTH = 64, 8


# Two classes as packages make them, so that the tests below do not hang on any of these


class Scaled(Tensor):
    """A wrapper: int8 numbers and a scale for each row."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)
        made.numbers, made.scale = numbers, scale
        return made  # type: ignore[return-value]

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        super().__init__()

    @classmethod
    def of(cls, tensor: Tensor) -> Scaled:
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["numbers"], inner["scale"])

    def plain(self) -> Tensor:
        return self.numbers.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default):
            ours = args[0]
            result = type(ours)(func(ours.numbers, *args[1:]), func(ours.scale, *args[1:]))
            return return_and_correct_aliasing(func, args, kwargs or {}, result)
        if func is aten.mul_.Scalar:
            args[0].scale.mul_(args[1])
            return args[0]
        read = [arg.plain() if isinstance(arg, Scaled) else arg for arg in args]
        return func(*read, **(kwargs or {}))


class Tenths(nn.Parameter):
    """A subclass over its own bytes: int8 numbers of tenths; every result is of this class as well."""

    kind: str

    @staticmethod
    def __new__(cls, data: Tensor, kind: str) -> Tenths:
        made = Tensor._make_subclass(cls, data, False)
        made.kind = kind
        return made

    def plain(self) -> Tensor:
        assert self.kind == "tenths"
        return Tensor._make_subclass(Tensor, self, False).to(torch.float32) / 10

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return Tenths(result, args[0].kind) if isinstance(result, Tensor) else result


class TenthsLinear(nn.Module):
    """Holds its weight in tenths."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = Tenths((linear.weight.detach() * 10).round().to(torch.int8), "tenths")
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.plain(), self.bias)


def scaled() -> nn.Module:
    module = mlp(DEPTH, WIDTH)
    for layer in module:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Scaled.of(layer.weight.detach()), requires_grad=False)
    return module


def nested() -> nn.Module:
    """A wrapper in a wrapper: the scale is scaled, too."""
    module = mlp(DEPTH, WIDTH)
    for layer in module:
        if isinstance(layer, nn.Linear):
            weight = Scaled.of(layer.weight.detach())
            weight.scale = Scaled.of(weight.scale)
            layer.weight = nn.Parameter(weight, requires_grad=False)
    return module


def tenths() -> nn.Module:
    return nn.Sequential(*(TenthsLinear(m) if isinstance(m, nn.Linear) else m for m in mlp(DEPTH, WIDTH)))


@contextmanager
def importing() -> Iterator[None]:
    """Packages warn of what is no affair of these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def torchao(config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with importing():
            quantization = pytest.importorskip("torchao.quantization")
            module = mlp(DEPTH, WIDTH)
            quantization.quantize_(module, getattr(quantization, config)(**options))
        return module

    return build


def gguf(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with importing():
            package = pytest.importorskip("gguf")
            from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
        quant_type = package.GGMLQuantizationType[kind]
        layers: list[nn.Module] = []
        for plain in mlp(DEPTH, WIDTH):
            if not isinstance(plain, nn.Linear):
                layers.append(plain)
                continue
            layer = GGUFLinear(WIDTH, WIDTH, bias=True, compute_dtype=torch.float32)
            packed = torch.from_numpy(package.quants.quantize(plain.weight.detach().numpy(), quant_type))
            layer.weight, layer.bias = GGUFParameter(packed, quant_type=quant_type), plain.bias
            layers.append(layer)
        return nn.Sequential(*layers)

    return build


BUILDS = [
    pytest.param(scaled, id="wrapper"),
    pytest.param(nested, id="nested"),
    pytest.param(tenths, id="subclass"),
    pytest.param(torchao("Int8WeightOnlyConfig"), id="torchao-int8"),
    pytest.param(torchao("Float8WeightOnlyConfig"), id="torchao-float8"),
    pytest.param(torchao("Int8DynamicActivationInt8WeightConfig"), id="torchao-int8-dynamic"),
    pytest.param(gguf("Q8_0"), id="gguf-q8_0"),
    pytest.param(gguf("Q5_1"), id="gguf-q5_1"),
]


@contextmanager
def streamed(module: nn.Module) -> Iterator[Stream]:
    """Stream with little memory; afterwards the same objects with the same inner tensors are there."""
    before = [(param, _inner(param)) for param in module.parameters()]
    with fmstream.stream(module, memory=fmstream.smallest_memory(module) + 4096) as handle:
        yield handle
        check_frames(handle)
    assert [id(param) for param in module.parameters()] == [id(param) for param, _ in before]
    for param, inner in before:
        assert [id(tensor) for tensor in _inner(param)] == [id(tensor) for tensor in inner]
        assert not any(isinstance(tensor, Absent | Bound) for tensor in (param, *inner))


def _inner(param: Tensor) -> list[Tensor]:
    if type(param) is Hidden:
        return [param.numbers, param.scale]
    return [part.tensor for part in parts_of(param)] if is_wrapper(param) else []


def true_bytes(module: nn.Module) -> int:
    """Bytes of all tensors that hold weights."""
    tensors = {id(t): t for param in module.parameters() for t in (_inner(param) or [param])}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def as_plain(tensor: Tensor) -> list[Tensor]:
    """Plain copies of the tensors that hold a weight."""
    with torch.no_grad():
        return [torch.empty(0, dtype=t.dtype).new_tensor(t.tolist()) for t in (_inner(tensor) or [tensor])]


# Twins


@pytest.mark.parametrize("build", BUILDS)
def test_twin(build: Callable[[], nn.Module]) -> None:
    module, twin = build(), build()
    with streamed(module) as handle:
        agree(module, twin, X, times=6)
        assert handle.telemetry.kept_bytes == 0
        assert handle.telemetry.weights_bytes == true_bytes(twin)
        assert num_faults(handle) == 0
        assert_streams_fully(handle)
    agree(module, twin, X)


@pytest.mark.parametrize("build", BUILDS)
def test_stand_in_answers_as_the_parameter_does(build: Callable[[], nn.Module]) -> None:
    module, twin = build(), build()
    with streamed(module) as handle:
        agree(module, twin, X, times=2)
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            assert isinstance(ours, type(theirs))
            assert isinstance(ours, nn.Parameter)
            assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
            assert ours.requires_grad == theirs.requires_grad
            for name in ("quant_type", "quant_shape", "kind", "block_size"):
                assert getattr(ours, name, None) == getattr(theirs, name, None)
        assert num_faults(handle) == 0


@pytest.mark.parametrize("build", BUILDS)
def test_reads_outside_a_forward_see_the_truth(build: Callable[[], nn.Module]) -> None:
    module, twin = build(), build()
    with streamed(module) as handle:
        agree(module, twin, X, times=2)
        with torch.no_grad():
            for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
                for reading in ("dequantize", "plain"):
                    if hasattr(type(theirs), reading) and type(theirs) is not nn.Parameter:
                        same(getattr(ours, reading)(), getattr(theirs, reading)())
            if "GGUF" in type(next(twin.parameters())).__name__:
                from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

                same(dequantize_gguf_tensor(module[0].weight), dequantize_gguf_tensor(twin[0].weight))
        state, expected = module.state_dict(), twin.state_dict()
        assert list(state) == list(expected)
        for key, value in expected.items():
            assert isinstance(state[key], type(value))
            same(as_plain(state[key]), as_plain(value))
        assert num_faults(handle) > 0


@pytest.mark.parametrize("build", BUILDS[:-2])
def test_deepcopy_is_independent(build: Callable[[], nn.Module]) -> None:
    if build is tenths:
        build = scaled
    module, twin = build(), build()
    with streamed(module):
        agree(module, twin, X, times=2)
        copied = copy.deepcopy(module)
        agree(copied, twin, X)
    agree(copied, twin, X)
    for ours, theirs in zip(copied.parameters(), twin.parameters(), strict=True):
        assert type(ours) is type(theirs)
        assert [type(tensor) for tensor in _inner(ours)] == [type(tensor) for tensor in _inner(theirs)]


@pytest.mark.parametrize("build", [tenths, gguf("Q8_0")])
def test_deepcopy_of_a_subclass(build: Callable[[], nn.Module]) -> None:
    module, twin = build(), build()
    with streamed(module):
        copied = copy.deepcopy(module)
    agree(copied, twin, X)
    assert type(copied[0].weight) is type(twin[0].weight)


def test_saved_and_loaded() -> None:
    build = torchao("Int8WeightOnlyConfig")
    module, twin = build(), build()
    with streamed(module):
        agree(module, twin, X, times=2)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for key, value in twin.state_dict().items():
        assert type(loaded[key]) is type(value)
        same(as_plain(loaded[key]), as_plain(value))


# Writes


def test_write_to_a_wrapper_reaches_its_tensors() -> None:
    module, twin = scaled(), scaled()
    with streamed(module):
        agree(module, twin, X, times=3)
        with torch.no_grad():
            for each in (module, twin):
                each[0].weight.mul_(2.0)
                each[2].weight.numbers.neg_()  # type: ignore[union-attr, operator]
        agree(module, twin, X, times=3)
    agree(module, twin, X)
    same(as_plain(module[0].weight), as_plain(twin[0].weight))


def test_write_within_a_forward_reaches_the_wrapper() -> None:
    def grow(layer: Any, args: Any) -> None:
        layer.weight.mul_(1.25)

    module, twin = scaled(), scaled()
    for each in (module, twin):
        each[4].register_forward_pre_hook(grow)
    with streamed(module):
        agree(module, twin, X, times=5)
    same(as_plain(module[4].weight), as_plain(twin[4].weight))


def test_write_to_a_subclass_reaches_its_bytes() -> None:
    module, twin = tenths(), tenths()
    with streamed(module):
        agree(module, twin, X, times=3)
        with torch.no_grad():
            for each in (module, twin):
                each[0].weight.neg_()  # type: ignore[operator]
        agree(module, twin, X, times=3)
    agree(module, twin, X)


def test_inner_tensor_that_the_user_replaces_is_used() -> None:
    module, twin = scaled(), scaled()
    before = module[0].weight.scale
    with fmstream.stream(module, memory=fmstream.smallest_memory(module) + 4096):
        agree(module, twin, X, times=3)
        for each in (module, twin):
            each[0].weight.scale = before * 3  # type: ignore[union-attr]
        agree(module, twin, X, times=3)
    agree(module, twin, X)


def test_shared_wrapper_is_streamed_once() -> None:
    def build() -> nn.Module:
        module = scaled()
        module[6].weight = module[0].weight  # type: ignore[union-attr]
        return module

    module, twin = build(), build()
    with streamed(module) as handle:
        agree(module, twin, X, times=5)
        assert handle.telemetry.weights_bytes == true_bytes(twin)


# What stays in place


class Hidden(Scaled):
    """Keeps its tensors where nothing can be put in their place."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Hidden:
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)
        made._both = (numbers, scale)
        return made  # type: ignore[return-value]

    @property
    def numbers(self) -> Tensor:  # type: ignore[override]
        return self._both[0]  # type: ignore[attr-defined, no-any-return]

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        return self._both[1]  # type: ignore[attr-defined, no-any-return]


def test_wrapper_whose_tensors_cannot_be_exchanged_stays_in_place() -> None:
    module, twin = mlp(DEPTH, WIDTH), mlp(DEPTH, WIDTH)
    for each in (module, twin):
        weight = Scaled.of(each[0].weight.detach())  # type: ignore[operator]
        each[0].weight = nn.Parameter(Hidden(weight.numbers, weight.scale), requires_grad=False)
    with streamed(module) as handle:
        agree(module, twin, X, times=4)
        assert any("0.weight" in note and "it is a Hidden" in note for note in handle.telemetry.notes)


def test_subclass_that_needs_a_gradient_stays_in_place() -> None:
    class Named(nn.Parameter):
        pass

    module, twin = mlp(DEPTH, WIDTH), mlp(DEPTH, WIDTH)
    for each in (module, twin):
        each[0].weight = Named(each[0].weight.detach())  # type: ignore[operator]
    with streamed(module) as handle:
        for _ in range(4):
            ours, theirs = module(X), twin(X)
            same(ours, theirs)
            ours.sum().backward()
            theirs.sum().backward()
        same(module[0].weight.grad, twin[0].weight.grad)
        assert any("it is a Named" in note for note in handle.telemetry.notes)


# Compiled


@pytest.mark.parametrize("build", [scaled, torchao("Int8WeightOnlyConfig")])
def test_compiled_layers(build: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    module, twin = build(), build()
    blocks = nn.Sequential(*(nn.Sequential(module[i], module[i + 1]) for i in range(0, 2 * DEPTH, 2)))
    for each in blocks:
        each.compile(backend="aot_eager")
    with fmstream.stream(blocks, memory=fmstream.smallest_memory(blocks) + 4096) as handle:
        agree(blocks, twin, X, times=5)
        assert num_faults(handle) == 0
        assert_streams_fully(handle)
    agree(blocks, twin, X)
    torch._dynamo.reset()
