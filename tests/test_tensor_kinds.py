"""Parameters of every dtype, size, shape and stride that a module may own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import fmstream
from fmstream.actors.prefetch import Piece, PrefetchActor, Request
from tests.kit import agree, assert_streams_fully, bits, budget, mlp, noise, same, same_state, streamed

X = noise(4, 32)
SMALL_DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.complex64,
]


class Holder(nn.Module):
    """Returns what its parameter shows during a forward, as bytes, and how it lies in memory."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value, requires_grad=False)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        value = self.value
        self.seen.append((value.dtype, tuple(value.shape), value.stride(), value.is_contiguous()))
        return bits(value) if value.numel() else x.new_zeros(1)


class Holders(nn.Module):
    """Some of them, and layers that make it worth streaming."""

    def __init__(self, *values: Tensor) -> None:
        super().__init__()
        self.holders = nn.ModuleList(Holder(value) for value in values)
        self.body = mlp(6)

    def forward(self, x: Tensor) -> list[Tensor]:
        first = [holder(x) for holder in self.holders]
        return [*first, self.body(x), *(holder(x) for holder in self.holders)]


def check(module: Holders, fraction: float = 0.2, **options: Any) -> None:
    """Stream it against a twin; in each pass a holder sees a tensor that lies as its parameter does."""
    twin = copy.deepcopy(module)
    module(X)
    plain = [holder.seen.copy() for holder in module.holders]
    with streamed(module, fraction, edited="spill_dir" in options, **options):
        agree(module, twin, X, times=4)
        same_state(module, twin)
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
    for holder, seen in zip(module.holders, plain, strict=True):
        assert holder.seen == seen * 5


