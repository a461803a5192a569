"""Gathers of table rows by the host: small ones at once by whoever asks, others by workers beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from fmstream.actors.host_workers import HostWorkers, Ticket
from fmstream.errors import FmstreamError

Ids = npt.NDArray[np.int64]

INLINE_BYTES: Final = 32 << 10
"""Up to here handing over takes longer than the gather itself."""
POLL_SECONDS: Final = 0.1
GRACE_SECONDS: Final = 0.5
"""How long a gather that is not wanted any more may take to end before its memory is left to it."""
_SAME_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Types that every kernel which moves elements takes."""


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as elements of a type that is moved as it is, whatever the dtype."""
    return tensor.view(_SAME_SIZE[tensor.element_size()])


class Gathers:
    """Brings rows side by side.  The workers start with the first gather that is worth it."""

    def __init__(self, num_workers: int = 1, inline_bytes: int = INLINE_BYTES) -> None:
        self._num_workers = num_workers
        self.inline_bytes = inline_bytes
        self._workers: HostWorkers | None = None

    def begin(self, table: torch.Tensor, ids: Ids, target: torch.Tensor, keep: object = None) -> Ticket | None:
        """Begin to copy rows to ``target``; None if that is done already.

        Args:
            table: (rows, width) host tensor without gaps.
            ids: rows, all of them good.
            target: (len(ids), width) host tensor of the same dtype, without gaps.
            keep: what else must live until the end.
        """
        if target.numel() * target.element_size() <= self.inline_bytes:
            with torch.inference_mode(False), torch.no_grad():
                torch.index_select(as_bits(table), 0, torch.from_numpy(ids), out=as_bits(target))
            return None
        if self._workers is None:
            self._workers = HostWorkers(self._num_workers)
        row_bytes = table.shape[1] * table.element_size()
        return self._workers.gather(
            table.data_ptr(),
            row_bytes,
            ids.ctypes.data,
            len(ids),
            target.data_ptr(),
            keep=(table, ids, target, keep),
            name="gather rows",
        )

    def is_done(self, ticket: Ticket) -> bool:
        """Whether a gather has ended, in whichever way."""
        assert self._workers is not None
        return self._workers.is_done(ticket)

    def wait(self, ticket: Ticket, check_stop: Callable[[], None]) -> None:
        """Wait for a gather, and look now and then whether to go on; raises what went wrong."""
        assert self._workers is not None
        while not self._workers.wait(ticket, POLL_SECONDS):
            check_stop()

    def stop(self, ticket: Ticket) -> bool:
        """Let a gather end that is not wanted any more; False if it still writes after half a second."""
        assert self._workers is not None
        self._workers.cancel(ticket)
        try:
            return self._workers.wait(ticket, GRACE_SECONDS)
        except (FmstreamError, OSError, IndexError):  # it was cancelled, or failed, or its worker died
            return ticket.status is not None

    def close(self) -> None:
        """Stop the workers; what one of them still writes to, it keeps alive."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
