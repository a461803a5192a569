"""Stands in for the choice of pages where there are no values: as many are missing as were found to be, by seed."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from fmstream.emulator.operators import enqueue
from fmstream.payloads.kv.choosing import GATE, Decision
from fmstream.payloads.page_select import Digests, Limits

MISSING: Final = 0.07
"""Part of the chosen pages that is in no frame: what a trial of choosing pages of SmolLM2-135M found."""
AHEAD: Final = 0.07
"""Pages fetched ahead in a step, as a part of those chosen: taken to be as many again."""
FALLBACKS: Final = 0.05
"""Part of the decisions at which a layer attends to everything: the most that ``kv_quality`` allows."""


class SeededRecall:
    """Decides as a `fmstream.payloads.kv.choosing.Chooser`, at the cost of the fused kernel and of its answer.

    The kernel takes as long as the card's memory gives the digests; the host waits for the lists, as it does.
    """

    def __init__(self, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)
        self._decisions = 0

    def __call__(self, query: torch.Tensor, digests: Digests, limits: Limits, resident: NDArray[np.bool_]) -> Decision:
        """See the class."""
        rows = len(resident)
        self._charge(query, digests, rows * (limits.num_chosen + limits.num_ahead + limits.num_victims + 1))
        lists = [self._row(row, limits) for row in resident]
        chosen, ahead, victims = (np.stack(part) for part in zip(*lists, strict=True))
        self._decisions += 1
        falls_back = int(self._decisions * FALLBACKS) > int((self._decisions - 1) * FALLBACKS)
        return Decision(chosen, ahead, victims, np.full(rows, GATE if falls_back else 0.0, np.float32))

    def _charge(self, query: torch.Tensor, digests: Digests, width: int) -> None:
        lists = torch.empty(width, dtype=torch.int32, device=query.device)
        pages = digests.num_pages
        read = [query, digests.centre[:, :, :pages], digests.radius[:, :, :pages], digests.resident]
        enqueue("page_select", None, read, [lists])
        lists.to("cpu", non_blocking=True)
        torch.get_device_module("emu").current_stream().synchronize()

    def _row(self, resident: NDArray[np.bool_], limits: Limits) -> tuple[NDArray[np.int32], ...]:
        """Chosen, ahead and victims of one row."""
        pages = np.arange(len(resident), dtype=np.int32)
        always = (pages < limits.num_sinks) | (pages >= len(pages) - limits.num_recent)
        there = self._draw.permutation(pages[resident & ~always])
        away = self._draw.permutation(pages[~resident & ~always])
        want = limits.num_chosen - int(always.sum())
        missing = max(min(want, int(self._draw.binomial(limits.num_chosen, MISSING))), want - len(there))
        chosen = np.concatenate([pages[always], there[: want - missing], away[:missing]])
        ahead = away[missing : missing + min(limits.num_ahead, int(self._draw.binomial(limits.num_chosen, AHEAD)))]
        rest = there[want - missing :]
        surplus = len(chosen) + len(rest) + len(ahead) - limits.num_frames
        return np.sort(chosen), _padded(ahead, limits.num_ahead), _padded(rest[: max(0, surplus)], limits.num_victims)


def _padded(pages: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    listed = np.full(length, -1, np.int32)
    listed[: min(length, len(pages))] = np.sort(pages[:length])
    return listed
