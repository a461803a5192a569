"""Embedding tables that stay on the host: a prefill and a decode beside the resident table (modelled)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

import fmstream
from bench.contract import Bar, Findings, Row, Workplace, register
from fmstream import emulator
from fmstream.actors import gathers
from fmstream.doors.dry_run import unknown_values
from fmstream.payloads.embeddings import Tables

CLAIM: Final = (
    "A vocabulary table that stays on the host costs a prefill less than 3 % of its time, takes 1/50 of the resident "
    "table's device memory, and tables of every layer cost less than 2 %."
)
BARS: Final = {
    "vs_resident": Bar(at_most=1.03),
    "device_bytes_ratio": Bar(at_least=50),
    "per_layer_overhead": Bar(at_most=1.02),
}
CARD: Final = "rtx4070-laptop"
DTYPE: Final = torch.bfloat16
VOCABULARY: Final = 256 << 10
WIDTH: Final = 4096
CHUNK: Final = 2048
ROWS_BYTES: Final = 32 << 20
"""Memory that is given for rows; less is taken."""
GATHER_BYTES_PER_SECOND: Final = 6e9
"""Of one worker: below what the benchmark ``gather`` finds for rows of some kilobytes."""
NUM_WORKERS: Final = 2
LOOK_UP_SECONDS: Final = 100e-6
POSITION_SECONDS: Final = 100e-9
"""Host time of a look-up, and more for each position, whose ids are sorted: more than it was seen to take."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder without a head; ``per_layer_width`` is that of each layer's own table, 0 for none."""

    depth: int
    per_layer_width: int
    tokens: int


