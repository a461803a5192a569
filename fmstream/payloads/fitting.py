"""What of some modules is in fast memory: everything, everything but embedding tables, or what comes and goes."""

from __future__ import annotations

from dataclasses import dataclass

from fmstream.config import StreamConfig
from fmstream.device.accelerator import Accelerator
from fmstream.payloads import budget
from fmstream.payloads.budget import Totals
from fmstream.payloads.embeddings import Tables
from fmstream.payloads.sites import Survey
from fmstream.payloads.weights import Weights

ROOMY: float = 0.5
"""A device with ``memory="auto"`` keeps tables where all weights take no more than this part of what is free."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """What was decided.

    Attributes:
        totals: bytes of what streams or is resident, tables apart.
        memory: fast memory in bytes, for weights and rows.
        row_bytes: how much of it is for rows of tables.
        least_bytes: the least for weights that come and go.
        table_bytes: tables that stay on the host.
        fits: whether all but the tables is resident.
    """

    totals: Totals
    memory: int
    row_bytes: int
    least_bytes: int
    table_bytes: int
    fits: bool


def decide(
    weights: Weights, found: Survey, tables: Tables, config: StreamConfig, device: Accelerator | None, *, begun: bool
) -> Fitting:
    """Decide what fits.  Large tables are looked up by rows where not everything does.

    Raises:
        MemoryBudgetError: the memory allowed is less than the least that works.
    """
    automatic = device is not None and config.memory == "auto"
    whole = totals = budget.measure(found, weights.roots)
    memory = budget.allowed(config, whole, device)
    room = int(ROOMY * device.available_bytes()) if automatic and device is not None else memory
    chosen = [] if whole.fits(room) else weights.choose_tables()
    tables.choose(chosen)
    least_rows = tables.least_bytes()
    if chosen:
        totals = budget.measure(found, weights.roots, weights.unbound, least_rows)
        if automatic:
            memory = budget.allowed(config, totals, device)
    memory = budget.resolve(config, totals, memory, begun=begun)
    row_bytes = tables.take_share(None if automatic else memory, memory - totals.smallest_bytes)
    counted = 0 if automatic else row_bytes
    return Fitting(
        totals=totals,
        memory=memory,
        row_bytes=counted,
        least_bytes=totals.smallest_bytes - totals.kept_bytes - least_rows,
        table_bytes=whole.weights_bytes - totals.weights_bytes,
        # On an accelerator with "auto", what a pass can make use of is found once one was seen.
        fits=totals.fits(memory - counted) and not (automatic and bool(weights.masters)),
    )
