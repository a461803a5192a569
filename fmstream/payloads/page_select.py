"""Which pages of a KV cache a decoding step attends to, fetches ahead and gives up.

A page is summed up by a *digest* for each KV head: a box around its keys with centre c and half width r.  For a query q
the box bounds what a key in it can score: the largest q.k over the box is sum of q_d c_d + |q_d| r_d.  From that, three
decisions for each sequence and KV head:

- importance: that bound, the largest over the queries that share the KV head.  The most important pages are chosen;
  the first (*sinks*) and the last (*recent*) ones always are, and one in memory is preferred to one hardly better.
- position: the bound of the mean query turned on by what the rotary embedding turns on average over the coming
  positions.  The pages that it favours fill the frames that are left.
- paging: what of these is not in memory is fetched ahead, and the least favoured pages in memory make room.

The same decision is made by a CUDA kernel (``page_select.cu``), by native code on the CPU, and by PyTorch operations
elsewhere.  Cuboid digests are those of ArkVale (NeurIPS 2024), the bound is Quest's (ICML 2024), the average rotation
that of Expected Attention (2025).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from fmstream.device import page_kernel
from fmstream.errors import ConfigError

__all__ = ["Choice", "Digests", "Limits", "digest", "expected_rotation", "select", "select_with_torch"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How many pages a decision may name, for each sequence and KV head.

    Attributes:
        num_chosen: pages that are attended to.
        num_frames: pages that may be in memory, at least ``num_chosen``.
        num_ahead: pages that may be fetched ahead at once.
        num_sinks, num_recent: pages at the start and the end that are always chosen.
        stay: what a page in memory is worth more than its bound, in units of the scores: with 1, another must promise
            e times the attention to be fetched instead of it.

    Raises:
        ConfigError: a number is negative, or the pages that are always chosen are more than may be chosen.
    """

    num_chosen: int
    num_frames: int
    num_ahead: int = 0
    num_sinks: int = 2
    num_recent: int = 2
    stay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_chosen", "num_frames", "num_ahead", "num_sinks", "num_recent"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative: give a number of pages")
        kept = self.num_sinks + self.num_recent
        if self.num_chosen < max(1, kept):
            raise ConfigError(
                f"num_chosen={self.num_chosen} is less than the {kept} pages that are always kept "
                f"(num_sinks={self.num_sinks}, num_recent={self.num_recent}): choose more pages, or keep fewer"
            )
        if self.num_frames < self.num_chosen:
            raise ConfigError(
                f"num_frames={self.num_frames} is less than num_chosen={self.num_chosen}: what is chosen must be in "
                "memory; give more frames or choose fewer pages"
            )

    @property
    def num_victims(self) -> int:
        """Pages that may be named to make room."""
        return self.num_chosen + self.num_ahead


@dataclass(frozen=True, slots=True)
class Digests:
    """What is known of a layer's pages.

    Attributes:
        centre, radius: [batch, KV heads, pages, head dim], contiguous, as `digest` gives them.
        resident: bool [batch, KV heads, pages]: what is in memory.
        rotation: as `expected_rotation` gives it.
        scale: what scores are multiplied by before the softmax.
        num_pages: how many of the pages are complete; there may be room for more.

    Raises:
        ConfigError: shapes do not fit.
    """

    centre: torch.Tensor
    radius: torch.Tensor
    resident: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]
    scale: float
    num_pages: int

    def __post_init__(self) -> None:
        batch, heads, pages, dims = self.centre.shape
        fits = (
            self.radius.shape == self.centre.shape
            and self.radius.dtype is self.centre.dtype
            and self.resident.shape == (batch, heads, pages)
            and all(part.shape == (dims,) for part in self.rotation)
            and dims % 2 == 0
        )
        if not fits:
            raise ConfigError(
                f"digests {tuple(self.centre.shape)} and {tuple(self.radius.shape)}, resident "
                f"{tuple(self.resident.shape)} and rotation {tuple(self.rotation[0].shape)} do not fit: they are "
                "[batch, KV heads, pages, head dim] twice, [batch, KV heads, pages] and [head dim]"
            )
        if not 1 <= self.num_pages <= pages:
            raise ConfigError(f"num_pages={self.num_pages} is not from 1 to the {pages} pages that there is room for")
        if not all(part.is_contiguous() for part in (self.centre, self.radius, self.resident)):
            raise ConfigError("digests are not contiguous: keep them with room for more pages and give num_pages")


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision.  Pages are listed in ascending order; lists end with -1 where there are fewer.

    Attributes:
        chosen: int32 [batch, KV heads, num_chosen].
        ahead: int32 [batch, KV heads, num_ahead], not in memory and not chosen.
        victims: int32 [batch, KV heads, num_chosen + num_ahead], in memory, neither chosen nor wanted.
        left_out: float32 [batch, KV heads]: the share of the attention over complete pages that those not chosen would
            have got by their bounds, the largest over the queries of the KV head.
    """

    chosen: torch.Tensor
    ahead: torch.Tensor
    victims: torch.Tensor
    left_out: torch.Tensor


def digest(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre and half width of pages.

    Args:
        keys: [..., tokens of a page, head dim], after the rotary embedding.

    Returns:
        (min + max) / 2 over the tokens, and the mean distance from it: [..., head dim], of the keys' dtype.
    """
    low, high = keys.aminmax(dim=-2)
    centre = (low + high) / 2
    return centre, (keys - centre.unsqueeze(-2)).abs().mean(dim=-2)


