"""Dry steps of a streamed model on an emulated card, against the same step with all weights there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream import emulator
from fmstream.doors.dry_run import DryRun, emulated_card, unknown_values, without_memory
from fmstream.doors.subjects import Subject
from fmstream.errors import ConfigError, MemoryBudgetError

WIDTH, LAYERS = 2048, 12
WEIGHTS_BYTES = LAYERS * (WIDTH + 1) * WIDTH * 2


class Layers(nn.Module):
    """Linear layers, and a buffer that is too large to have values in a dry run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))
        self.register_buffer("table", torch.zeros(64, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) to the same shape."""
        x = x + self.table.sum(0)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def subject(num_tokens: int) -> Subject:
    with torch.device("meta"):
        module = Layers().eval().requires_grad_(False)
    return Subject(
        "layers",
        module,
        "one call",
        lambda device: ((torch.empty(num_tokens, WIDTH, dtype=torch.bfloat16, device=device),), {}),
    )


@pytest.fixture
def card() -> Iterator[emulator.Card]:
    with emulated_card("rtx4070-laptop") as found:
        yield found


@pytest.mark.parametrize("num_tokens", [256, 8192], ids=["link-bound", "compute-bound"])
def test_a_pass_on_demand_has_the_times_of_a_resident_one(card: emulator.Card, num_tokens: int) -> None:
    dry = DryRun(card, subject(num_tokens))
    resident, seen = dry.resident(), dry.look()
    assert seen.trace.seconds == pytest.approx(resident.seconds, rel=1e-3)
    assert seen.trace.num_bytes == WEIGHTS_BYTES
    assert len(seen.trace.calls) == LAYERS
    assert seen.costs.bytes_per_second == pytest.approx(card.h2d_bytes_per_second, rel=1e-3)
    assert WEIGHTS_BYTES // LAYERS <= seen.smallest_bytes < 2 * WEIGHTS_BYTES // LAYERS
    assert 2 * num_tokens * WIDTH * 2 <= resident.activation_bytes <= 5 * num_tokens * WIDTH * 2


@pytest.mark.parametrize("num_tokens", [256, 8192], ids=["link-bound", "compute-bound"])
def test_the_streamed_step_is_near_its_bound(card: emulator.Card, num_tokens: int) -> None:
    dry, memory = DryRun(card, subject(num_tokens)), WEIGHTS_BYTES // 2
    resident, streamed = dry.resident(), dry.streamed(memory, "overlap_async")
    bound = max(resident.seconds, (WEIGHTS_BYTES - memory) / card.h2d_bytes_per_second)
    # Two layers of twelve have to be there besides the residents: the link brings two more.
    assert bound <= streamed.seconds <= 1.5 * bound
    assert 0.9 * (WEIGHTS_BYTES - memory) <= streamed.link_bytes <= WEIGHTS_BYTES
    assert streamed.weight_bytes <= memory


def test_a_dry_run_repeats_to_the_digit_and_leaves_the_subject_as_it_was(card: emulator.Card) -> None:
    given = subject(512)
    before = {name: id(tensor) for name, tensor in given.module.state_dict(keep_vars=True).items()}
    dry = DryRun(card, given)
    assert dry.resident() == dry.resident()
    assert dry.streamed(WEIGHTS_BYTES // 3, "overlap_async") == dry.streamed(WEIGHTS_BYTES // 3, "overlap_async")
    assert {name: id(tensor) for name, tensor in given.module.state_dict(keep_vars=True).items()} == before
    assert all(tensor.is_meta for tensor in given.module.state_dict().values())
    assert "_compiled_call_impl" not in vars(given.module)


def test_parameters_that_are_shared_are_counted_once(card: emulator.Card) -> None:
    given = subject(256)
    given.module.layers[3].weight = given.module.layers[0].weight
    copied = without_memory(given.module)
    assert copied.layers[3].weight is copied.layers[0].weight
    assert DryRun(card, given).look().trace.num_bytes < WEIGHTS_BYTES - WIDTH * WIDTH


def test_a_module_with_values_is_not_touched(card: emulator.Card) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    given = Subject("small", module, "one call", lambda device: ((torch.zeros(4, 8).to(device),), {}))
    DryRun(card, given).resident()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())


def test_too_little_memory_is_refused(card: emulator.Card) -> None:
    with pytest.raises(MemoryBudgetError, match="smallest that works"):
        DryRun(card, subject(256)).streamed(WIDTH * WIDTH, "overlap_async")


def test_a_module_without_weights_is_refused(card: emulator.Card) -> None:
    given = Subject("none", nn.ReLU(), "one call", lambda device: ((torch.zeros(4).to(device),), {}))
    with pytest.raises(ConfigError, match="no weights"):
        DryRun(card, given).look()


def test_an_unknown_card_is_refused_and_pytorch_is_as_before_afterwards() -> None:
    before = torch.Tensor.item
    with pytest.raises(ConfigError, match="did you mean 'rtx4090'"), emulated_card("rtx409"):
        pass
    with emulated_card("h200"):
        assert torch.Tensor.item is not before
    assert torch.Tensor.item is before


def test_auto_takes_little_before_it_has_seen_a_pass(card: emulator.Card) -> None:
    """The user's own tensors are made before the first call: they find the card free."""
    given = subject(256)
    emulator.reset(card, execution="dry", capacity=2 * WEIGHTS_BYTES)
    with unknown_values(), torch.no_grad():
        module = without_memory(given.module)
        with fmstream.stream(module, device="emu", memory="auto", pinned=1 << 40) as handle:
            held = torch.get_device_module("emu").max_memory_allocated()
            args, _ = given.inputs(torch.device("emu"))
            assert handle(*args).shape == (256, WIDTH)
    assert held < 2.5 * WEIGHTS_BYTES / LAYERS
