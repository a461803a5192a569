"""The paged cache: what transformers asks of a ``Cache``, over pools of pages."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from fmstream.config import check_kv_options, check_selection, host_bytes
from fmstream.core.choices import History, Sample, SelectionCounts
from fmstream.device.lanes import Lanes, lanes_of
from fmstream.device.opening import open_device
from fmstream.device.page_packing import packed_bytes, why_not_unpacked
from fmstream.device.pagefile import PageFile
from fmstream.errors import ConfigError
from fmstream.payloads.kv.attention import selecting
from fmstream.payloads.kv.blocks import BlockTable
from fmstream.payloads.kv.budgeting import BudgetSizing
from fmstream.payloads.kv.choosing import HORIZON, NUM_EXEMPT, Chooser, Selection
from fmstream.payloads.kv.chosen_layer import ChosenLayer
from fmstream.payloads.kv.chosen_pool import ChosenPool
from fmstream.payloads.kv.compat import Cache, DynamicCache, DynamicLayer
from fmstream.payloads.kv.frames import PageCounts
from fmstream.payloads.kv.layer import PagedLayer, PoolFor
from fmstream.payloads.kv.packing import Pack, Packing
from fmstream.payloads.kv.pool import Pool
from fmstream.payloads.kv.rotation import Rotation
from fmstream.payloads.kv.shape import PageShape
from fmstream.payloads.kv.sizing import Sizes, Sizing
from fmstream.payloads.kv.tiers import TierCounts, Tiers

MEBIBYTE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class KvStatistics:
    """A snapshot of a cache, over all its pools.

    Attributes:
        page_bytes: bytes of a page, of the largest pool's.
        device_pages: pages of fast memory, those where a layer is put together included.
        resident_pages: pages in frames.
        host_pages, file_pages: pages that have a home in host memory, in the file; ``packed_pages``: those of
            host_pages that are packed.
        device_bytes, host_bytes: memory taken.
        recalled_bytes, spilled_bytes: what went to the device and came from it, as it crossed the link.
        file_read_bytes, file_written_bytes: what came from the file and went to it.
        num_lent: times that keys or values were kept by somebody, so that other memory had to be taken.
        digest_bytes: memory of the device for the digests of pages, beside ``device_bytes``.
        selection: what choosing pages did.
    """

    page_bytes: int
    device_pages: int
    resident_pages: int
    host_pages: int
    packed_pages: int
    file_pages: int
    device_bytes: int
    host_bytes: int
    recalled_bytes: int
    spilled_bytes: int
    file_read_bytes: int
    file_written_bytes: int
    num_lent: int
    digest_bytes: int
    selection: SelectionCounts


class Moves(NamedTuple):
    """What a pool has moved, in pages of so many bytes."""

    page_bytes: int
    pages: PageCounts


class PagedCache(DynamicCache):
    """A key-value cache of fixed size on the device; what does not fit is on the host, and in a file.

    Without a ``kv_budget`` every token attends to every other, so that results are ``DynamicCache``'s, bit for bit.
    Layers with full attention are paged; sliding windows and recurrent states do not grow and are transformers' own.

    With a ``kv_budget`` a step of one token attends, in each layer but the first two and for each KV head, to the pages
    that matter most to it, and to everything where too much would be left out.  That needs the model's attention to be
    set (see `selecting`); `run` and `stream` do it.

    Args:
        config: the model's configuration.
        kv_cache_max_pages: pages of fast memory for the layers of each shape; a page holds ``page_tokens`` tokens of
            one sequence in one layer.  The least is one layer of all sequences.  None takes what is needed, as far as
            the device's free memory goes.
            With a ``kv_budget`` a page is one KV head's.
        page_tokens: tokens of a page.
        cpu_offload_threshold_mb: where less of the device's memory is free, in mebibytes, pages leave it and the pool
            is made smaller.
        kv_host_memory: host memory that pages may take: bytes, "16GiB", or "auto", which leaves a floor.
        spill_dir: folder for pages that find no room in host memory.
        note: takes sentences for the user; None collects them in ``notes``.
        kv_budget: part of all keys and values that lies on the device, such as 0.135, the place where one layer is put
            together included; or, as an int, pages that a KV head attends to in the mean of the layers, of which the
            first have more than the last.  However small, there is room for one whole layer and for some pages of each
            head.
        context_window: tokens, the newest included, that each token may attend to; None sets no limit.
        choose: decides in place of the digests; see `Chooser`.
        pack_pages: let pages of bfloat16 in host memory take three quarters of their bytes there and over the link,
            without loss; a function packs in place of native code.  Has no effect with a ``kv_budget``, on the CPU, and
            on pages whose elements are not a multiple of 512.

    Raises:
        ConfigError: an option has a value that cannot be used.
    """

    def __init__(
        self,
        config: Any,
        kv_cache_max_pages: int | None = None,
        *,
        page_tokens: int = 32,
        cpu_offload_threshold_mb: int = 0,
        kv_host_memory: int | str = "auto",
        spill_dir: str | os.PathLike[str] | None = None,
        note: Callable[[str], None] | None = None,
        kv_budget: float | int | None = None,
        context_window: int | None = None,
        choose: Chooser | None = None,
        pack_pages: bool | Pack = True,
    ) -> None:
        check_kv_options(kv_cache_max_pages, page_tokens, cpu_offload_threshold_mb, kv_host_memory)
        check_selection(kv_budget, context_window)
        check_model_config(config)
        if spill_dir is not None:
            PageFile(spill_dir, 1).close()  # a folder that cannot be used is said now, not when memory is full
        plain = DynamicCache(config=config)
        self.notes: list[str] = []
        self._note = note or self.notes.append
        self.moves: list[Moves] = []
        """What its pools have moved; it can be read when they are gone."""
        self._page_tokens = page_tokens
        self._pack = pack_pages
        self._host_bytes = host_bytes(kv_host_memory)
        self._spill_dir = spill_dir
        self._pools: dict[tuple[torch.device, PageShape], Pool] = {}
        self._siblings: weakref.WeakKeyDictionary[Pool, list[BlockTable]] = weakref.WeakKeyDictionary()
        self._lanes: dict[torch.device, Lanes] = {}
        self._making = threading.Lock()
        num_paged = sum(map(is_paged, plain.layers))
        threshold = cpu_offload_threshold_mb * MEBIBYTE
        num_choosing = 0 if kv_budget is None else max(0, num_paged - NUM_EXEMPT)
        self._sizing: Sizes = (
            Sizing(kv_cache_max_pages, threshold, num_paged)
            if kv_budget is None
            else BudgetSizing(kv_budget, kv_cache_max_pages, threshold, num_paged, num_choosing)
        )
        self.history = History()
        """Where pages lay over time; it can be read when the cache is gone."""
        text = config.get_text_config(decoder=True)
        self.selection: Selection | None = None
        """How pages are chosen; None where every token attends to every other."""
        if kv_budget is not None or context_window is not None:
            self.selection = Selection(
                SelectionCounts(),
                lambda: text._attn_implementation,
                Rotation(text, HORIZON),
                choose,
                context_window=context_window,
            )
        self._check_windows(plain.layers, context_window)
        if not num_paged or (kv_budget is not None and not num_choosing):
            what = "kv_budget chooses nothing" if num_paged else "nothing lies in pages"
            self._note(
                f"{what} here: {num_paged} of {len(plain.layers)} layers keep all tokens, of which "
                f"the first {NUM_EXEMPT} always attend to all"
            )
        pool_for, layers = weak(self._pool_for), list(plain.layers)
        places = [index for index, layer in enumerate(layers) if is_paged(layer)]
        for rank, index in enumerate(places):
            chooses = kv_budget is not None and rank >= NUM_EXEMPT
            layers[index] = (
                PagedLayer(pool_for, self._sizing)
                if self.selection is None
                else ChosenLayer(pool_for, self._sizing, self.selection, chooses=chooses)
            )
        Cache.__init__(self, layers=layers)

    @staticmethod
    def _check_windows(layers: Iterable[Any], window: int | None) -> None:
        """Layers that slide are transformers' own, and do not know of a narrower window."""
        widest = max((getattr(layer, "sliding_window", None) or 0 for layer in layers), default=0)
        if window is not None and window < widest:
            raise ConfigError(
                f"context_window={window} is less than the {widest} tokens that some layers of this model attend to "
                f"anyway, in a window of their own: give at least {widest}, or set the model's sliding_window"
            )

    def _pool_for(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[Pool, list[BlockTable]]:
        if keys.dtype != values.dtype:
            raise ConfigError(f"keys are {keys.dtype} and values {values.dtype}: a page holds one type")
        apart, heads = self.selection is not None, int(keys.shape[1])
        shape = PageShape(self._page_tokens, 1 if apart else heads, keys.shape[-1], values.shape[-1], keys.dtype)
        key = (keys.device, shape)
        with self._making:  # forks share pools, and may be used by different threads
            pool = self._pools.get(key)
            if pool is not None and (pool.turn.is_broken or pool.is_closed):
                del self._pools[key]
                pool = None  # if no layer is in it any more, its memory is free for the new one
            if pool is None:
                self._pools[key] = pool = self._new_pool(shape, keys, heads if apart else None)
        return pool, self._siblings.setdefault(pool, [])

    def _new_pool(self, shape: PageShape, keys: torch.Tensor, heads: int | None) -> Pool:
        """A pool for such keys; for pages of one KV head each where ``heads`` are given."""
        if keys.device not in self._lanes:
            self._lanes[keys.device] = lanes_of(open_device(keys.device))
        lanes, layers = self._lanes[keys.device], self._sizing.num_layers
        size = self._sizing.first(lanes, shape, keys.shape[0] * int(keys.shape[1]) // shape.heads, keys.shape[-2])
        tiers = Tiers(lanes, shape.num_bytes, self._host_bytes, self._spill_dir, self._note)
        pool = (
            Pool(lanes, shape, tiers, layers, size, self._packing(lanes.torch_device, shape))
            if heads is None
            else ChosenPool(lanes, shape, tiers, layers, size, heads)
        )
        self.moves.append(Moves(shape.num_bytes, pool.frames.counts))
        return pool

    def _packing(self, device: torch.device, shape: PageShape) -> Packing | None:
        """How pages are packed on their way to a device; None if nothing is gained by it, or it cannot unpack them."""
        packed = packed_bytes(shape.dtype, shape.elements) if self._pack and device.type != "cpu" else None
        if packed is None:
            return None
        why_not = why_not_unpacked(device, shape.elements)
        if why_not is not None:
            self._note(
                f"pages of keys and values cross the link as they are, which takes a third longer: the kernel that "
                f"unpacks them was not built ({why_not}); pip install 'fmstream-runtime[cuda]'"
            )
            return None
        return Packing(packed) if isinstance(self._pack, bool) else Packing(packed, self._pack)

    def selecting(self, model: Any) -> AbstractContextManager[None]:
        """Set a model's attention to the one that chooses pages for the body of ``with``; without effect if nothing is
        to be chosen.

        Raises:
            ConfigError: the model's attention is not "sdpa", or cannot be exchanged.
        """
        return contextlib.nullcontext() if self.selection is None else self._selecting(model, self.selection)

    @contextlib.contextmanager
    def _selecting(self, model: Any, selection: Selection) -> Iterator[None]:
        config, before = model.config.get_text_config(decoder=True), selection.implementation
        # The cache may have been made of a copy of the model's configuration.
        selection.implementation = lambda: config._attn_implementation
        try:
            with selecting(model):
                yield
        finally:
            selection.implementation = before

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """See transformers' ``Cache``; a sample of where pages lie is taken as a pass begins."""
        if layer_idx == 0 and self.history.is_due():
            self.history.add(*self._where())
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _where(self) -> tuple[int, int, int]:
        pools = list(self._pools.values())
        tiers = [pool.tiers.counts() for pool in pools]
        return (
            sum(pool.frames.num_taken() for pool in pools),
            sum(tier.host_pages for tier in tiers),
            sum(tier.file_pages for tier in tiers),
        )

    @property
    def samples(self) -> list[Sample]:
        """Where pages lay as passes began."""
        return list(self.history.samples)

    def fork(self) -> PagedCache:
        """A cache of the same content in the same pools; pages are shared until either writes to them."""
        other: PagedCache = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._siblings, other.layers = weakref.WeakKeyDictionary(), []
        other.history = copy.deepcopy(self.history)
        pool_for = weak(other._pool_for)
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                siblings = other._siblings.setdefault(layer.pool, []) if layer.pool is not None else []
                other.layers.append(layer.fork(pool_for, siblings))
            else:
                other.layers.append(copy.deepcopy(layer))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        memo[id(self)] = forked = self.fork()
        return forked

    def __copy__(self) -> PagedCache:
        return self.fork()  # a plain copy would share the layers, and write to the other's pages

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a PagedCache cannot be pickled, for its pages lie on the device: copy.deepcopy it within the process, or "
            "save what its layers hold, torch.save([(layer.keys, layer.values) for layer in cache.layers], file)"
        )

    @property
    def pools(self) -> Iterable[Pool]:
        """The pools, one for each shape of keys and values."""
        return self._pools.values()

    def statistics(self) -> KvStatistics:
        """What the cache holds and has moved so far."""
        pools = list(self._pools.values())
        tiers: list[TierCounts] = [pool.tiers.counts() for pool in pools]
        states = [pool.frames.table.counts() for pool in pools]
        return KvStatistics(
            page_bytes=max((pool.shape.num_bytes for pool in pools), default=0),
            device_pages=sum(pool.max_pages for pool in pools),
            resident_pages=sum(state.resident for state in states),
            host_pages=sum(tier.host_pages for tier in tiers),
            packed_pages=sum(tier.packed_pages for tier in tiers),
            file_pages=sum(tier.file_pages for tier in tiers),
            device_bytes=sum(pool.device_bytes for pool in pools),
            host_bytes=sum(tier.host_bytes for tier in tiers),
            recalled_bytes=sum(pool.frames.counts.recalled_bytes for pool in pools),
            spilled_bytes=sum(pool.frames.counts.spilled * pool.shape.num_bytes for pool in pools),
            file_read_bytes=sum(tier.file_read_bytes for tier in tiers),
            file_written_bytes=sum(tier.file_written_bytes for tier in tiers),
            num_lent=sum(pool.num_lent for pool in pools),
            digest_bytes=sum(layer.digests.num_bytes for layer in self.layers if isinstance(layer, ChosenLayer)),
            selection=copy.copy(self.selection.counts) if self.selection is not None else SelectionCounts(),
        )

    def check(self) -> None:
        """Verify the laws of all pools."""
        for pool in self._pools.values():
            with pool.turn.lock:
                pool.check()

    def close(self) -> None:
        """Forget everything and give all memory back; may be called again.

        Pools in which a fork has something stay with it.
        """
        self.reset()  # type: ignore[no-untyped-call]
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.leave()
        for key, pool in list(self._pools.items()):
            if not pool.is_used:
                del self._pools[key]
                pool.close()
        self._siblings.clear()
        if not self._pools:
            self._lanes.clear()


def check_model_config(config: Any) -> None:
    """Check that a cache can be made for it.

    Raises:
        ConfigError: it is no configuration of a model of transformers.
    """
    if not callable(getattr(config, "get_text_config", None)):
        raise ConfigError(
            f"{type(config).__name__} is no configuration of a transformers model: give PagedCache model.config"
        )


def is_paged(layer: Any) -> bool:
    """Whether a layer of transformers' own grows with the sequence, and is plain enough to lie in pages."""
    return type(layer) is DynamicLayer


def weak(pool_for: PoolFor) -> PoolFor:
    """The same without keeping the cache alive: a cycle would leave its memory taken until the next collection."""
    method: weakref.WeakMethod[Any] = weakref.WeakMethod(pool_for)

    def call(keys: torch.Tensor, values: torch.Tensor) -> tuple[Pool, list[BlockTable]]:
        bound = method()
        assert bound is not None
        found: tuple[Pool, list[BlockTable]] = bound(keys, values)
        return found

    return call