def expected_rotation(inv_freq: torch.Tensor, horizon: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rotary embedding turns a query by on average over the next ``horizon`` positions.

    Args:
        inv_freq: [head dim / 2] radians for each position.
        horizon: positions, at least 1.

    Returns:
        The means of cos(t f) and sin(t f) over t = 1 ... horizon, each float32 [head dim], for halves that turn
        together (dimension d with d + head dim / 2).
    """
    if horizon < 1:
        raise ConfigError(f"horizon={horizon} looks at no position: give at least 1")
    steps = torch.arange(1, horizon + 1, dtype=torch.float64)
    angles = steps[:, None] * inv_freq.detach().to("cpu", torch.float64)
    mean = [part.mean(0).to(torch.float32).to(inv_freq.device).repeat(2) for part in (angles.cos(), angles.sin())]
    return mean[0], mean[1]


def select(query: torch.Tensor, digests: Digests, limits: Limits) -> Choice:
    """Decide; nothing is read back from the device.

    Args:
        query: [batch, heads, head dim] of one position, after the rotary embedding; the heads of a KV head are
            neighbours.
        digests: the pages.
        limits: how many of them may be named.

    Raises:
        ConfigError: the query does not fit the digests.
    """
    batch, heads, _, dims = digests.centre.shape
    if query.ndim != 3 or query.shape[0] != batch or query.shape[1] % heads or query.shape[2] != dims:
        raise ConfigError(
            f"query {tuple(query.shape)} does not fit digests {tuple(digests.centre.shape)}: it is [batch, heads, head "
            "dim], with a multiple of the KV heads"
        )
    device = digests.centre.device
    if device.type == "cuda":
        kernel = page_kernel.find(device, digests.centre.dtype, dims, query.shape[1] // heads)
        if kernel is not None:
            return _select_with_kernel(kernel, query, digests, limits)
    if device.type == "cpu" and digests.centre.dtype is torch.float32:
        return _select_natively(query, digests, limits)
    return select_with_torch(query, digests, limits)


def _results(digests: Digests, limits: Limits) -> Choice:
    batch, heads, _, _ = digests.centre.shape
    device = digests.centre.device

    def pages(length: int) -> torch.Tensor:
        return torch.empty((batch, heads, length), dtype=torch.int32, device=device)

    return Choice(
        pages(limits.num_chosen),
        pages(limits.num_ahead),
        pages(limits.num_victims),
        torch.empty((batch, heads), device=device),
    )


def _select_with_kernel(
    kernel: page_kernel.PageKernel, query: torch.Tensor, digests: Digests, limits: Limits
) -> Choice:
    choice = _results(digests, limits)
    kernel(
        (query.float().contiguous(), digests.centre, digests.radius, *digests.rotation, digests.resident),
        (choice.chosen, choice.ahead, choice.victims, choice.left_out),
        digests.num_pages,
        limits.num_frames,
        limits.num_sinks,
        limits.num_recent,
        digests.scale,
        limits.stay,
    )
    return choice


def _select_natively(query: torch.Tensor, digests: Digests, limits: Limits) -> Choice:
    from fmstream.core.page_choice import decide  # numba is not worth loading before there are pages to choose

    choice = _results(digests, limits)
    batch, heads, _, dims = digests.centre.shape
    queries = query.float().contiguous().view(batch, heads, -1, dims)
    by_head = [part.flatten(0, 1).numpy() for part in (queries, digests.centre, digests.radius, digests.resident)]
    rotation = [part.float().contiguous().numpy() for part in digests.rotation]
    sizes = (digests.num_pages, limits.num_ahead, limits.num_frames, limits.num_sinks, limits.num_recent)
    found = [part.flatten(0, 1).numpy() for part in (choice.chosen, choice.ahead, choice.victims, choice.left_out)]

    def decide_some(rows: slice) -> None:
        given, written = (part[rows] for part in by_head), (part[rows] for part in found)
        decide(*given, *rotation, digests.scale, *sizes, limits.stay, *written)

    # Without the GIL, so that heads are decided side by side; each thread has at least one.
    num_threads = min(torch.get_num_threads(), batch * heads)
    bounds = [batch * heads * index // num_threads for index in range(num_threads + 1)]
    own, *others = (slice(start, stop) for start, stop in pairwise(bounds))
    pending = [_helpers().submit(decide_some, rows) for rows in others]
    try:
        decide_some(own)
    finally:
        for one in pending:
            one.result()
    return choice


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="fmstream pages")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)  # its threads are not there


def select_with_torch(query: torch.Tensor, digests: Digests, limits: Limits) -> Choice:
    """`select` in operations that every device has."""
    pages = digests.num_pages
    resident = digests.resident[:, :, :pages]
    bounds, prior = _bounds(query, digests)

    at = torch.arange(pages, device=query.device)
    always = (at < limits.num_sinks) | (at >= pages - limits.num_recent)
    importance = (bounds.amax(dim=2) + limits.stay * resident).masked_fill(always, torch.inf)
    chosen = _largest(importance, torch.ones_like(resident), limits.num_chosen)
    left_out = bounds.softmax(dim=-1).masked_fill(chosen.unsqueeze(2), 0.0).sum(-1).amax(-1)

    held = (chosen | resident).sum(-1, keepdim=True)
    kept = _largest(prior, ~chosen, limits.num_frames - chosen.sum(-1, keepdim=True))
    ahead = _largest(prior, kept & ~resident, limits.num_ahead)
    surplus = held + ahead.sum(-1, keepdim=True) - limits.num_frames
    victims = _largest(-prior, resident & ~chosen, surplus.clamp(0, limits.num_victims))
    return Choice(
        _listed(chosen, limits.num_chosen),
        _listed(ahead, limits.num_ahead),
        _listed(victims, limits.num_victims),
        left_out,
    )


def _bounds(query: torch.Tensor, digests: Digests) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of each query [batch, KV heads, group, pages], and of the coming positions [batch, KV heads, pages]."""
    batch, heads, _, dims = digests.centre.shape
    queries = query.float().reshape(batch, heads, -1, dims)
    mean = queries.mean(dim=2, keepdim=True)
    turned = torch.cat((-mean[..., dims // 2 :], mean[..., : dims // 2]), dim=-1)
    mean_cos, mean_sin = digests.rotation
    queries = torch.cat((queries, mean * mean_cos + turned * mean_sin), dim=2)
    centre, radius = (part[:, :, : digests.num_pages].float().mT for part in (digests.centre, digests.radius))
    scores = (queries @ centre + queries.abs() @ radius) * digests.scale
    return scores[:, :, :-1], scores[:, :, -1]


def _largest(values: torch.Tensor, candidates: torch.Tensor, want: int | torch.Tensor) -> torch.Tensor:
    """Mask of the ``want`` candidates with the largest values, equal ones by page."""
    order = values.masked_fill(~candidates, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return (rank < want) & candidates


def _listed(mask: torch.Tensor, length: int) -> torch.Tensor:
    """The pages of a mask in ascending order, then -1: int32 [..., length]."""
    pages = mask.shape[-1]
    at = torch.arange(pages, device=mask.device, dtype=torch.int32)
    listed = at.masked_fill(~mask, pages).sort(dim=-1).values[..., :length]
    listed = torch.nn.functional.pad(listed, (0, max(0, length - pages)), value=pages)
    return listed.masked_fill(listed == pages, -1)
