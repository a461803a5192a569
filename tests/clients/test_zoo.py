"""Every client of the zoo, streamed: results equal to those of a twin, weights that move, and nothing left behind."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

import fmstream
from tests.clients.client import Client, flat, named_modules_of, num_bytes, parameters_of
from tests.clients.twins import (
    assert_equal,
    assert_within,
    build_twin,
    called_bytes,
    parameter_objects,
    state_of,
    traces_of,
)
from tests.clients.zoo import CLIENTS

CALLS = 3
MODES = {0.35: torch.no_grad, 0.7: torch.inference_mode}

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]


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
