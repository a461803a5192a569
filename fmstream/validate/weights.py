"""Trials of streamed weights: copy, compute, verify."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fmstream.doors.load import load
from fmstream.doors.stream import smallest_memory, stream
from fmstream.policies import names
from fmstream.report.units import format_bytes
from fmstream.validate.outcome import Outcome, expect
from fmstream.validate.place import Place

PART: Final = "weights"
BLOCKS: Final = 8
WIDTH: Final = 256
FRACTION: Final = 0.3
"""Memory that is given, from the least that works (0) to all weights (1)."""
CALLS: Final = 5
"""The first call is recorded; those after it follow a plan."""
STREAMED_SHARE: Final = 0.9
"""Of the weights that have no room, this part at least must come over the link in a pass: else nothing was tried."""


class Block(nn.Module):
    """A residual block, float32 [n, WIDTH]; its scale is read outside the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Add to what comes in."""
        added: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + self.scale * added


def make_model() -> nn.Module:
    """Some blocks, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(BLOCKS))).eval().requires_grad_(False)


def try_weights(place: Place) -> Iterator[Outcome]:
    """Stream a small model in every way, and compare with what it gives unstreamed on the same device."""
    for name in names():
        yield place.carry_out(PART, f"policy {name}", partial(_stream, policy=name))
    yield place.carry_out(PART, "from a file", _stream_file)
    if place.has_pins:
        yield place.carry_out(PART, "without pinned memory", partial(_stream, pinned=0))


def _stream(device: str, **options: Any) -> str:
    return compare(make_model(), device, **options)


def _stream_file(device: str) -> str:
    with tempfile.TemporaryDirectory(prefix="fmstream-") as folder:
        file = Path(folder) / "model.safetensors"
        save_file(make_model().state_dict(), file)
        return compare(load(make_model, file).eval().requires_grad_(False), device)


def compare(model: nn.Module, device: str, **options: Any) -> str:
    """Stream a model and compare outputs, bytes and weights; returns what was done, or raises `Mismatch`."""
    given = torch.randn(CALLS, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    total = sum(tensor.numel() * tensor.element_size() for tensor in before.values())
    least = smallest_memory(model)
    memory = least + int(FRACTION * (total - least))
    with torch.inference_mode():
        twin = copy.deepcopy(model).to(device)
        expected = [twin(one.to(device)).cpu() for one in given]
        del twin
        with stream(model, memory=memory, device=device, **options) as streamed:
            outputs = [streamed(one.to(device)) for one in given]
            found = [output.cpu() for output in outputs]
    last = streamed.telemetry.passes[-1]
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        expect(torch.equal(ours, theirs), f"call {number}: {differing(ours, theirs)} differ from the unstreamed run's")
    wanted = int(STREAMED_SHARE * (total - memory))
    expect(
        last.streamed_bytes >= wanted,
        f"the last call brought {last.streamed_bytes} bytes of weights, less than the {wanted} that have no room",
    )
    for name, tensor in model.state_dict().items():
        expect(torch.equal(tensor, before[name]), f"{name} is not as before: {differing(tensor, before[name])} differ")
    return (
        f"{CALLS} calls equal bit for bit; {format_bytes(last.streamed_bytes)} of {format_bytes(total)} brought in a "
        f"call, in {format_bytes(memory)} of memory; weights unchanged"
    )


def differing(ours: Tensor, theirs: Tensor) -> str:
    """How many values of two tensors of the same shape are not the same, and for floats by how much at most."""
    if ours.shape != theirs.shape:
        return f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
    counted = f"{int((ours != theirs).sum())} of {ours.numel()} values"
    if not ours.is_floating_point():
        return counted
    return f"{counted} (by up to {(ours.double() - theirs.double()).abs().max().item():.2g})"
