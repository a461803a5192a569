"""Every client of the zoo, streamed: results equal to those of a twin, weights that move, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fmstream
from fmstream.core.telemetry import Telemetry
from tests.clients.client import Built, Client, flat, named_modules_of, num_bytes, parameters_of
from tests.clients.zoo import CLIENTS

CALLS = 3
MODES = {0.35: torch.no_grad, 0.7: torch.inference_mode}

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The split of a reduction among threads is not what is tested here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Reads(TorchDispatchMode):
    """Collects the parameters whose storage an operation reads or writes; shape queries do not come here."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.by_storage = {p.untyped_storage().data_ptr(): p for p in params if p.numel()}
        self.seen: dict[int, nn.Parameter] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in self.by_storage:
                param = self.by_storage[leaf.untyped_storage().data_ptr()]
                self.seen[id(param)] = param
        return func(*args, **(kwargs or {}))


def called_bytes(built: Built) -> int:
    """Bytes of the parameters that one call uses."""
    with Reads(parameters_of(built.modules)) as reads:
        built.call()
    return num_bytes(reads.seen.values())


def build_twin(client: Client) -> Built:
    """A second build whose parameters lie at the 64-byte alignment of fast memory: kernels may depend on it."""
    twin = client.build()
    for param in parameters_of(twin.modules):
        param.data = param.data.clone()
    return twin


def parameter_objects(modules: Any) -> dict[str, nn.Parameter]:
    """Every name of every parameter."""
    return {
        f"{top}.{name}": param
        for top, module in named_modules_of(modules).items()
        for name, param in module.named_parameters(remove_duplicate=False)
    }


def state_of(modules: Any) -> dict[str, Tensor]:
    """The state dicts of all top modules in one."""
    return {
        f"{top}.{name}": value.detach().clone()
        for top, module in named_modules_of(modules).items()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }


def traces_of(modules: Any) -> dict[str, object]:
    """What a runtime could leave behind: types, attribute names and the number of hooks of every module."""
    left: dict[str, object] = {} if isinstance(modules, dict) else {"owner": sorted(vars(modules))}
    for top, root in named_modules_of(modules).items():
        for name, module in root.named_modules():
            hooks = {
                key: len(value) for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict)
            }
            left[f"{top}.{name}"] = (type(module).__qualname__, sorted(vars(module)), hooks)
    return left


def assert_equal(actual: list[Tensor], expected: list[Tensor], exact: bool = True) -> None:
    """Equal bits, or a difference of a few units in the last place of the largest number."""
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert (type(mine), mine.dtype) == (type(theirs), theirs.dtype)
        if exact or not theirs.is_floating_point():
            assert torch.equal(mine, theirs)
        else:
            last = 8 * torch.finfo(theirs.dtype).eps
            scale = theirs.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item() if theirs.numel() else 0.0
            torch.testing.assert_close(mine, theirs, rtol=last, atol=last * scale)


def assert_within(telemetry: Telemetry, memory: int) -> None:
    """Residents and window together never pass the memory given."""
    assert telemetry.passes
    assert max(record.resident_bytes + record.window_bytes for record in telemetry.passes) <= memory


@pytest.mark.parametrize("fraction", sorted(MODES))
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_streamed_call_equals_the_twin(client: Client, fraction: float) -> None:
    without_grad: type[AbstractContextManager[None]] = MODES[fraction]
    twin, built = build_twin(client), client.build()
    with without_grad():
        expected = [flat(twin.call()) for _ in range(CALLS)]
    state, traces = state_of(twin.modules), traces_of(twin.modules)
    assert all(expected), "a client must return tensors"
    with without_grad():
        used = called_bytes(client.build())

    before = parameter_objects(built.modules)
    weights = num_bytes(parameters_of(built.modules))
    memory = max(int(weights * fraction), fmstream.smallest_memory(built.modules))
    with fmstream.stream(built.modules, memory=memory, policy="overlap_async") as handle:
        with without_grad():
            first = flat(built.call())
            faulted = bool(handle.telemetry.faults)
            second = flat(built.call())
            planned = len(handle.telemetry.passes)
            third = flat(built.call())
        streamed = sum(record.streamed_bytes for record in handle.telemetry.passes[planned:])

        assert_equal(first, expected[0], exact=not faulted)
        assert_equal(second, expected[1])
        assert_equal(third, expected[2])
        assert streamed >= 0.9 * (used - memory)
        assert_within(handle.telemetry, memory)

    after = parameter_objects(built.modules)
    assert after.keys() == before.keys()
    assert all(after[name] is param for name, param in before.items())
    restored = state_of(built.modules)
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[name], value) for name, value in state.items())
    assert traces_of(built.modules) == traces
    for root in named_modules_of(built.modules).values():
        assert not any("_compiled_call_impl" in vars(module) for module in root.modules())

    assert_equal(third, expected[2])
    with without_grad():
        assert_equal(flat(built.call()), flat(twin.call()))


def test_zoo_is_large_and_its_names_are_unique() -> None:
    assert len(CLIENTS) >= 100
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
    assert all(client.tags for client in CLIENTS)
