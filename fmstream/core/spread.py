"""Which parameters stay resident: as many as fit, spread along the pass so that the link never idles for long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fmstream.core.units import Group


def byte_weights(groups: Sequence[Group], seconds: float, between: float) -> list[float]:
    """Weights for an even share of each group's bytes; the arguments after the first have no influence."""
    return [float(group.num_bytes) for group in groups]


def time_weights(groups: Sequence[Group], seconds: float, between: float) -> list[float]:
    """Weights for an even share of the time from each group's start to the next one's, round the pass's end."""
    starts = [group.start for group in groups]
    following = [*starts[1:], *(seconds + between + start for start in starts[:1])]
    return [max(0.0, after - start) for start, after in zip(starts, following, strict=True)]


def mixed_weights(groups: Sequence[Group], seconds: float, between: float) -> list[float]:
    """Weights halfway between those by bytes and those by time."""
    by_bytes = byte_weights(groups, seconds, between)
    by_time = time_weights(groups, seconds, between)
    scale = sum(by_bytes) / (sum(by_time) or 1.0)
    return [size + scale * time for size, time in zip(by_bytes, by_time, strict=True)]


def spread(groups: Sequence[Group], sizes: Sequence[int], room: int, weights: Sequence[float]) -> frozenset[int]:
    """Choose resident parameters of at most ``room`` bytes.

    Parameters that several groups use come first: a byte of memory saves as many bytes of the link.  Among those used
    equally often the choice is spread by error diffusion: along the pass the link earns credit in proportion to
    ``weights`` (one for each group), a streamed group spends its bytes, and a group that would spend too much before
    it is earned becomes resident.  Room that is left over is filled with whatever fits.
    """
    uses = Counter(p for group in groups for p in group.params)
    resident: set[int] = set()
    for often in sorted(set(uses.values()), reverse=True):
        members = {p for p, count in uses.items() if count == often}
        num_bytes = sum(sizes[p] for p in members)
        if num_bytes > room:
            chosen = _diffuse(groups, sizes, members, resident, room, weights)
            resident |= chosen
            room -= sum(sizes[p] for p in chosen)
            break
        resident |= members
        room -= num_bytes
    fitting = [p for p in uses if sizes[p] <= room and p not in resident]
    for param in sorted(fitting, key=lambda p: (-uses[p] * sizes[p], p)):
        if sizes[param] <= room:
            resident.add(param)
            room -= sizes[param]
    return frozenset(resident)


def _diffuse(
    groups: Sequence[Group],
    sizes: Sequence[int],
    members: set[int],
    resident: set[int],
    room: int,
    weights: Sequence[float],
) -> set[int]:
    """Residents among ``members``, given those in ``resident``; a group's members are decided together."""
    to_stream = sum(sizes[p] for group in groups for p in group.params if p not in resident)
    times_used = sum(sizes[p] for group in groups for p in group.params if p in members) / sum(
        sizes[p] for p in members
    )
    rate = max(0.0, to_stream - room * times_used) / (sum(weights) or 1.0)
    undecided, chosen = set(members), set[int]()
    credit = 0.0
    for group, weight in zip(groups, weights, strict=True):
        credit += rate * weight
        open_params = [p for p in group.params if p in undecided]
        open_bytes = sum([sizes[p] for p in open_params])
        if len(open_params) < len(group.params):  # some were decided before: those that are streamed cost now
            credit -= sum(sizes[p] for p in group.params if not (p in undecided or p in chosen or p in resident))
        undecided.difference_update(open_params)
        # The margin keeps rounding from deciding where the credit is exactly half: there an even rhythm counts.
        if open_bytes <= room and credit < open_bytes / 2 * (1 - 1e-9):
            chosen.update(open_params)
            room -= open_bytes
        else:
            credit -= open_bytes
    return chosen