def random_of(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bytes seen as ``dtype``; numbers where bytes could be NaN."""
    generator = torch.Generator().manual_seed(8)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=str)
def test_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    check(Holders(random_of(dtype, 3, 5), random_of(dtype, 7), random_of(dtype, 40, 41)))


def test_all_dtypes_beside_each_other() -> None:
    check(Holders(*(random_of(dtype, 3, 5) for dtype in SMALL_DTYPES)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
def test_layers_of_another_dtype_compute_the_same(dtype: torch.dtype) -> None:
    module = mlp(6)
    for param in module.parameters():
        param.data = param.data.to(dtype)  # Module.to warns of complex types
    twin = copy.deepcopy(module)
    with streamed(module) as handle:
        agree(module, twin, X.to(dtype), times=4)
        assert_streams_fully(handle)


def test_autocast() -> None:
    module = mlp(6)
    twin = copy.deepcopy(module)
    with streamed(module), torch.autocast("cpu", dtype=torch.bfloat16):
        agree(module, twin, X, times=4)


def test_autocast_whose_cache_outlives_a_pass() -> None:
    module = mlp(6)
    twin = copy.deepcopy(module)
    for part in (module, twin):
        part.requires_grad_(True)
    with streamed(module), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        for _ in range(4):
            same(module(X), twin(X))
        with torch.no_grad():
            module[2].weight.mul_(2.0)
            twin[2].weight.mul_(2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(module(X), twin(X))


@pytest.mark.parametrize("spilled", [False, True])
def test_empty_parameters(spilled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Piece] = []
    prepare = PrefetchActor.prepare

    def noted(actor: PrefetchActor, pieces: Sequence[Piece]) -> Request:
        request = prepare(actor, pieces)
        asked.extend(part for chunk in request.chunks for part in getattr(chunk, "parts", (chunk,)))
        return request

    monkeypatch.setattr(PrefetchActor, "prepare", noted)
    module = Holders(torch.zeros(0), torch.zeros(2, 0), torch.zeros(0, 4), random_of(torch.float32, 5))
    params = dict(module.named_parameters())
    check(module, **({"spill_dir": tmp_path} if spilled else {}))
    assert all(part.num_bytes > 0 for part in asked)
    assert len(params) == len(dict(module.named_parameters()))
    assert all(params[name] is value for name, value in module.named_parameters())


def test_scalars_and_single_elements() -> None:
    check(Holders(torch.tensor(2.5), torch.tensor([3], dtype=torch.int8), torch.tensor(True), torch.ones(1, 1, 1)))


BASE = noise(64, 64, seed=12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BASE.clone().t(),
        lambda: BASE.clone()[:, ::2],
        lambda: BASE.clone()[1:, 1:],
        lambda: BASE.clone()[3:5],
        lambda: BASE.clone()[:, 3],
        lambda: noise(1, 4).expand(1000, 4),
        lambda: noise(4, 1).expand(4, 9),
        lambda: noise(1).expand(50),
        lambda: noise(8, 6, 3, 3).to(memory_format=torch.channels_last),
        lambda: noise(4, 3, 2, 3, 3).to(memory_format=torch.channels_last_3d),
        lambda: noise(5, 6, 7).permute(2, 0, 1),
        lambda: noise(40).as_strided((5, 5), (5, 3)),
        lambda: torch.ones(9).bool()[1:8],
        lambda: noise(9).to(torch.bfloat16)[1:8],
    ],
    ids=[
        "transposed",
        "every second column",
        "inner block",
        "rows of a larger base",
        "column",
        "expanded rows",
        "expanded columns",
        "expanded scalar",
        "channels last",
        "channels last 3d",
        "permuted",
        "self-overlapping",
        "odd address of bytes",
        "odd address of halves",
    ],
)
@pytest.mark.parametrize("spilled", [False, True], ids=["ram", "spilled"])
def test_stride_and_place(make: Callable[[], Tensor], spilled: bool, tmp_path: Path) -> None:
    options = {"spill_dir": tmp_path} if spilled else {}
    check(Holders(make(), random_of(torch.float32, 5)), **options)


def test_strided_weights_of_layers_that_compute() -> None:
    module = mlp(6)
    for linear in module[::2]:
        linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    conv = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(5))).eval()
    conv.to(memory_format=torch.channels_last)
    twins = copy.deepcopy([module, conv])
    with streamed({"linear": module, "conv": conv}):
        for _ in range(3):
            agree(module, twins[0], X)
            agree(conv, twins[1], noise(1, 8, 6, 6).to(memory_format=torch.channels_last))


def test_slice_of_a_large_base_charges_only_itself() -> None:
    base = torch.zeros(1 << 20)
    base[5000:5032] = noise(32)
    module = Holders(base[5000:5032], random_of(torch.float32, 5))
    with streamed(module, idle=True) as handle:
        assert handle.telemetry.weights_bytes < 1 << 16
    check(module)


def test_forward_sees_weights_aligned_to_64_bytes() -> None:
    flat = noise(32 * 33 * 8 + 1)
    places: list[int] = []

    class Looking(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            start = 1 + number * 32 * 33
            self.weight = nn.Parameter(flat[start : start + 32 * 32].view(32, 32))
            self.bias = nn.Parameter(flat[start + 32 * 32 : start + 32 * 33])

        def forward(self, x: Tensor) -> Tensor:
            places.extend((self.weight.data_ptr(), self.bias.data_ptr()))
            return nn.functional.linear(x, self.weight, self.bias)

    module = nn.Sequential(*(Looking(number) for number in range(8))).eval()
    twin = copy.deepcopy(module)
    assert module[0].weight.data_ptr() % 64
    for looking in twin:
        for name, param in list(looking.named_parameters()):
            setattr(looking, name, nn.Parameter(param.detach().clone()))
    with streamed(module):
        agree(module, twin, X, times=4)
        ours = [place for run in range(4) for place in places[run * 32 : run * 32 + 16]]
        assert len(ours) == 64
        assert all(place % 64 == 0 for place in ours)


def test_overlapping_parameters_stay_in_place() -> None:
    base = noise(48, 32, seed=2)
    module = nn.Sequential(mlp(1), mlp(1, seed=1), mlp(6, seed=2)).eval()
    module[0][0].weight = nn.Parameter(base[:32])
    module[1][0].weight = nn.Parameter(base[16:])
    twin = copy.deepcopy(module)
    with streamed(module) as handle, torch.no_grad():
        assert handle.telemetry.kept_bytes == 2 * 32 * 32 * 4
        assert any("0.0.weight" in note and "another parameter" in note for note in handle.telemetry.notes)
        agree(module, twin, X, times=3)
        module[0][0].weight[16:].zero_()
        twin[0][0].weight[16:].zero_()
        twin[1][0].weight[:16].zero_()
        agree(module, twin, X, times=2)


class Quantised(Tensor):
    """A weight kept as int8 and a scale: a wrapper subclass as quantisers make them."""

    codes: Tensor
    scale: float

    @staticmethod
    def __new__(cls, codes: Tensor, scale: float) -> Quantised:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    def __init__(self, codes: Tensor, scale: float) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes.clone() if "clone" in str(func) else args[0].codes, args[0].scale)
        plain = tree_map_only(cls, lambda t: t.codes.to(torch.float32) * t.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def test_wrapper_subclasses_stay_in_place() -> None:
    module = mlp(8)
    for linear in module[:8:2]:
        codes = (linear.weight.detach() * 100).to(torch.int8)
        linear.weight = nn.Parameter(Quantised(codes, 0.01), requires_grad=False)
    twin = copy.deepcopy(module)
    kept = [linear.weight for linear in module[:8:2]]
    with streamed(module) as handle:
        assert any("Quantised" in note for note in handle.telemetry.notes)
        agree(module, twin, X, times=4)
        assert all(linear.weight is weight for linear, weight in zip(module[:8:2], kept, strict=True))


def test_named_subclass_of_parameter_stays_in_place() -> None:
    class Tagged(nn.Parameter):
        tag = "mine"

    module = mlp(8)
    module[0].weight = Tagged(module[0].weight.detach())
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=3)
        assert module[0].weight.tag == "mine"


def test_sparse_parameter_stays_in_place() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(32).to_sparse(), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.matrix, x.t()).t()

    module = nn.Sequential(Sparse(), mlp(6)).eval()
    with torch.no_grad():
        expected = module(X)
    with streamed(module), torch.no_grad():
        for _ in range(3):
            same(module(X), expected)


def test_parameters_without_names_in_lists_and_dicts() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.listed = nn.ParameterList(noise(32, 32, seed=seed) / 8 for seed in range(4))
            self.named = nn.ParameterDict({"a": nn.Parameter(noise(32)), "b": nn.Parameter(noise(32, 32) / 8)})

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.listed:
                x = x @ weight
            return (x + self.named["a"]) @ self.named["b"]

    module = nn.Sequential(*(Many() for _ in range(4))).eval()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=5)


def test_parameters_larger_than_staging(tmp_path: Any) -> None:
    sizes = [1, 16383, 16384, 16385, 5 * 16384 + 3]
    module = Holders(*(torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in sizes))
    twin = copy.deepcopy(module)
    with streamed(module, 0.0, edited=True, staging=16384, num_workers=1, spill_dir=tmp_path):
        agree(module, twin, X, times=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spilled", [False, True], ids=["ram", "disk"])
def test_one_layer_of_many_sizes_around_a_mebibyte(spilled: bool, tmp_path: Path) -> None:
    mib = 1 << 20

    class Six(Holders):
        """All six are one layer's own."""

        def __init__(self) -> None:
            super().__init__()
            for number, size in enumerate([1, mib - 1, mib, mib + 1, 5 * mib, 5 * mib + 4097]):
                value = (torch.arange(size, dtype=torch.int64) * 7 % 251).to(torch.uint8)
                self.register_parameter(f"p{number}", nn.Parameter(value, requires_grad=False))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [*(getattr(self, f"p{number}").clone() for number in range(6)), self.body(x)]

    module = nn.ModuleList([Six(), mlp(4), Six()])
    module.forward = lambda x: [module[0](x), module[1](x), module[2](x)]  # type: ignore[method-assign]
    twin = [Six(), mlp(4), Six()]
    options = {"spill_dir": tmp_path} if spilled else {}
    with streamed(module, 0.0, edited=True, staging=2 * mib, num_workers=2, **options):
        agree(module, lambda x: [part(x) for part in twin], X, times=3)
    least = fmstream.smallest_memory(module)
    with pytest.raises(fmstream.MemoryBudgetError, match=str(least)):
        fmstream.stream(module, memory=least - mib)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=str)
