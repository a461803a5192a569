"""The decision which pages are attended to: the kernel, native code and PyTorch operations agree."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmstream.device.nvrtc import compile_kernel
from fmstream.device.page_kernel import compiled_macros
from fmstream.errors import ConfigError
from fmstream.payloads.page_select import Choice, Digests, Limits, digest, expected_rotation, select, select_with_torch
from tests.kit_cuda import COMPILER, Kernel, kernel_source

THREADS = 64
DIGESTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Case:
    """Random inputs.  Integers, so that sums are exact in whatever order they are taken."""

    def __init__(
        self, seed: int, batch: int, heads: int, group: int, pages: int, dims: int, exact: bool = True
    ) -> None:
        draw = torch.Generator().manual_seed(seed)

        def numbers(*shape: int, low: int = -4) -> torch.Tensor:
            if exact:
                return torch.randint(low, 5, shape, generator=draw).float()
            return torch.rand(shape, generator=draw) * (4 - low) + low

        self.query = numbers(batch, heads * group, dims) * group  # so that the mean is exact as well
        self.centre = numbers(batch, heads, pages, dims)
        self.radius = numbers(batch, heads, pages, dims, low=0)
        self.rotation = (numbers(dims), numbers(dims))
        self.resident = torch.rand((batch, heads, pages), generator=draw) < 0.3
        self.scale = 0.125

    def arguments(self, limits: Limits, num_pages: int | None = None) -> tuple[torch.Tensor, Digests, Limits]:
        digests = Digests(
            self.centre, self.radius, self.resident, self.rotation, self.scale, num_pages or self.centre.shape[2]
        )
        return self.query, digests, limits


def with_margin(*shape: int) -> torch.Tensor:
    """Room for a result and behind it, so that a broken kernel writes over nothing else."""
    num = math.prod(shape)
    return torch.full((num + 4096,), -7, dtype=torch.int32)[:num].view(shape)


def run_kernel(
    kernel: Kernel,
    case: Case,
    limits: Limits,
    blocks: int,
    dtype: torch.dtype = torch.float32,
    num_pages: int | None = None,
) -> Choice:
    batch, heads, pages, dims = case.centre.shape
    group = case.query.shape[1] // heads
    lists = [with_margin(batch, heads, length) for length in (limits.num_chosen, limits.num_ahead, limits.num_victims)]
    left_out = torch.full((batch, heads), -7.0)
    arrived = torch.zeros((batch, heads), dtype=torch.int32)
    kernel(
        (blocks, heads, batch),
        case.query.reshape(batch, heads, group, dims).contiguous(),
        case.centre.to(dtype),
        case.radius.to(dtype),
        *case.rotation,
        case.resident,
        torch.full((batch, heads, group, pages), torch.nan),
        torch.full((batch, heads, pages), torch.nan),
        torch.full((batch, heads, pages), torch.nan),
        torch.full((batch, heads, pages), 9, dtype=torch.uint8),
        arrived,
        *lists,
        left_out,
        num_pages or pages,
        pages,
        limits.num_chosen,
        limits.num_ahead,
        limits.num_frames,
        limits.num_sinks,
        limits.num_recent,
        case.scale,
        limits.stay,
    )
    assert not arrived.any()
    return Choice(*lists, left_out)


def assert_equal(found: Choice, wanted: Choice) -> None:
    assert torch.equal(found.chosen, wanted.chosen)
    assert torch.equal(found.ahead, wanted.ahead)
    assert torch.equal(found.victims, wanted.victims)
    torch.testing.assert_close(found.left_out, wanted.left_out, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return compiled(tmp_path_factory.mktemp("kernel"), group=3)


def compiled(
    folder: Path, group: int, dims: int = 64, dtype: torch.dtype = torch.float32, edit: tuple[str, str] = ("", "")
) -> Kernel:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    source = kernel_source("page_select.cu")
    assert edit[0] in source
    macros = {"HEAD_DIM": dims, "GROUP": group, "DIGEST": DIGESTS[dtype]}
    return Kernel(source.replace(*edit) if edit[0] else source, "page_select", THREADS, macros, folder)


def make_limits(sinks: int, recent: int, more: int, spare: int, ahead: int, stay: float) -> Limits:
    chosen = sinks + recent + more
    return Limits(chosen, chosen + spare, ahead, sinks, recent, stay)


limits_drawn = st.builds(
    make_limits,
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 30),
    st.integers(0, 20),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.5, 4.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), limits_drawn, st.integers(1, 150), st.integers(1, 4))
def test_the_kernel_decides_as_pytorch_does(kernel: Kernel, seed: int, limits: Limits, pages: int, blocks: int) -> None:
    case = Case(seed, batch=1, heads=2, group=3, pages=pages, dims=64)
    assert_equal(run_kernel(kernel, case, limits, blocks), select_with_torch(*case.arguments(limits)))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), limits_drawn, st.integers(1, 300), st.sampled_from([1, 2, 4, 7, 9]))
def test_native_code_decides_as_pytorch_does(seed: int, limits: Limits, pages: int, group: int) -> None:
    case = Case(seed, batch=2, heads=2, group=group, pages=pages, dims=16)
    assert_equal(select(*case.arguments(limits)), select_with_torch(*case.arguments(limits)))


@pytest.mark.parametrize("kind", ["all alike", "two values", "one far above", "tiny", "both signs"])
@pytest.mark.parametrize("seed", range(3))
def test_native_code_decides_wherever_the_bounds_lie(kind: str, seed: int) -> None:
    case = Case(seed, batch=1, heads=2, group=4, pages=500, dims=16)
    page = torch.arange(500).view(1, 1, 500, 1)
    if kind == "all alike":
        case.centre[:] = case.centre[:, :, :1]
        case.radius[:] = case.radius[:, :, :1]
    elif kind == "two values":
        case.centre[:] = torch.where(page % 3 == 0, case.centre[:, :, :1], case.centre[:, :, 1:2])
        case.radius[:] = 1.0
    elif kind == "one far above":
        case.radius[:, :, 77] = 1e30
    elif kind == "tiny":
        case.scale = 2.0**-120
    else:
        case.centre *= torch.where(page % 2 == 0, 1.0, -1.0)
        case.radius[:] = 0.0
    for limits in (Limits(60, 90, 12), Limits(200, 200, 5, 0, 0), Limits(495, 500, 3)):
        assert_equal(select(*case.arguments(limits)), select_with_torch(*case.arguments(limits)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [32, 128])
def test_digests_of_half_the_width(tmp_path: Path, dtype: torch.dtype, dims: int) -> None:
    case = Case(5, batch=2, heads=1, group=4, pages=90, dims=dims)
    limits = Limits(20, 30, 6)
    found = run_kernel(compiled(tmp_path, 4, dims, dtype), case, limits, blocks=2, dtype=dtype)
    assert_equal(found, select_with_torch(*case.arguments(limits)))


def test_floats_of_any_kind_give_close_shares(kernel: Kernel) -> None:
    case = Case(6, batch=1, heads=2, group=3, pages=100, dims=64, exact=False)
    limits = Limits(12, 20, 5)
    wanted = select_with_torch(*case.arguments(limits))
    for found in (select(*case.arguments(limits)), run_kernel(kernel, case, limits, blocks=3)):
        torch.testing.assert_close(found.left_out, wanted.left_out, rtol=1e-3, atol=1e-5)
        assert torch.equal(found.chosen, wanted.chosen)


@pytest.mark.parametrize(
    "edit",
    [
        ("fabsf(query[g][i]) * r[i]", "query[g][i] * r[i]"),
        ("equal_rank < equal_left", "true"),
        ("return role[page] == CHOSEN || !resident[page] ? 0u", "return !resident[page] ? 0u"),
        ("turned = d < HEAD_DIM / 2 ? -turned : turned;", ""),
        ("held + fetched - num_frames", "held - num_frames"),
        ("if (w < warp) rank", "if (w <= warp) rank"),
        ("resident[page] ? importance[page] + stay", "resident[page] ? importance[page]"),
    ],
)
def test_a_wrong_kernel_is_caught(tmp_path: Path, edit: tuple[str, str]) -> None:
    broken = compiled(tmp_path, 3, edit=edit)
    limits = Limits(14, 45, 6, 1, 1, stay=2.0)
    for seed in range(8):
        case = Case(seed, batch=1, heads=2, group=3, pages=130, dims=64)
        case.centre.clamp_(-1, 1)  # many equal bounds
        case.radius.clamp_(0, 1)
        found = run_kernel(broken, case, limits, blocks=2)
        try:
            assert_equal(found, select_with_torch(*case.arguments(limits)))
        except AssertionError:
            return
    pytest.fail("not noticed")


def test_threads_that_miss_a_barrier_are_noticed(tmp_path: Path) -> None:
    source = kernel_source("page_select.cu")
    line = "    if (!shared.last) return;\n"
    broken = compiled(tmp_path, 3, edit=(line, line + "    if (threadIdx.x == 3) __syncthreads();\n"))
    assert line in source
    with pytest.raises(RuntimeError, match="different barriers"):
        run_kernel(broken, Case(1, 1, 1, 3, 40, 64), Limits(8, 8), blocks=1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), limits_drawn, st.integers(1, 120))
def test_what_a_decision_promises(seed: int, limits: Limits, pages: int) -> None:
    case = Case(seed, batch=1, heads=1, group=2, pages=pages, dims=8)
    case.resident &= case.resident.cumsum(-1) <= limits.num_frames  # no more than there is room for
    found = select(*case.arguments(limits))
    chosen, ahead, victims = (
        {p for p in part.flatten().tolist() if p >= 0} for part in (found.chosen, found.ahead, found.victims)
    )
    resident = set(case.resident.flatten().nonzero().flatten().tolist())
    assert len(chosen) == min(limits.num_chosen, pages)
    assert {p for p in range(pages) if p < limits.num_sinks or p >= pages - limits.num_recent} <= chosen
    assert not ahead & (resident | chosen)
    assert victims <= resident - chosen
    assert len((resident | chosen | ahead) - victims) <= limits.num_frames
    assert len(ahead) <= limits.num_ahead


def test_digests_bound_what_keys_score() -> None:
    keys = torch.randn(3, 5, 32, 16, generator=torch.Generator().manual_seed(1))
    centre, radius = digest(keys)
    low, high = keys.amin(-2), keys.amax(-2)
    assert torch.equal(centre, (low + high) / 2)
    assert bool((radius <= (high - low) / 2 + 1e-6).all())
    assert centre.shape == radius.shape == (3, 5, 16)


def test_the_expected_rotation_of_one_position_is_its_rotation() -> None:
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    cos, sin = expected_rotation(inv_freq, 1)
    assert torch.allclose(cos, inv_freq.cos().repeat(2))
    assert torch.allclose(sin, inv_freq.sin().repeat(2))


def test_fast_turning_dimensions_average_out() -> None:
    cos, _ = expected_rotation(torch.tensor([1.0, 1e-6]), 512)
    assert abs(cos[0]) < 0.01
    assert cos[1] > 0.99


def test_limits_that_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="num_chosen=3 is less than the 4 pages"):
        Limits(3, 10)
    with pytest.raises(ConfigError, match="num_frames=4 is less than num_chosen=5"):
        Limits(5, 4)
    with pytest.raises(ConfigError, match="num_ahead=-1 is negative"):
        Limits(5, 5, -1)
    with pytest.raises(ConfigError, match="looks at no position"):
        expected_rotation(torch.ones(2), 0)


def test_shapes_that_do_not_fit() -> None:
    case = Case(1, 1, 2, 3, 10, 8)
    case.resident = case.resident[:, :, :5]
    with pytest.raises(ConfigError, match="do not fit"):
        case.arguments(Limits(4, 4))
    case = Case(1, 1, 2, 3, 10, 8)
    with pytest.raises(ConfigError, match="num_pages=11 is not from 1 to the 10 pages"):
        case.arguments(Limits(4, 4), num_pages=11)
    case.query = case.query[:, :5]
    with pytest.raises(ConfigError, match="does not fit digests"):
        select(*case.arguments(Limits(4, 4)))
    case.centre = case.centre.mT.contiguous().mT
    with pytest.raises(ConfigError, match="not contiguous"):
        case.arguments(Limits(4, 4))


def test_room_for_more_pages_is_not_looked_at(kernel: Kernel) -> None:
    case = Case(9, batch=2, heads=2, group=3, pages=80, dims=64)
    limits = Limits(10, 14, 3)
    wanted = select_with_torch(*case.arguments(limits, num_pages=50))
    case.centre[:, :, 50:] = torch.nan
    case.radius[:, :, 50:] = torch.inf
    assert_equal(select(*case.arguments(limits, num_pages=50)), wanted)
    assert_equal(run_kernel(kernel, case, limits, blocks=2, num_pages=50), wanted)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize(("dtype", "dims", "group"), [(torch.bfloat16, 128, 4), (torch.float32, 64, 3)])
def test_the_kernel_compiles_for_cards(architecture: str, dtype: torch.dtype, dims: int, group: int) -> None:
    macros = compiled_macros(dtype, dims, group)
    assert macros is not None
    cubin = compile_kernel("page_select.cu", architecture, macros).code
    assert bytes(cubin[:4]) == b"\x7fELF"


def test_a_kernel_that_does_not_compile_says_where() -> None:
    with pytest.raises(Exception, match=r"page_select.cu\(\d+\): error"):
        compile_kernel("page_select.cu", "sm_80", {"HEAD_DIM": 128, "GROUP": 4, "DIGEST": 1, "THREADS": 0})


def test_shapes_that_the_kernel_is_not_made_for() -> None:
    assert compiled_macros(torch.float64, 128, 4) is None
    assert compiled_macros(torch.float32, 80, 4) is None
    assert compiled_macros(torch.float32, 128, 17) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
@pytest.mark.parametrize("dtype", list(DIGESTS))
def test_the_kernel_on_a_card(dtype: torch.dtype) -> None:
    case = Case(11, batch=2, heads=4, group=4, pages=4096, dims=128)
    limits = Limits(550, 553, 32)
    wanted = select_with_torch(*case.arguments(limits))
    query, digests, _ = case.arguments(limits)
    on_card = Digests(
        digests.centre.to("cuda", dtype),
        digests.radius.to("cuda", dtype),
        digests.resident.cuda(),
        (digests.rotation[0].cuda(), digests.rotation[1].cuda()),
        digests.scale,
        digests.num_pages,
    )
    for _ in range(3):
        found = select(query.cuda(), on_card, limits)
        assert_equal(Choice(*(getattr(found, name).cpu() for name in Choice.__slots__)), wanted)
