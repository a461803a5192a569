"""One layer of a paged cache whose steps attend to chosen pages."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fmstream.errors import ConfigError
from fmstream.payloads.kv.blocks import BlockTable, Ids
from fmstream.payloads.kv.choosing import Decision, Seen, Selection
from fmstream.payloads.kv.chosen_pool import ChosenPool
from fmstream.payloads.kv.digests import LayerDigests
from fmstream.payloads.kv.layer import PagedLayer, PoolFor
from fmstream.payloads.kv.pool import Pool
from fmstream.payloads.kv.sizing import Sizes
from fmstream.payloads.kv.turns import in_turn
from fmstream.payloads.page_select import Digests, Limits

ATTENTION: Final = "fmstream_pages"
"""The attention implementation that models with chosen pages are set to, and the name of its mask function."""
MARK: Final = "_fmstream_layer"
"""Attribute of keys on their way from a layer of the cache to the attention function."""
UNMARKED: Final = (
    "the model does not hand its keys to the attention function as they come from the cache, so that nothing can be "
    "chosen for it: leave kv_budget and context_window out"
)


class OnTheWay(threading.local):
    """Whether keys with the mark were handed out in this thread and no attention function was called since."""

    is_expected = False


on_the_way = OnTheWay()


class ChosenLayer(PagedLayer):
    """A layer in a `ChosenPool`: a row of its block table is one KV head of one sequence.

    A pass of several tokens attends to everything, as does every pass of a layer that does not choose; behind it
    `foresee` brings what the next step will probably choose.  In a step of one token `update` only stores it and
    returns its own keys and values, marked: the attention function brings the query, and `attend` chooses.

    Args:
        chooses: whether its steps choose; else it only lies in such a pool.
    """

    def __init__(self, pool_for: PoolFor, sizing: Sizes, selection: Selection, *, chooses: bool) -> None:
        self.selection = selection
        self.chooses = chooses
        self.digests = LayerDigests()
        self._ahead: Ids = np.empty(0, np.int32)
        self._meant: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)
        """Pages that decisions mean to be in frames, [rows, pages].  The choice goes by these, not by what is there, so
        that it is the same however short memory is."""
        self._pending = False
        self._num_new = 0
        """Tokens of the last pass."""
        super().__init__(pool_for, sizing)

    def _like(self, pool_for: PoolFor) -> PagedLayer:
        other = ChosenLayer(pool_for, self._sizing, self.selection, chooses=self.chooses)
        other.digests, other._meant = self.digests.copy(), self._meant.copy()
        return other

    def join(self, pool: Pool, siblings: list[BlockTable]) -> None:
        """See `PagedLayer`."""
        super().join(pool, siblings)
        if self.chooses:
            self._pool.choosing.add(self.block)

    @property
    def _pool(self) -> ChosenPool:
        assert isinstance(self.pool, ChosenPool)
        return self.pool

    # What transformers calls

    def _together(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super()._together()
        return self._by_sequence(keys), self._by_sequence(values)

    def _by_sequence(self, part: torch.Tensor) -> torch.Tensor:
        """[rows, 1, tokens, dim] as [batch, heads, tokens, dim]."""
        return part.view(-1, self._pool.stride, *part.shape[-2:])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; returns all of them, or in a step that chooses the new ones.

        Raises:
            ConfigError: as in `PagedLayer`, or the model's attention is not the one that chooses.
            MemoryBudgetError: there is no room in any tier; the layer is as before.
        """
        return super().update(key_states, value_states, *args, **kwargs)

    @in_turn
    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self._enter(key_states, value_states)
        self._refuse_other_attention()
        self._num_new = key_states.shape[-2]
        if not self.block.length and not key_states.shape[-2]:
            return self._marked(key_states), value_states
        keys, values = (part.reshape(-1, 1, *part.shape[-2:]) for part in (key_states, value_states))
        with torch.no_grad():
            if self._is_step(key_states):
                if self._siblings[0] is self.block:
                    self._sizing.adjust(pool, len(keys), self.block.length + 1)
                self._pool.append(self.block, keys[:, 0, 0], values[:, 0, 0])
                self._pending = True
                return self._marked(key_states), value_states
            all_keys, all_values = self._append(pool, keys, values)
            all_keys, all_values = self._by_sequence(all_keys), self._by_sequence(all_values)
            if self.chooses:
                done = self.digests.count * pool.shape.tokens
                self.digests.add(all_keys[:, :, done:], pool.shape.tokens)
            self._prefetch(pool)
        return self._marked(all_keys), all_values

    def _marked(self, keys: torch.Tensor) -> torch.Tensor:
        keys = keys.view_as(keys)
        setattr(keys, MARK, self)
        on_the_way.is_expected = True
        return keys

    def _refuse_other_attention(self) -> None:
        found = self.selection.implementation()
        if found != ATTENTION:
            raise ConfigError(
                f"kv_budget and context_window need the attention that chooses pages, and the model has {found!r}: use "
                "fmstream.run or fmstream.stream, or call the model within cache.selecting(model)"
            )
        if self._pending:
            self._pending = False
            raise ConfigError(UNMARKED)

    def _is_step(self, keys: torch.Tensor) -> bool:
        """Whether pages are chosen for these tokens: where all may be chosen nothing is to be decided."""
        if not self.chooses or keys.shape[-2] != 1 or not self.block.length:
            return False
        limits = self.selection.limits(self._pool.quota(self.block))
        return self.selection.has_choice(limits, self.block.length // self._pool.shape.tokens)

    @in_turn
    def crop(self, tokens_to_remove: int) -> None:
        """See `PagedLayer`."""
        super().crop(tokens_to_remove)
        self._pending = False  # whoever takes back what a pass left goes on from there
        if self.pool is not None:
            self.digests.cut(self.block.length // self.pool.shape.tokens)
            self._meant[:, self.digests.count :] = False

    def reset(self) -> None:
        """See `PagedLayer`."""
        super().reset()
        self.digests.clear()
        self._meant = np.zeros((0, 0), np.bool_)
        self._pending = False

    @in_turn
    def _choose(self, sequences: NDArray[np.int64]) -> None:
        if self.pool is None or not self.block.length:
            return
        heads = self._pool.stride
        rows = (sequences[:, None] * heads + np.arange(heads)).ravel()
        super()._choose(rows)
        self._meant = self._meant[rows] if len(self._meant) else self._meant
        if self.digests.count:
            self.digests.choose(torch.from_numpy(sequences).to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `PagedLayer`."""
        heads = self._pool.stride if self.pool is not None else 1
        self._choose(np.repeat(np.arange(self.block.num_sequences // heads), repeats))

    # The step

    @property
    def is_pending(self) -> bool:
        """Whether a token was stored whose attention has not been asked for."""
        return self._pending

    @in_turn
    def everything(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a step whose attention cannot choose."""
        self._pending = False
        self._pool.enter(self.block)
        with torch.no_grad():
            return self._together()

    def within_window(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values that ``context_window`` leaves of all, and the mask for them."""
        window, total, new = self.selection.context_window, self.block.length, query.shape[-2]
        if window is None or window >= total or keys.shape[-2] < total:
            return keys, values, mask
        if new == 1:
            mask = mask if mask is None else mask[..., total - window :]
            return keys[:, :, total - window :], values[:, :, total - window :], mask
        at = torch.arange(total, device=query.device)
        back = at[total - new :, None] - at[None, :]
        inside = (back >= 0) & (back < window)
        if mask is None:
            return keys, values, inside[None, None]
        if mask.dtype == torch.bool:
            return keys, values, mask & inside
        return keys, values, mask.masked_fill(~inside, torch.finfo(mask.dtype).min)

    @in_turn
    @torch.no_grad()
    def attend(
        self, query: torch.Tensor, mask: torch.Tensor | None, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Choose what a step attends to.

        Args:
            query: [batch, query heads, 1, dim].
            mask: bool or added to scores, [batch, 1 or query heads, 1, tokens], or None.
            scale: of the scores, None for dim ** -0.5.

        Returns:
            Keys and values [batch, heads, n, dim], and the mask for them or None.
        """
        self._pending = False
        pool, selection, counts = self._pool, self.selection, self.selection.counts
        pool.enter(self.block)
        limits = selection.limits(pool.quota(self.block))
        complete = (self.block.length - 1) // pool.shape.tokens
        if limits is None or not selection.has_choice(limits, complete):
            return (*self._together(), mask)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        decision, resident = self._decide(query, mask, scale, limits, complete)
        falls_back = selection.falls_back(decision)
        if selection.watch is not None:
            selection.watch(Seen(self, query, mask, scale, decision, falls_back, resident))
        counts.decisions += self.block.num_sequences
        if falls_back:
            counts.fallbacks += self.block.num_sequences
            return (*self._together(), mask)
        counts.recalled += len(self._bring(decision, limits, complete))
        counts.chosen += decision.chosen.size
        keys, values = (self._by_sequence(part.unsqueeze(1)) for part in pool.gather(self.block, decision.chosen))
        found = self._mask(query, mask, decision.chosen, keys.shape[-2])
        self._fetch_ahead(decision)
        return keys, values, found

    @in_turn
    @torch.no_grad()
    def foresee(self, query: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> None:
        """Bring what the last query of a pass of several tokens would choose: the next step's will be like it.

        Args:
            query: [batch, query heads, tokens, dim]; queries that are not of the tokens stored last are passed over.
            mask, scale: as in `attend`, for all the queries.
        """
        if not self.chooses or query.shape[-2] != self._num_new or self._num_new < 2:
            return
        pool, tokens = self._pool, self._pool.shape.tokens
        limits = self.selection.limits(pool.quota(self.block))
        complete = self.block.length // tokens
        if limits is None or not self.selection.has_choice(limits, complete):
            return
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        last = None if mask is None else mask[:, :, -1:]
        decision, _ = self._decide(query[:, :, -1:], last, scale, limits, complete)
        pool.settle(self.block)
        brought = self._bring(decision, limits, complete)
        self.selection.counts.ahead += len(brought)
        self._ahead = np.union1d(self._ahead, brought)

    def _decide(
        self, query: torch.Tensor, mask: torch.Tensor | None, scale: float, limits: Limits, complete: int
    ) -> tuple[Decision, NDArray[np.bool_]]:
        """A decision about the complete pages, and which of them are in frames or on their way there."""
        pool, selection, digests = self._pool, self.selection, self.digests
        pages = self.block.pages[:, :complete]
        if digests.count < complete:
            missing = pages[:, digests.count :]
            digests.add(self._keys_of(missing), pool.shape.tokens)
        self._hide(mask, complete)
        assert digests.centre is not None
        assert digests.radius is not None
        batch, heads, room, dim = digests.centre.shape
        self._meant = with_room(self._meant, len(pages), room)
        resident = pool.resident(pages)
        known = Digests(
            digests.centre,
            digests.radius,
            pool.desk.upload("meant", self._meant).view(batch, heads, room),
            selection.rotation(query.device, dim),
            scale,
            complete,
        )
        choose = selection.choose or pool.desk.decide
        decision = choose(query[:, :, 0], known, limits, resident)
        return decision._replace(chosen=decision.chosen[:, :complete]), resident  # there are no more

    def _keys_of(self, pages: Ids) -> torch.Tensor:
        """Keys of pages [rows, n] as [batch, heads, n * tokens, dim]."""
        each, place = np.unique(pages, return_inverse=True)
        keys = self._pool.keys_of(each)
        if len(each) < pages.size or not np.array_equal(each, pages.ravel()):
            keys = keys.index_select(0, self._pool.desk.upload("order", place.reshape(-1).astype(np.int64)))
        return keys.view(-1, self._pool.stride, pages.shape[1] * self._pool.shape.tokens, keys.shape[-1])

    def _bring(self, decision: Decision, limits: Limits, complete: int) -> Ids:
        """Bring what was chosen, and let others leave; the pages that were in no frame."""
        block, pool = self.block, self._pool
        for part, means in ((decision.chosen, True), (decision.ahead, True), (decision.victims, False)):
            row, at = np.nonzero(part >= 0)
            self._meant[row, part[row, at]] = means
        wanted = np.unique(np.take_along_axis(block.pages, decision.chosen, 1))
        victims = decision.victims
        away = np.take_along_axis(block.pages, np.maximum(victims, 0), 1)[victims >= 0]
        self.selection.counts.ahead_used += len(np.intersect1d(self._ahead, wanted))
        self._ahead = np.setdiff1d(self._ahead, np.union1d(wanted, away))
        before = block.pages[:, :complete]
        there = np.unique(before[pool.resident(before)])
        return pool.bring(wanted, away, there, limits.num_frames * block.num_sequences)

    def _fetch_ahead(self, decision: Decision) -> None:
        ahead = decision.ahead
        if ahead.size and (ahead >= 0).any():
            pages = np.take_along_axis(self.block.pages, np.maximum(ahead, 0), 1)[ahead >= 0]
            brought = self._pool.ahead(pages)
            self.selection.counts.ahead += len(brought)
            self._ahead = np.union1d(self._ahead, brought)

    # Masks

    def _hide(self, mask: torch.Tensor | None, complete: int) -> None:
        """Let no page be chosen of which no token may be attended to."""
        window, length = self.selection.context_window, self.block.length
        digests, tokens = self.digests, self._pool.shape.tokens
        beyond = window is not None and length - window >= tokens
        if beyond and window is not None:
            first = (length - window) // tokens
            if first > 0:
                reachable = torch.arange(digests.count, device=self.device) >= first
                digests.hide(reachable.view(1, 1, -1))
        if mask is not None and digests.hidden < complete:
            allowed = (mask if mask.dtype == torch.bool else mask >= 0)[:, :1, 0, : digests.count * tokens]
            digests.hide(allowed.reshape(allowed.shape[0], 1, digests.count, tokens).any(-1))

    def _mask(
        self, query: torch.Tensor, mask: torch.Tensor | None, columns: NDArray[np.int32], length: int
    ) -> torch.Tensor | None:
        """The mask of the chosen tokens, [batch, query heads, 1, length]."""
        window, total, tokens = self.selection.context_window, self.block.length, self._pool.shape.tokens
        if mask is None and (window is None or window >= total):
            return None
        first = np.concatenate([columns, np.full((len(columns), 1), (total - 1) // tokens, np.int32)], 1)
        places = (first[:, :, None] * tokens + np.arange(tokens)).reshape(len(columns), -1)[:, :length]
        heads, group = self._pool.stride, query.shape[1] // self._pool.stride
        index = self._pool.desk.upload("places", places.astype(np.int64)).view(-1, heads, 1, length)
        index = index.repeat_interleave(group, 1)
        found = None if mask is None else mask.expand(-1, query.shape[1], -1, -1).gather(-1, index)
        if window is None or window >= total:
            return found
        inside = index >= total - window
        if found is None:
            return inside
        return found & inside if found.dtype == torch.bool else found.masked_fill(~inside, torch.finfo(found.dtype).min)


def with_room(flags: NDArray[np.bool_], rows: int, room: int) -> NDArray[np.bool_]:
    """The same with room for so many pages; what is new is False."""
    if flags.shape == (rows, room):
        return flags
    found = np.zeros((rows, room), np.bool_)
    if len(flags) == rows:
        found[:, : flags.shape[1]] = flags[:, :room]
    return found
