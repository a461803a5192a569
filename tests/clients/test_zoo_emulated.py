"""Every client of the zoo, streamed to the emulated accelerator: equal to a twin on it, and no access out of order."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import fmstream
from fmstream import emulator
from fmstream.emulator.backlog import Execution
from tests.clients.client import Client, flat, named_modules_of, num_bytes, parameters_of
from tests.clients.twins import assert_equal, assert_within, called_bytes, parameter_objects, state_of, traces_of
from tests.clients.zoo import CLIENTS

CALLS = 3
FRACTION = 0.35
CAPACITY = 256 << 20
SAMPLE = (
    "encoder_padded",
    "gru",
    "branches",
    "reader",
    "tied_parts",
    "odd_tensors",
    "llama_tied",
    "mixtral",
    "mamba",
    "albert",
    "t5_beams",
    "sam",
    "flux",
    "kl_tiled",
    "stable_diffusion",
)
"""Clients that differ in how they are called and in how their parameters are used."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:In (CPU|emu) autocast:UserWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    """The emulated device in PyTorch, and out again."""
    emulator.install()
    yield
    emulator.uninstall()


@dataclass(frozen=True)
class Expected:
    """What a twin on the device gives, call by call, and its state and traces after that.

    ``used`` is the bytes of the parameters that one call uses, ``kept`` the device memory that its modules hold then
    beside their parameters and buffers.
    """

    outputs: list[list[Tensor]]
    state: dict[str, Tensor]
    traces: dict[str, object]
    used: int
    kept: int


@functools.cache
def expected_of(client: Client) -> Expected:
    """Run a twin of a client on a device of its own, operation by operation."""
    used = called_bytes(client.build())
    machine = emulator.reset(capacity=CAPACITY)
    twin = client.build()
    for root in named_modules_of(twin.modules).values():
        root.to("emu")
    placed = machine.statistics().allocated
    outputs = [on_cpu(flat(twin.call("emu"))) for _ in range(CALLS)]
    kept = machine.statistics().allocated - placed
    state = {name: value.cpu() for name, value in state_of(twin.modules).items()}
    return Expected(outputs, state, traces_of(twin.modules), used, kept)


def on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Copies on the CPU."""
    return [tensor.cpu() for tensor in tensors]


@torch.no_grad()
def check(client: Client, execution: Execution) -> None:
    """Stream a client in some order of execution, compare it with its twin, and look for what is left behind."""
    expected = expected_of(client)
    assert all(expected.outputs), "a client must return tensors"
    built = client.build()
    before = parameter_objects(built.modules)
    memory = max(int(FRACTION * num_bytes(parameters_of(built.modules))), fmstream.smallest_memory(built.modules))
    machine = emulator.reset(capacity=CAPACITY, execution=execution, poison=True)
    with fmstream.stream(built.modules, memory=memory, device="emu") as handle:
        outputs = [flat(built.call("emu"))]
        faulted = bool(handle.telemetry.faults)
        outputs.append(flat(built.call("emu")))
        planned = len(handle.telemetry.passes)
        outputs.append(flat(built.call("emu")))
    streamed = sum(record.streamed_bytes for record in handle.telemetry.passes[planned:])

    # What came out is looked at only now, so that nothing had to wait for it before.
    for number, wanted in enumerate(expected.outputs):
        assert_equal(on_cpu(outputs[number]), wanted, exact=bool(number) or not faulted)
    assert streamed >= 0.9 * (expected.used - memory)
    assert_within(handle.telemetry, memory)
    assert not machine.reports

    after = parameter_objects(built.modules)
    assert after.keys() == before.keys()
    assert all(after[name] is param for name, param in before.items())
    assert all(param.device.type == "cpu" and not param.is_pinned() for param in after.values())
    assert machine.pinned.charged_bytes == 0
    outputs.clear()
    machine.synchronize()
    assert machine.statistics().allocated <= expected.kept
    restored = state_of(built.modules)
    assert restored.keys() == expected.state.keys()
    assert all(torch.equal(restored[name], value) for name, value in expected.state.items())
    assert traces_of(built.modules) == expected.traces


@pytest.mark.parametrize("execution", ["eager", "late"])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_streamed_client_equals_its_twin(client: Client, execution: Execution) -> None:
    check(client, execution)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("client", [c for c in CLIENTS if c.name in SAMPLE], ids=lambda client: client.name)
def test_any_order_of_execution_gives_the_same(client: Client, seed: int) -> None:
    check(client, seed)


def test_sample_is_of_the_zoo() -> None:
    assert set(SAMPLE) <= {client.name for client in CLIENTS}
