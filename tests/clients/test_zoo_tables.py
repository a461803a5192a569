"""Text models whose embedding tables stay on the host: equal to their twins in every order of execution."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import fmstream
from fmstream import emulator
from fmstream.emulator.backlog import Execution
from fmstream.payloads import embeddings
from tests.clients.client import Client, client, flat, forward, ids, num_bytes, parameters_of
from tests.clients.language import LANGUAGE, T5
from tests.clients.test_zoo_emulated import CALLS, CAPACITY, FRACTION, expected_of, installed, on_cpu
from tests.clients.twins import assert_equal, assert_within, parameter_objects, state_of

__all__ = ["installed"]

ENCODERS = [
    client("t5_encoder", lambda: forward(tf.T5EncoderModel(tf.T5Config(**T5)), ids()), "encoder"),
    client("umt5_encoder", lambda: forward(tf.UMT5EncoderModel(tf.UMT5Config(**T5)), ids()), "encoder"),
]
"""The text encoders of image and video pipelines."""
CLIENTS = [*LANGUAGE, *ENCODERS]
SAMPLE = ("llama", "llama_tied", "gemma3n", "t5", "t5_beams", "t5_encoder", "umt5_encoder")
"""Those that are run in many orders."""


@pytest.fixture(autouse=True)
def tiny_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of tiny models count as large."""
    monkeypatch.setattr(embeddings, "MIN_TABLE_BYTES", 1)


@torch.no_grad()
def check(client: Client, execution: Execution) -> None:
    """Stream a client whose tables are looked up by rows, and compare it with its twin on the device."""
    expected = expected_of(client)
    built = client.build()
    before = parameter_objects(built.modules)
    memory = max(int(FRACTION * num_bytes(parameters_of(built.modules))), fmstream.smallest_memory(built.modules))
    machine = emulator.reset(capacity=CAPACITY, execution=execution, poison=True)
    with fmstream.stream(built.modules, memory=memory, device="emu") as handle, emulator.host_guard():
        outputs = [flat(built.call("emu"))]
        faulted = bool(handle.telemetry.faults)
        outputs += [flat(built.call("emu")) for _ in range(CALLS - 1)]
        telemetry = handle.telemetry
    for number, wanted in enumerate(expected.outputs):
        assert_equal(on_cpu(outputs[number]), wanted, exact=bool(number) or not faulted)
    assert telemetry.num_lookups or client.name not in SAMPLE
    if telemetry.table_bytes:
        assert telemetry.num_lookups
        assert telemetry.row_bytes
    assert_within(telemetry, memory)
    assert not machine.reports
    after = parameter_objects(built.modules)
    assert all(after[name] is param for name, param in before.items())
    assert machine.pinned.charged_bytes == 0
    outputs.clear()
    machine.synchronize()
    assert machine.statistics().allocated <= expected.kept
    restored = state_of(built.modules)
    assert all(torch.equal(restored[name], value) for name, value in expected.state.items())


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_tables_of_any_text_model(client: Client) -> None:
    check(client, "eager")


@pytest.mark.parametrize("execution", ["late", 1, 2, 3])
@pytest.mark.parametrize("client", [c for c in CLIENTS if c.name in SAMPLE], ids=lambda client: client.name)
def test_tables_in_any_order_of_execution(client: Client, execution: Execution) -> None:
    check(client, execution)


def test_sample_is_of_the_zoo() -> None:
    assert set(SAMPLE) <= {client.name for client in CLIENTS}
