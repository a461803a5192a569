"""How much memory the weights need, and how much they are given."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import psutil
from torch import nn

from fmstream.config import StreamConfig, parse_size, resolve_bytes
from fmstream.core.arena import MIN_PAGE_BYTES, choose_page_bytes, num_pages
from fmstream.core.plan import Plan, Prediction
from fmstream.device.accelerator import Accelerator
from fmstream.device.control_groups import group_limit
from fmstream.errors import MemoryBudgetError
from fmstream.payloads.sites import Survey
from fmstream.payloads.weights import Weights

AUTO_SHARE = 0.5
"""Part of the host memory that is free now which ``memory="auto"`` may take for weights on the CPU."""


PINNED_SHARE = 0.7
"""Part of the host memory that may be pinned, and part of the free one that weights in files may take."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes of the weights of some modules.

    Attributes:
        weights_bytes: all parameters, each once, as the user counts them.
        kept_bytes: those that stay in place.
        slab_bytes: what the streamable ones take in fast memory, alignment included.
        smallest_bytes: the least memory that works, and ``largest`` the module that needs it.  On an accelerator it
            holds rows of embedding tables as well.
    """

    weights_bytes: int
    kept_bytes: int
    slab_bytes: int
    smallest_bytes: int
    largest: str

    def fits(self, memory: int) -> bool:
        """Whether everything may be resident.  Alignment is not held against the user here."""
        return memory >= min(self.weights_bytes, self.slab_bytes + self.kept_bytes)


def measure(
    found: Survey, roots: Mapping[str, nn.Module], unbound: Set[int] = frozenset(), row_bytes: int = 0
) -> Totals:
    """Add up what was found.

    Args:
        found: what to add up.
        roots: outermost modules by name.
        unbound: ids of tables that stay on the host, which do not count.
        row_bytes: fast memory that their rows need, at least.
    """
    kept = sum(num_bytes for _, num_bytes, _ in found.kept)
    masters = [m for m in found.masters if m.index not in unbound]
    raw = sum(m.original.numel() * m.original.element_size() for m in masters)
    slab = sum(m.num_bytes for m in masters)
    need, largest = _deepest(found, roots)
    return Totals(raw + kept, kept, slab, need + kept + row_bytes, largest)


def _deepest(found: Survey, roots: Mapping[str, nn.Module]) -> tuple[int, str]:
    """Bytes that a chain of nested calls needs at once, for the chain that needs most, and its innermost module."""
    own = {id(site.module): sum(found.masters[p].num_bytes for p in site.params) for site in found.sites}
    name_of = {id(site.module): site.name for site in found.sites}
    known: dict[int, tuple[int, str]] = {}

    def deepest(module: nn.Module) -> tuple[int, str]:
        if id(module) not in known:
            known[id(module)] = (0, "")
            here = own.get(id(module), 0)
            below = max((deepest(child) for child in module.children()), default=(0, ""))
            name = below[1] if below[0] > here else name_of.get(id(module), "") or type(module).__name__
            known[id(module)] = (here + below[0], name)
        return known[id(module)]

    num_bytes, name = max((deepest(root) for root in roots.values()), default=(0, ""))
    page = choose_page_bytes(max(1, num_bytes))
    # Each nested call takes whole pages; deeper than that modules do not own parameters in practice.
    return num_pages(num_bytes, page) * page + 4 * MIN_PAGE_BYTES, name


def allowed(config: StreamConfig, totals: Totals, accelerator: Accelerator | None = None) -> int:
    """Bytes of fast memory that the options allow, be they enough or not.

    On an accelerator "auto" is all that is free now: what a pass can make use of is found once one was seen.
    """
    asked = resolve_bytes(config.memory, totals.weights_bytes)
    if asked is not None:
        return asked
    if accelerator is None:
        return automatic(totals, config.floor_bytes)
    free = accelerator.available_bytes() - config.floor_bytes
    return max(totals.smallest_bytes, min(totals.slab_bytes, free))


def resolve(config: StreamConfig, totals: Totals, memory: int, *, begun: bool = False) -> int:
    """The ``memory`` that is allowed, if it is enough.  Once a run has ``begun`` it is given the least instead.

    Raises:
        MemoryBudgetError: less than the least that works.
    """
    if begun:
        return max(memory, min(totals.smallest_bytes, totals.weights_bytes))
    if memory < totals.smallest_bytes and not totals.fits(memory):
        raise MemoryBudgetError(
            f"memory={config.memory!r} is {memory} bytes of {totals.weights_bytes} bytes of weights; the smallest that "
            f"works is {totals.smallest_bytes} bytes, because {totals.largest!r} must be in memory as a whole"
            + (f" beside {totals.kept_bytes} bytes that stay in place" if totals.kept_bytes else "")
        )
    return memory


def automatic(totals: Totals, floor: int = 0) -> int:
    """Half of the host memory that is free, less where ``floor`` bytes would not stay free; the smallest that works."""
    available = available_bytes()
    share = min(int(available * AUTO_SHARE), available - floor)
    return min(totals.weights_bytes, max(share, totals.smallest_bytes))


def pinned_bytes(config: StreamConfig) -> int:
    """Bytes of host memory that may be pinned."""
    if config.pinned != "auto":
        return parse_size(config.pinned, name="pinned") if config.pinned else 0
    total, group = int(psutil.virtual_memory().total), group_limit()
    return int((total if group is None else min(total, group.limit)) * PINNED_SHARE)


def file_bytes_to_keep() -> int:
    """Bytes of weights in files that may be brought to host memory for good."""
    return int(available_bytes() * PINNED_SHARE)


def available_bytes() -> int:
    """Host memory that can still be taken: what the system has, within the limits of the control groups."""
    available = int(psutil.virtual_memory().available)
    group = group_limit()
    return available if group is None else min(available, group.headroom)


def all_resident(policy: str, weights: Weights) -> Plan:
    """One plan for all roots: everything is in fast memory but tables of which rows are taken."""
    nothing = Prediction(0.0, 0.0, 0.0, 0.0, "resident")
    resident = frozenset(m.index for m in weights.masters if m.index not in weights.unbound)
    return Plan(policy, resident, (), 0, None, False, nothing)
