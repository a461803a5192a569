"""Modules with quantised weights: wrappers around plain tensors, and classes that say what their bytes mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from fmstream.payloads.kinds import is_wrapper, parts_of
from tests.kit import mlp

WIDTH, DEPTH = 64, 8


# Two classes as packages make them, so that tests do not hang on any of these


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
            ours, options = args[0], dict(kwargs or {})
            scale = func(ours.scale, *args[1:], **options)
            options.pop("dtype", None)  # that of the numbers is int8 for good
            result = type(ours)(func(ours.numbers, *args[1:], **options), scale)
            return return_and_correct_aliasing(func, args, kwargs or {}, result)
        if func is aten.mul_.Scalar:
            args[0].scale.mul_(args[1])
            return args[0]
        if func is aten.copy_.default and isinstance(args[1], Scaled):
            args[0].numbers.copy_(args[1].numbers)
            args[0].scale.copy_(args[1].scale)
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


def float8_dynamic() -> nn.Module:
    """What torchao's configuration of that name gives on a card; elsewhere it refuses."""
    with importing():
        pytest.importorskip("torchao.quantization")
        from torchao.float8.inference import Float8MMConfig
        from torchao.quantization import Float8Tensor
        from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs
    module = mlp(DEPTH, WIDTH)
    options = {"mm_config": Float8MMConfig(use_fast_accum=True), "act_quant_kwargs": QuantizeTensorToFloat8Kwargs()}
    for layer in module:
        if isinstance(layer, nn.Linear):
            weight = Float8Tensor.from_hp(layer.weight.detach(), **options)
            layer.weight = nn.Parameter(weight, requires_grad=False)
    return module


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


BUILDS = [
    pytest.param(scaled, id="wrapper"),
    pytest.param(nested, id="nested"),
    pytest.param(tenths, id="subclass"),
    pytest.param(torchao("Int8WeightOnlyConfig"), id="torchao-int8"),
    pytest.param(torchao("Float8WeightOnlyConfig"), id="torchao-float8"),
    pytest.param(torchao("Int8DynamicActivationInt8WeightConfig"), id="torchao-int8-dynamic"),
    pytest.param(float8_dynamic, id="torchao-float8-dynamic"),
    pytest.param(torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4), id="torchao-int4"),
    pytest.param(gguf("Q8_0"), id="gguf-q8_0"),
    pytest.param(gguf("Q5_1"), id="gguf-q5_1"),
]


def tensors_in(param: Any) -> list[Tensor]:
    """The plain tensors in a wrapper; none for any other parameter."""
    if type(param) is Hidden:
        return [param.numbers, param.scale]
    return [part.tensor for part in parts_of(param)] if is_wrapper(param) else []


def true_bytes(module: nn.Module) -> int:
    """Bytes of all tensors that hold weights."""
    tensors = {id(t): t for param in module.parameters() for t in (tensors_in(param) or [param])}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def as_plain(tensor: Tensor) -> list[Tensor]:
    """Plain copies of the tensors that hold a weight."""
    with torch.no_grad():
        return [torch.empty(0, dtype=t.dtype).new_tensor(t.tolist()) for t in (tensors_in(tensor) or [tensor])]


def assert_alike(ours: Tensor, theirs: Tensor) -> None:
    """Two parameters say the same of themselves."""
    assert isinstance(ours, nn.Parameter)
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    assert ours.requires_grad == theirs.requires_grad
    for name in ("quant_type", "quant_shape", "kind", "block_size"):
        assert getattr(ours, name, None) == getattr(theirs, name, None)
