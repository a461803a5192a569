"""Where the device has no room: for the user's own tensors, or for the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream.errors import MemoryBudgetError
from tests.accelerator.cases import WIDTH, call, x
from tests.accelerator.kit import CAPACITY, Left, equal, fresh, here, on_host, streaming, twin_on
from tests.kit import budget, mlp

MIB = 1 << 20


class Hungry(nn.Module):
    """Takes as much device memory as it is told to, between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(4, WIDTH, 1), mlp(4, WIDTH, 2)
        self.num_bytes = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        extra = torch.zeros(self.num_bytes, dtype=torch.uint8, device=x.device)
        return self.second(x) + extra[:1].sum()  # type: ignore[no-any-return]


def test_activations_that_do_not_fit_raise_and_the_handle_works_on() -> None:
    fresh()
    module = Hungry()
    module.num_bytes = 1024
    twin = twin_on(module)
    with torch.no_grad(), streaming(module) as handle:
        for number in range(6):
            if number in (1, 4):
                module.num_bytes = CAPACITY
                with pytest.raises(torch.OutOfMemoryError):
                    call(module, number)
                module.num_bytes = 1024
            equal(on_host(call(module, number)), on_host(call(twin, number)))
        assert handle.telemetry.passes[-1].policy != "trace"


def test_weights_that_do_not_fit_say_what_to_lower() -> None:
    machine = fresh(capacity=24 * MIB)
    module = mlp(8, 1024)
    before = Left(module)
    with pytest.raises(MemoryBudgetError, match=r"no room for \d+ bytes of weights .* give a smaller memory="):
        fmstream.stream(module, memory="90%", device=here.name)
    before.check(module)
    assert machine.pinned.charged_bytes == 0
    with torch.no_grad(), streaming(module, memory="12MiB"):
        module(x(2, 1024))


def test_memory_that_the_user_takes_later_does_not_matter() -> None:
    fresh()
    module = mlp(8, WIDTH)
    twin = twin_on(module)
    taken: list[Tensor] = []
    with torch.no_grad(), streaming(module, budget(module, 0.3) / budget(module, 1.0), keeps=True):
        for number in range(4):
            equal(on_host(call(module, number)), on_host(call(twin, number)))
            taken.append(torch.zeros(8 * MIB, dtype=torch.uint8, device=here.name))