def test_spilled_values_keep_their_bits(dtype: torch.dtype, tmp_path: Any) -> None:
    module = Holders(random_of(dtype, 3, 5), random_of(dtype, 90, 71), random_of(dtype, 80, 80).t())
    twin = copy.deepcopy(module)
    with streamed(module, 0.1, edited=True, spill_dir=tmp_path) as handle:
        sizes = [p.numel() * p.element_size() for p in twin.parameters()]
        # What lies in the file is as large as the tensors: nothing was widened.
        assert 0 < handle.telemetry.file_bytes <= sum(sizes)
        agree(module, twin, X, times=4)
    assert list(tmp_path.iterdir()) == []
    agree(module, twin, X)


def test_memory_below_the_largest_module_is_refused_by_name() -> None:
    module = nn.Sequential(mlp(4), nn.Linear(32, 512)).eval()
    before = list(module.parameters())
    with pytest.raises(fmstream.MemoryBudgetError, match=r"'1' must be in memory as a whole") as caught:
        fmstream.stream(module, memory=20_000)
    assert str(fmstream.smallest_memory(module)) in str(caught.value)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    twin = copy.deepcopy(module)
    with streamed(module, memory=fmstream.smallest_memory(module)):
        agree(module, twin, X, times=3)


def test_meta_parameters_are_refused_by_name() -> None:
    module = mlp(4)
    module[2].weight = nn.Parameter(torch.empty(32, 32, device="meta"))
    with pytest.raises(fmstream.ConfigError, match=r"'2\.weight' is on the meta device"):
        fmstream.stream(module, memory=budget(mlp(4)))
    assert "_compiled_call_impl" not in module[0].__dict__
