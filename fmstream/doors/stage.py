"""Rows of a table, window by window: each is on the device when it is asked for, and the next ones are on their way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fmstream.actors.gathers import Gathers, Ids, as_bits
from fmstream.actors.host_workers import Ticket
from fmstream.actors.rows import IN_FLIGHT, Fetch, Rows, batch_bytes
from fmstream.device.accelerator import Accelerator
from fmstream.device.opening import open_device
from fmstream.errors import ConfigError
from fmstream.payloads.embeddings import check_ids, host_ids, refuse_like_torch
from fmstream.payloads.master import Master

AHEAD: Final = 2
"""Windows on their way beside the one in use: one is copied while another is gathered."""


class _HostFetch:
    """A window that the host computes with: gathered to memory of its own."""

    def __init__(self, gathers: Gathers, table: Tensor, ids: Ids) -> None:
        self._gathers, self._table, self._ids = gathers, table, ids
        self._rows: Tensor | None = None
        self.ticket: Ticket | None = None

    def begin(self) -> bool:
        if self._rows is None:
            with torch.inference_mode(False):
                self._rows = torch.empty(len(self._ids), self._table.shape[1], dtype=self._table.dtype, device="cpu")
            self.ticket = self._gathers.begin(self._table, self._ids, self._rows)
        return True

    def tickets(self) -> list[Ticket]:
        return [] if self.ticket is None else [self.ticket]

    def into(self, out: Tensor) -> None:
        self.begin()
        assert self._rows is not None
        if self.ticket is not None:
            self._gathers.wait(self.ticket, _go_on)
        as_bits(out).copy_(as_bits(self._rows))


def _go_on() -> None:
    """Nobody stops this from outside."""


class Staged(Iterator[Tensor], AsyncIterator[Tensor]):
    """The windows of `stage`, in order; a context manager.  Use it from one thread.

    It closes itself after the last window, and when an error comes out of it.
    """

    def __init__(self, table: Tensor, ids: Tensor, window: int, shape: _Shaper, device: Accelerator | None) -> None:
        self._table = table
        self._ids = ids
        self._window = window
        self._shape = shape
        self._device = device
        self._gathers = Gathers()
        self._rows = None if device is None else Rows(device, self._gathers, _go_on)
        self._next = 0
        self._begun: deque[tuple[Fetch | _HostFetch, Tensor]] = deque()
        self._closed = self._released = False

    @property
    def row_bytes(self) -> int:
        """Bytes that crossed the link so far; 0 where the host computes."""
        return 0 if self._rows is None else self._rows.copied_bytes

    @property
    def held_bytes(self) -> int:
        """Device memory that is held for windows on their way."""
        return 0 if self._rows is None else self._rows.held_bytes

    def __len__(self) -> int:
        """Windows that are still to come."""
        return 0 if self._closed else -(-(self._ids.shape[-1] - self._next) // self._window) + len(self._begun)

    def __iter__(self) -> Staged:
        return self

    def __next__(self) -> Tensor:
        if self._closed:
            raise StopIteration
        try:
            self._begin_ahead()
            if not self._begun:
                raise StopIteration
            return self._take()
        except BaseException:
            self.close()
            raise

    def __aiter__(self) -> Staged:
        return self

    async def __anext__(self) -> Tensor:
        """The next window; the event loop goes on while it is gathered."""
        try:
            if not self._closed:
                self._begin_ahead()
                await asyncio.sleep(0)  # also where all is there already, the loop and a cancellation get their turn
                for ticket in self._begun[0][0].tickets() if self._begun else ():
                    await ticket
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None
        except BaseException:
            self.close()
            raise

    def _begin_ahead(self) -> None:
        """Begin windows, as many as may be on their way."""
        while len(self._begun) <= AHEAD and self._next < self._ids.shape[-1]:
            window = self._ids[..., self._next : self._next + self._window]
            self._next += self._window
            self._begun.append((self._fetch(host_ids(window)), window))
        for fetch, _ in self._begun:
            if not fetch.begin():
                return

    def _fetch(self, ids: Ids) -> Fetch | _HostFetch:
        if self._rows is None:
            return _HostFetch(self._gathers, self._table, ids)
        size = max(1, len(ids))
        wanted = IN_FLIGHT * batch_bytes(size, self._table.shape[1] * self._table.element_size())
        self._rows.ring_bytes = max(self._rows.ring_bytes, wanted)  # the first window is the largest
        return Fetch(self._rows, self._table, ids, size)

    def _take(self) -> Tensor:
        fetch, window = self._begun.popleft()
        device = self._device.torch_device if self._device is not None else torch.device("cpu")
        out = torch.empty((*window.shape, self._table.shape[1]), dtype=self._table.dtype, device=device)
        with torch.no_grad():
            if out.numel():
                fetch.into(out.view(window.numel(), self._table.shape[1]))
            shaped = self._shape(out, window, device)
        self._begin_ahead()
        return shaped

    def close(self) -> None:
        """Give all memory back; windows that were handed out stay as they are.  May be called again."""
        self._closed = True
        if not self._released:
            self._begun.clear()
            if self._rows is not None:
                self._rows.reset()
            self._gathers.close()
            self._released = True  # last: what a Ctrl-C interrupts is carried out when it is called again

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def stage(
    table: nn.Embedding | Tensor,
    ids: Tensor | Sequence[int],
    window: int = 128,
    *,
    device: str | torch.device | None = None,
) -> Staged:
    """Bring rows of a host table to the device, a window of positions at a time, ahead of whoever uses them.

    Args:
        table: an embedding whose weight lies on the host (in RAM or in a mapped file), streaming or not, or a 2-D host
            tensor without gaps.  Of a subclass that scales or pads, windows are what the module returns.
        ids: integers of any shape; windows are cut along the last dimension.  Ids on the device are brought to the
            host first, which waits for them.
        window: positions of the last dimension in a window.  A row that a window uses often is fetched once.
        device: where the windows are wanted; None is where the table streams to, else the CUDA card where there is one.

    Returns:
        An iterator, also an asynchronous one, of device tensors of shape (*ids.shape[:-1], positions, width), equal to
        ``table(ids[..., a:b])`` bit for bit.  They are constants to autograd.

    Raises:
        ConfigError: the table does not lie on the host, or an argument cannot be used.
        IdsError: an id is no row of the table; nothing was moved.
    """
    weight, name = _weight_of(table)
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigError(f"window={window!r} is no number of positions: give an int of at least 1")
    master = weight.__dict__.get("master")
    if isinstance(master, Master):  # it streams
        weight, device = master.original, master.device if device is None else device
    _check_table(weight, name)
    chosen = open_device(device)
    wanted = _as_ids(ids)
    with torch.inference_mode(False), torch.no_grad():
        # A copy, for these are the ids that are checked: the caller may write others to his meanwhile.
        on_host = wanted.detach().to("cpu", copy=True)
        plain = weight.detach()
    check_ids(host_ids(on_host), weight.shape[0], name)
    shaper = _plain if not isinstance(table, nn.Embedding) or _is_plain(table) else _Module(table)
    return Staged(plain, on_host, window, shaper, chosen if isinstance(chosen, Accelerator) else None)


_Shaper = Callable[[Tensor, Tensor, torch.device], Tensor]
"""What becomes of the rows of a window, given its ids on the host and the device."""


def _weight_of(table: Any) -> tuple[Tensor, str]:
    if isinstance(table, nn.Embedding):
        if table.max_norm is not None:
            raise ConfigError(f"this {type(table).__name__} has max_norm={table.max_norm}, which writes to its rows")
        return table.weight, type(table).__name__
    if isinstance(table, Tensor):
        return table, "the tensor given"
    raise ConfigError(f"table is a {type(table).__name__}: give an nn.Embedding or a 2-D tensor")


def _check_table(weight: Tensor, name: str) -> None:
    """Raise ConfigError for what has no rows that can be copied as bytes."""
    is_strided = weight.layout == torch.strided and not weight.is_quantized
    if weight.device.type != "cpu" or weight.dim() != 2 or not is_strided or not weight.is_contiguous():
        kind = "quantized table" if weight.is_quantized else "table"
        raise ConfigError(
            f"{name} is a {kind} of shape {tuple(weight.shape)} on {weight.device}: stage() takes a 2-D table without "
            "gaps that lies on the host"
        )
    if weight.is_conj() or weight.is_neg():
        raise ConfigError(
            f"{name} is a view that conjugates or negates when it is read: give table.resolve_conj().resolve_neg()"
        )


def _as_ids(ids: Any) -> Tensor:
    """Ids as a tensor with a dimension to cut windows from."""
    try:
        wanted = ids if isinstance(ids, Tensor) else torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ids is no tensor and no sequence of integers: {error}") from error
    if wanted.dim() == 0:
        raise ConfigError("ids is a single number: give a tensor with a dimension to cut windows from")
    if wanted.layout != torch.strided or wanted.device.type == "meta":
        raise ConfigError(f"ids is a {wanted.layout} tensor on {wanted.device}: give one without gaps that has values")
    if wanted.numel() == 0 and not isinstance(ids, Tensor):
        return wanted.to(torch.int64)
    if wanted.dtype not in (torch.int32, torch.int64):
        refuse_like_torch(wanted, torch.float32, wanted.device)
    return wanted


def _is_plain(table: nn.Embedding) -> bool:
    return type(table).forward is nn.Embedding.forward


def _plain(rows: Tensor, ids: Tensor, device: torch.device) -> Tensor:
    return rows


class _Module:
    """What a subclass makes of its rows: its forward is run with a stand-in for the weight that gives them."""

    def __init__(self, module: nn.Embedding) -> None:
        self._module = module
        self._placed: dict[str, Tensor] | None = None

    def __call__(self, rows: Tensor, ids: Tensor, device: torch.device) -> Tensor:
        parameters, buffers = self._module._parameters, self._module._buffers
        if self._placed is None:
            self._placed = {key: value.to(device) for key, value in buffers.items() if value is not None}
        there, weight, before = ids.to(device), parameters["weight"], dict(buffers)
        try:
            parameters["weight"] = _rows_as_weight(rows, there)  # type: ignore[assignment]
            buffers.update(self._placed)
            result: Tensor = self._module.forward(there)
        finally:
            parameters["weight"] = weight
            buffers.update(before)
        return result


class _Rows(Tensor):
    """A weight of which only the rows of some ids are there: it answers ``F.embedding`` of exactly these."""

    ids: Tensor
    rows: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.embedding and isinstance(args[1], _Rows):
            if args[0] is args[1].ids:
                return args[1].rows
            raise ConfigError(
                "this embedding looks up other ids than it is given: stage its weight, or call it under stream()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _rows_as_weight(rows: Tensor, ids: Tensor) -> _Rows:
    weight = torch.Tensor._make_subclass(_Rows, rows)
    weight.ids, weight.rows = ids, rows
    return weight
