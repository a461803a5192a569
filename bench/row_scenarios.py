"""Small runs on the emulated device in which every fence of the way of table rows is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

import fmstream
from fmstream import emulator
from fmstream.actors.gathers import Gathers, Ids

ROWS: Final = 2000
WIDTH: Final = 256
WINDOW: Final = 96
"""Positions whose rows are gathered by a worker; fewer would be gathered by whoever asks."""


class Reader(nn.Module):
    """Two tables whose rows are read, with a layer between, some times over."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times
        torch.manual_seed(9)
        self.first, self.second = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids)
        for _ in range(self.times):
            x = torch.tanh(self.layer(x + self.first(ids)))
            x = torch.tanh(self.layer(x + self.second(ids)))
        return x


def ids_of(number: int, length: int) -> Tensor:
    """Ids, some of them often."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, ROWS // 4, (length,), generator=generator)


def row_passes() -> None:
    """Many rows in each pass, in a ring that holds two windows; the second table is read ahead."""
    _use_memory(1 << 20)
    _passes(Reader(), WINDOW, 5 * WINDOW, 6)


def few_rows() -> None:
    """Few rows, again and again in a pass, brought in the stream that computes."""
    _passes(Reader(8), 2, 2, 2)


def _passes(module: Reader, window: int, length: int, number: int) -> None:
    inputs = [ids_of(k, length).to("emu") for k in range(number)]
    with fmstream.stream(module, memory="40%", prefetch_window=window, device="emu"):
        for ids in inputs:
            module(ids)


def windows_by_hand() -> None:
    """Windows of one table, each used by a kernel that takes a while."""
    _use_memory(1 << 20)
    table, x = nn.Embedding(ROWS, WIDTH), torch.ones(WINDOW, WIDTH, device="emu")
    for rows in fmstream.stage(table, ids_of(0, 12 * WINDOW), window=WINDOW, device="emu"):
        x = torch.tanh(x @ rows.T @ rows)


def windows_in_a_side_stream() -> None:
    """Windows that another stream uses, whose memory is used for something else once they are closed."""
    device = torch.get_device_module("emu")
    side = device.Stream()
    table, x = nn.Embedding(ROWS, WIDTH), torch.ones(WINDOW, WIDTH, device="emu")
    side.wait_stream(device.current_stream())
    wide = 16 * WINDOW  # memory of other sizes comes from elsewhere
    staged = fmstream.stage(table, ids_of(0, 4 * wide), window=wide, device="emu")
    next(staged)  # whose memory is this stream's
    with device.stream(side):
        torch.mm(x, x.T)
        for _ in range(3):
            next(staged)
    staged.close()
    _use_memory(3 * wide * WIDTH * 4)  # where the ring and a window were, whichever came first


def _use_memory(num_bytes: int) -> None:
    """Let a kernel write memory that is free right after, as the host sees it."""
    torch.zeros(num_bytes, dtype=torch.uint8, device="emu")


ROW_SCENARIOS: Final = (row_passes, few_rows, windows_by_hand, windows_in_a_side_stream)
"""In each of these the checker finds nothing."""


@contextmanager
def watched_gathers() -> Iterator[None]:
    """Let the checker see what gathers write to pinned memory: when they are handed over, and when they have ended."""
    begin, is_done, wait = Gathers.begin, Gathers.is_done, Gathers.wait
    targets: dict[int, tuple[int, int]] = {}

    def written(span: tuple[int, int]) -> None:
        emulator.machine().host_access((), (span,), "a gather to staging")

    def beginning(self: Gathers, table: Tensor, ids: Ids, target: Tensor, keep: object = None) -> Any:
        span = (target.data_ptr(), target.numel() * target.element_size())
        written(span)
        ticket = begin(self, table, ids, target, keep)
        if ticket is not None:
            targets[id(ticket)] = span
        return ticket

    def ended(ticket: Any) -> None:
        if (span := targets.pop(id(ticket), None)) is not None:
            written(span)

    def asking(self: Gathers, ticket: Any) -> bool:
        done = is_done(self, ticket)
        if done:
            ended(ticket)
        return done

    def waiting(self: Gathers, ticket: Any, check_stop: Any) -> None:
        wait(self, ticket, check_stop)
        ended(ticket)

    Gathers.begin, Gathers.is_done, Gathers.wait = beginning, asking, waiting  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Gathers.begin, Gathers.is_done, Gathers.wait = begin, is_done, wait  # type: ignore[method-assign]