class Block(nn.Module):
    """Grouped attention with all that was seen before, and a gated MLP: those of a model of 8 billion weights."""

    def __init__(self, vocabulary: int, per_layer_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 14336, bias=False), nn.Linear(WIDTH, 14336, bias=False)
        self.down = nn.Linear(14336, WIDTH, bias=False)
        self.table: nn.Embedding | None = None
        if per_layer_width:
            self.table = nn.Embedding(vocabulary, per_layer_width)
            self.into = nn.Linear(per_layer_width, WIDTH, bias=False)

    def forward(self, x: Tensor, ids: Tensor, past: list[Tensor]) -> Tensor:
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (32, 128)).transpose(1, 2)
        kv = self.kv(y).unflatten(-1, (2, 8, 128)).permute(2, 0, 3, 1, 4)
        past.append(kv)
        k, v = (torch.cat([part[i] for part in past], 2) for i in range(2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        if self.table is not None:
            y = y + self.into(self.table(ids))
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Blocks behind a vocabulary table; what it has seen is kept from call to call until `forget`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(VOCABULARY, shape.per_layer_width) for _ in range(shape.depth))
        self.forget()

    def forget(self) -> None:
        """Begin a new sequence."""
        self.past: list[list[Tensor]] = [[] for _ in self.blocks]

    def forward(self, ids: Tensor, rows: Tensor | None = None) -> Tensor:
        x = self.embed(ids) if rows is None else rows
        for block, past in zip(self.blocks, self.past, strict=True):
            x = block(x, ids, past)
        return x


@register("embeddings", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Play each case on the emulated card with shapes alone; nothing is measured by a clock."""
    prefill = Shape(depth=8, per_layer_width=0, tokens=32 << 10)
    layered = Shape(depth=8, per_layer_width=256, tokens=CHUNK * (2 if place.quick else 8))
    emulator.install()
    try:
        place.say(f"prefill of {prefill.tokens} tokens")
        rows = [play.row("prefill") for play in _prefills(prefill)]
        place.say("a table for every layer")
        rows += [play.row("per-layer prefill") for play in _streamed_and_resident(layered, "prefill")]
        rows += [play.row("per-layer decode") for play in _streamed_and_resident(layered, "decode")]
        place.say("decode")
        rows += [play.row("decode") for play in _streamed_and_resident(prefill, "decode")]
    finally:
        emulator.uninstall()
    return Findings(_figures(rows), rows)


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    def row(case: str, contender: str) -> Row:
        return next(row for row in rows if (row["case"], row["contender"]) == (case, contender))

    def over(case: str, contender: str) -> float:
        return float(row(case, contender)["seconds"] / row(case, "resident")["seconds"])

    held = row("prefill", "resident")["peak_bytes"] - row("prefill", "streamed")["peak_bytes"]
    table_bytes = VOCABULARY * WIDTH * DTYPE.itemsize
    steps = row("decode", "resident")["steps"]
    more = (row("decode", "streamed")["seconds"] - row("decode", "resident")["seconds"]) / steps
    return {
        "vs_resident": over("prefill", "streamed"),
        "staged_vs_resident": over("prefill", "stage()"),
        "sync_vs_resident": over("prefill", "sync"),
        "device_bytes_ratio": table_bytes / max(1.0, table_bytes - held),
        "per_layer_overhead": max(over("per-layer prefill", "streamed"), over("per-layer decode", "streamed")),
        "decode_more_us": more * 1e6,
        "decode_vs_resident": over("decode", "streamed"),
    }


@dataclass(slots=True)
class Play:
    """What one contender took: modelled seconds, the most bytes on the device, and bytes over the link."""

    contender: str
    seconds: float = 0.0
    peak_bytes: int = 0
    link_bytes: int = 0
    steps: int = 0
    busy: dict[str, float] = field(default_factory=dict)

    def row(self, case: str) -> Row:
        return {
            "case": case,
            "contender": self.contender,
            "steps": self.steps,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "link_bytes": self.link_bytes,
            "compute_s": self.busy.get("compute", 0.0),
            "copy_in_s": self.busy.get("copy in", 0.0),
            "gather_s": self.busy.get("gather 0", 0.0),
        }


Work = Literal["prefill", "decode"]


def _prefills(shape: Shape) -> Iterator[Play]:
    yield from _streamed_and_resident(shape, "prefill")
    with _model(shape) as model:
        yield _by_hand("stage()", shape, model, _staged)
    with _model(shape) as model:
        yield _by_hand("sync", shape, model, _synchronous)


def _streamed_and_resident(shape: Shape, work: Work) -> Iterator[Play]:
    with _model(shape) as model:
        model.to("emu")
        yield _measured("resident", shape, model, work)
    with _model(shape) as model:
        memory = _place_all_but_tables(model) + ROWS_BYTES
        with fmstream.stream(model, device="emu", memory=memory) as handle:
            yield _measured("streamed", shape, model, work)
            assert handle.telemetry.row_bytes, "no rows were brought"


def _place_all_but_tables(model: nn.Module) -> int:
    """Bring everything but tables to the device; returns the bytes of these parameters."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    num_bytes = 0
    for param in model.parameters():
        if id(param) not in tables:
            param.data = param.data.to("emu")
            num_bytes += param.numel() * param.element_size()
    return num_bytes


@contextmanager
def _model(shape: Shape) -> Iterator[Decoder]:
    """A model whose parameters have addresses and no memory, on a new machine."""
    with torch.device("meta"):
        model = Decoder(shape).to(DTYPE).eval()
    emulator.reset(CARD, execution="dry", capacity=64 << 30, keep_timeline=False)
    with torch.no_grad(), unknown_values(), modelled_gathers():
        yield emulator.dry_parameters(model)  # type: ignore[misc]
    gc.collect()


def _ids(number: int, length: int) -> Tensor:
    """Ids of which some are used often, as words are."""
    generator = torch.Generator().manual_seed(number)
    return (torch.rand(1, length, generator=generator) ** 3 * VOCABULARY).long()


def _measured(name: str, shape: Shape, model: Decoder, work: Work) -> Play:
    """The second time of a prefill, or tokens after it, one by one."""
    chunks = [_ids(number, CHUNK) for number in range(shape.tokens // CHUNK)]

    def prefill() -> None:
        model.forget()
        for ids in chunks:
            model(ids.to("emu"))

    def decode() -> None:
        for number in range(16):
            model(_ids(number, 1).to("emu"))

    prefill()
    play = _timed(name, prefill if work == "prefill" else decode, len(chunks) if work == "prefill" else 16)
    model.forget()
    return play


def _by_hand(name: str, shape: Shape, model: Decoder, rows: Callable[[nn.Embedding, Tensor], Iterator[Tensor]]) -> Play:
    """A prefill whose rows come from elsewhere."""
    table, model.embed = model.embed, nn.Embedding(1, 1)  # it is not used
    model.to("emu")
    ids = torch.cat([_ids(number, CHUNK) for number in range(shape.tokens // CHUNK)], 1)

    def prefill() -> None:
        model.forget()
        for chunk in rows(table, ids):
            model(torch.zeros(1, CHUNK, dtype=torch.int64), chunk)

    prefill()
    play = _timed(name, prefill, shape.tokens // CHUNK)
    model.forget()
    return play


def _staged(table: nn.Embedding, ids: Tensor) -> Iterator[Tensor]:
    yield from fmstream.stage(table, ids, window=CHUNK, device="emu")


def _synchronous(table: nn.Embedding, ids: Tensor) -> Iterator[Tensor]:
    """As it is mostly done by hand: gather, copy, wait."""
    for chunk in ids.split(CHUNK, 1):
        rows = nn.functional.embedding(chunk, table.weight)
        emulator.machine().charge(rows.numel() * rows.element_size() / GATHER_BYTES_PER_SECOND, "gather")
        yield rows.to("emu")


def _timed(name: str, work: Callable[[], None], steps: int) -> Play:
    machine, device = emulator.machine(), torch.get_device_module("emu")
    device.synchronize()
    machine.reset_statistics()
    began = machine.now
    work()
    device.synchronize()
    found = machine.statistics()
    return Play(name, machine.now - began, found.peak_allocated, found.bytes_in, steps, dict(found.busy))


class ModelledGathers(gathers.Gathers):
    """Gathers that take their time on a lane of the host, and move nothing."""

    def begin(self, table: Tensor, ids: gathers.Ids, target: Tensor, keep: object = None) -> Any:
        num_bytes = target.numel() * target.element_size()
        machine, seconds = emulator.machine(), num_bytes / GATHER_BYTES_PER_SECOND
        if num_bytes <= self.inline_bytes:
            machine.charge(seconds, "gather")
            return None
        # Workers share a large gather, as the real ones do.
        lanes = [machine.lane(f"gather {number}") for number in range(NUM_WORKERS)]
        return ModelledTicket(max(lane.occupy(seconds / NUM_WORKERS, "rows", num_bytes)[1] for lane in lanes))

    def is_done(self, ticket: Any) -> bool:
        return bool(emulator.machine().now >= ticket.end)

    def wait(self, ticket: Any, check_stop: Callable[[], None]) -> None:
        emulator.machine().join_clock(ticket.end)

    def stop(self, ticket: Any) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ModelledTicket:
    """A gather that ends at a time of the machine."""

    end: float

    def raise_failure(self) -> None:
        """It does not fail."""


@contextmanager
def modelled_gathers() -> Iterator[None]:
    """Charge what the host does for look-ups to virtual time."""
    from fmstream.doors import stage
    from fmstream.payloads import embeddings

    bring = Tables._bring

    def charged(tables: Tables, rows: Any, master: Any, ids: Tensor) -> Tensor:
        emulator.machine().charge(LOOK_UP_SECONDS + ids.numel() * POSITION_SECONDS, "look up")
        return bring(tables, rows, master, ids)

    places: Sequence[Any] = (stage, embeddings)
    for place in places:
        place.Gathers = ModelledGathers
    Tables._bring = charged  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tables._bring = bring  # type: ignore[method-assign]
        for place in places:
            place.Gathers = gathers.Gathers
