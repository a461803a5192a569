"""A peer's steady step on the emulated card: modelled time, bytes over the link, reserved memory, races."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench.peers.contract import Peer, Row, Running
from bench.peers.ground import Ground
from bench.peers.shim import cuda_names
from fmstream import emulator
from fmstream.emulator.backlog import Execution

STEPS: Final = 4
"""The last one counts: by then every peer has seen the order of the modules and has filled its memory."""


@dataclass(frozen=True, slots=True)
class Steady:
    """The last step; seconds are modelled ones."""

    output: Tensor
    seconds: float
    compute_seconds: float
    link_seconds: float
    bytes_in: int


def measure(peer: Peer, ground: Ground, execution: Execution = "eager") -> Row:
    """A row of the table; ``skipped`` says why where the peer does not run.

    Times are in milliseconds of virtual time, memory and traffic in bytes and as shares of W. ``reserved_bytes`` is
    the peak of what the caching allocator took from the card since the peer got the model, ``pinned_bytes`` that of
    pinned host memory.
    """
    budget = int(peer.share * ground.weights_bytes)
    row: Row = {"peer": peer.name, "version": peer.version, "settings": peer.settings, "capacity_over_w": peer.share}
    try:
        with cuda_names(peer.packages) if peer.packages else nullcontext():
            row |= _measured(peer, ground, budget, execution)
    except Exception as error:  # a peer's failure is a result: the row carries it
        row["skipped"] = reason(error)
    return row


def reason(error: BaseException) -> str:
    """One line about an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _measured(peer: Peer, ground: Ground, budget: int, execution: Execution) -> Row:
    machine = emulator.reset(ground.card, execution=execution, check="record", capacity=budget)
    with _prepared(peer, ground, budget) as running, torch.no_grad():
        for _ in range(STEPS - 1):
            running.call(ground.x.to("emu")).cpu()
        steady = _step(running, ground)
        found = machine.statistics()
    weights = ground.weights_bytes
    return {
        "step_ms": steady.seconds * 1e3,
        "compute_ms": steady.compute_seconds * 1e3,
        "link_ms": steady.link_seconds * 1e3,
        "h2d_bytes": steady.bytes_in,
        "h2d_over_w": steady.bytes_in / weights,
        "reserved_bytes": found.peak_reserved,
        "reserved_over_w": found.peak_reserved / weights,
        "pinned_bytes": found.peak_pinned_bytes,
        "pinned_over_w": found.peak_pinned_bytes / weights,
        "races": found.num_reports,
        "equal": bool(torch.allclose(steady.output, ground.expected, rtol=1e-5, atol=1e-5)),
    }


@contextmanager
def _prepared(peer: Peer, ground: Ground, budget: int) -> Iterator[Running]:
    running = peer.prepare(copy.deepcopy(ground.net), budget)
    try:
        yield running
    finally:
        running.close()
        gc.collect()


def _step(running: Running, ground: Ground) -> Steady:
    machine = emulator.machine()
    before, began = machine.statistics(), machine.now
    output = running.call(ground.x.to("emu")).cpu()
    seconds, after = machine.now - began, machine.statistics()
    return Steady(
        output,
        seconds,
        after.busy["compute"] - before.busy["compute"],
        after.busy["copy in"] - before.busy["copy in"],
        after.bytes_in - before.bytes_in,
    )
