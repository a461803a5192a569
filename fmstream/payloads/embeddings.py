"""The payload of embedding tables: a large table stays on the host, and only the rows that are used cross the link.

Nothing is put into the modules for it.  A table's stand-in answers ``torch.nn.functional.embedding``, so that whatever
a subclass does before and after is run as it is.  On the CPU rows are read from the master's own memory, which for a
mapped file brings the pages that are touched and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from fmstream.actors.gathers import Gathers, Ids
from fmstream.actors.rows import IN_FLIGHT, SLOT_BYTES, Fetch, Rows, batch_bytes, positions_that_fit
from fmstream.config import StreamConfig
from fmstream.core.telemetry import Telemetry
from fmstream.device.accelerator import Accelerator
from fmstream.errors import IdsError
from fmstream.payloads import transforms
from fmstream.payloads.master import Master
from fmstream.payloads.sites import Site

MIN_TABLE_BYTES = 1 << 20
"""A smaller table is streamed as any weight is: that takes hardly longer than asking which rows are used."""
CHUNK_BYTES: Final = 4 << 20
"""Rows that are copied at once, where the options do not say: far more than what a copy costs beside its bytes."""
RING_SHARE: Final = 8
"""Rows take at most one part in so many of the memory given, but always room for a position of each kind."""


def find_tables(sites: Sequence[Site], masters: Sequence[Master], as_weights: set[int]) -> set[int]:
    """Ids of tables from which rows can be taken, whatever else their parameters are used for.

    Args:
        sites, masters: of a survey.
        as_weights: ``id`` of parameters that must be streamed as weights.
    """
    return {
        master.index
        for site in sites
        for master in _own_tables(site, masters)
        if id(master.original) not in as_weights and master.span >= MIN_TABLE_BYTES
    }


def release(sites: Sequence[Site], masters: Sequence[Master], tables: set[int]) -> set[int]:
    """Let embeddings no longer bind their tables; returns the tables that now nothing binds."""
    for site in sites:
        own = {master.index for master in _own_tables(site, masters)} & tables
        site.params = [param for param in site.params if param not in own]
    return tables.difference(param for site in sites for param in site.params)


def least_row_bytes(tables: Sequence[Master]) -> int:
    """The least device memory for rows of some tables: two positions of the widest."""
    return IN_FLIGHT * max((batch_bytes(1, _row_bytes(master)) for master in tables), default=0)


def _own_tables(site: Site, masters: Sequence[Master]) -> list[Master]:
    module = site.module
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or site.is_unit or site.is_whole:
        return []
    return [
        master
        for master in masters
        if master.index in site.params
        and any(holder is module._parameters and key == "weight" for holder, key in master.slots)
        and _is_table(master.original)
    ]


def _is_table(param: torch.Tensor) -> bool:
    return type(param) is nn.Parameter and param.dim() == 2 and param.is_contiguous() and param.numel() > 0


@dataclass(slots=True, eq=False)
class _Known:
    """Ids that were brought to the host in this pass.

    The tensor is kept, so that no other one takes its place in memory.
    """

    tensor: torch.Tensor
    version: int
    ids: Ids

    def is_of(self, tensor: torch.Tensor) -> bool:
        own = self.tensor
        if tensor.is_inference() or tensor._version != self.version:
            return False
        return tensor is own or (
            tensor.data_ptr() == own.data_ptr()
            and tensor.dtype == own.dtype
            and tensor.size() == own.size()
            and tensor.stride() == own.stride()
        )


def host_ids(ids: torch.Tensor) -> Ids:
    """Ids as int64 on the host, in order.  Where they are on an accelerator, the host waits for them."""
    return np.ascontiguousarray(ids.to("cpu", torch.int64).reshape(-1).numpy())


def check_ids(ids: Ids, num_rows: int, name: str) -> None:
    """Raise `IdsError` for an id that is no row of a table."""
    if len(ids) == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_rows:
        bad = low if low < 0 else high
        position = int(np.flatnonzero(ids == bad)[0])
        raise IdsError(
            f"index out of range: id {bad} at position {position} is no row of {name!r}, which has {num_rows} of them "
            f"(0 to {num_rows - 1}); nothing was moved"
        )


class Tables:
    """The tables of a session.

    ``device`` is the accelerator that rows are brought to, None where the host computes.  Any thread may look rows up.
    """

    def __init__(
        self,
        device: Accelerator | None,
        telemetry: Telemetry,
        config: StreamConfig,
        check_stop: Callable[[], None],
        as_weight: Callable[[Master], None],
    ) -> None:
        self._telemetry = telemetry
        self._window = None if config.prefetch_window == "auto" else config.prefetch_window
        self._as_weight = as_weight
        self._lock = threading.RLock()
        self._masters: list[Master] = []
        self._known: list[_Known] = []
        self._seen: list[tuple[int, int]] = []
        """Which ids (by the order in which they came to the host) each table was asked for in this pass."""
        self._last: list[tuple[int, int]] = []
        """The same of the pass before: what this one is expected to ask for."""
        self._ahead: dict[tuple[int, int], tuple[Fetch, int]] = {}
        """Fetches that were begun before they were asked for, each with the table's version."""
        self.read_ids = host_ids
        """Brings ids to the host."""
        self._gathers = Gathers(config.num_workers)
        self._rows = None if device is None else Rows(device, self._gathers, check_stop)

    def gather_with(self, gathers: Gathers) -> None:
        """Let others gather, before the first rows are looked up."""
        self._gathers = gathers
        if self._rows is not None:
            self._rows.gathers = gathers

    def choose(self, masters: Sequence[Master]) -> None:
        """Look rows of these tables up from now on."""
        self._masters = list(masters)
        for master in masters:
            master.look_up = self.look_up

    @property
    def is_any(self) -> bool:
        """Whether there are tables."""
        return bool(self._masters)

    # Memory

    def least_bytes(self) -> int:
        """The least device memory for rows."""
        return 0 if self._rows is None else least_row_bytes(self._masters)

    def take_share(self, memory: int | None, spare: int) -> int:
        """Decide how much of the ``memory`` given is for rows (None: it is not counted); returns the bytes.

        ``spare`` is what the least that works leaves of it.
        """
        if self._rows is None or not self._masters:
            return 0
        least = self.least_bytes()
        num_bytes = IN_FLIGHT * max(self._wanted_bytes(master) for master in self._masters)
        if memory is not None:
            num_bytes = max(least, min(num_bytes, memory // RING_SHARE, least + max(0, spare)))
        num_bytes -= num_bytes % SLOT_BYTES
        if num_bytes != self._rows.ring_bytes:
            self._rows.reset()
            self._rows.ring_bytes = num_bytes
        return num_bytes

    def _wanted_bytes(self, master: Master) -> int:
        row_bytes = _row_bytes(master)
        window = self._window or max(1, positions_that_fit(CHUNK_BYTES, row_bytes))
        return batch_bytes(window, row_bytes)

    @property
    def held_bytes(self) -> int:
        """Device memory that is held for rows."""
        return 0 if self._rows is None else self._rows.held_bytes

    # Looking up

    def look_up(self, master: Master, ids: torch.Tensor) -> torch.Tensor | None:
        """What ``F.embedding(ids, table)`` is; None where the caller must see to it.

        Raises:
            IdsError: an id is no row; nothing was moved.
        """
        if transforms.are_active() or master.bound is not None:
            return None
        if master.requires_grad and torch.is_grad_enabled():
            self._as_weight(master)
            return None
        if ids.dtype not in (torch.int32, torch.int64) or ids.device != master.device:
            refuse_like_torch(ids, master.dtype, master.device)
            return None
        self._telemetry.num_lookups += 1
        if self._rows is None:
            return nn.functional.embedding(ids, master.memory())
        with self._lock:
            return self._bring(self._rows, master, ids)

    def _bring(self, rows: Rows, master: Master, ids: torch.Tensor) -> torch.Tensor:
        number = self._number(ids)
        known = self._known[number].ids
        check_ids(known, master.size[0], master.name)
        out = torch.empty((*ids.shape, master.size[1]), dtype=master.dtype, device=master.device)
        key = (number, master.index)
        fetch, version = self._ahead.pop(key, (None, 0))
        if fetch is not None and (version != master.version() or not fetch.is_whole):
            fetch.drop()
            fetch = None
        before = rows.copied_bytes
        if len(known):
            with torch.no_grad():
                flat = out.view(-1, master.size[1])
                if fetch is not None:
                    fetch.into(flat)
                elif not rows.bring_now(master.memory(), known, flat):
                    self._fetch(rows, master, known).into(flat)
        self._seen.append(key)
        if master.keeper.is_in_pass:
            self._begin_ahead(rows, number)
        else:
            self._known.clear()
        self._telemetry.row_bytes += rows.copied_bytes - before
        return out

    def _fetch(self, rows: Rows, master: Master, ids: Ids) -> Fetch:
        row_bytes = _row_bytes(master)
        most = max(1, positions_that_fit(rows.ring_bytes // IN_FLIGHT, row_bytes))
        chunk = min(most, self._window) if self._window else most
        return Fetch(rows, master.memory(), ids, chunk)

    def _number(self, ids: torch.Tensor) -> int:
        """Which of the ids of this pass these are; new ones are brought to the host."""
        for number, known in enumerate(self._known):
            if known.is_of(ids):
                return number
        version = 0 if ids.is_inference() else ids._version
        self._known.append(_Known(ids, version, self.read_ids(ids)))
        return len(self._known) - 1

    def _begin_ahead(self, rows: Rows, number: int) -> None:
        """Begin what the last pass asked for with the same ids, as far as there is room."""
        if self._known[number].tensor.is_inference():
            return
        seen = set(self._seen)
        for key in self._last:
            if key[0] != number or key in seen:
                continue
            if key not in self._ahead:
                master = next((master for master in self._masters if master.index == key[1]), None)
                if master is None or master.keeper.is_watched(master) or not _are_rows(self._known[number].ids, master):
                    continue
                self._ahead[key] = (self._fetch(rows, master, self._known[number].ids), master.version())
            if not self._ahead[key][0].begin():
                return

    # Staying true

    def changed(self, master: Master) -> None:
        """A table's bytes changed: what was gathered from it is stale."""
        with self._lock:
            for key in [key for key in self._ahead if key[1] == master.index]:
                self._ahead.pop(key)[0].drop()

    def settle(self) -> None:
        """Wait until no gather reads a table."""
        if self._rows is not None:
            with self._lock:
                self._rows.settle()

    # Passes

    def end_pass(self) -> None:
        """A pass is over: its ids may change from now on."""
        for fetch, _ in self._ahead.values():
            fetch.drop()
        self._ahead.clear()
        self._known.clear()
        if self._seen:
            self._last, self._seen = self._seen, []

    def abort_pass(self) -> None:
        """A pass failed at any point: nothing is on its way, and no device memory is held."""
        self._ahead.clear()
        self._known.clear()
        self._seen = []
        self.give_back()

    def give_back(self) -> None:
        """Hold no device memory until rows are looked up again."""
        if self._rows is not None:
            self._rows.reset()

    def shrink(self) -> None:
        """Get by with the least device memory from now on."""
        if self._rows is not None and self._rows.ring_bytes > (least := self.least_bytes()):
            self._rows.reset()
            self._rows.ring_bytes = least

    def close(self) -> None:
        """Stop; may be called again."""
        self.abort_pass()
        self._masters.clear()
        self._last = []
        self._gathers.close()


def _row_bytes(master: Master) -> int:
    return int(master.size[1]) * master.dtype.itemsize


def _are_rows(ids: Ids, master: Master) -> bool:
    return len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < master.size[0]


def refuse_like_torch(ids: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """For ids of a wrong type, or in a wrong place: raise what looking them up in a table on the device would raise."""
    nn.functional.embedding(ids, torch.zeros((1, 1), dtype=dtype, device=device))
