"""A session: some modules stream from `open` to `close`.  It joins the actors and follows every pass."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch
from torch import nn

from fmstream.actors.compute import Executor
from fmstream.actors.loads import POLL_SECONDS, Loads
from fmstream.actors.prefetch import PrefetchActor
from fmstream.actors.scheduler import Scheduler
from fmstream.config import StreamConfig
from fmstream.core.arena import choose_page_bytes, num_pages
from fmstream.core.calibration import load_calibration
from fmstream.core.plan import Limits, Plan
from fmstream.core.policy import Policy
from fmstream.core.telemetry import PassRecord, Telemetry
from fmstream.device.accelerator import Accelerator
from fmstream.device.homes import FileHome
from fmstream.device.opening import device_name, open_device
from fmstream.errors import CancelledRun, ForkedError, StreamError
from fmstream.payloads import budget, groups, saved, sending, transforms
from fmstream.payloads.annex import Annex
from fmstream.payloads.compiled import REMEDY, refuse_recording
from fmstream.payloads.conduct import Conduct
from fmstream.payloads.embeddings import Tables
from fmstream.payloads.fitting import decide
from fmstream.payloads.kv.generating import GenerateSeam, KvOptions
from fmstream.payloads.passbook import Ended, Passbook
from fmstream.payloads.passes import Pass
from fmstream.payloads.planner import Meter, Planner
from fmstream.payloads.routes import Routes
from fmstream.payloads.seam import Seams
from fmstream.payloads.sites import Site
from fmstream.payloads.weights import Weights
from fmstream.policies import get as get_policy

NESTED_CALLS = 3
"""Calls of modules with parameters within one another, for which a page each is set aside."""


class Session:
    """Streams the weights of some modules until it is closed.

    Raises:
        ConfigError: an option, or a parameter, cannot be used.
        MemoryBudgetError: the memory is too small for the largest module.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        config: StreamConfig,
        publish: Callable[[Telemetry], None] | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.config = config
        self.policy: Policy = get_policy(config.policy)
        self.device = open_device(config.device)
        self.telemetry = telemetry or Telemetry()
        self.telemetry.policy = config.policy
        self.telemetry.device = str(self.device.torch_device)
        self.weights = Weights(roots, self.device.torch_device, self.telemetry)
        self.lock = threading.RLock()
        self.current: Pass | None = None
        self.closed = False
        self.forked = False
        self.failure: BaseException | None = None
        self.stop_reason: BaseException | None = None
        self.resident_plan: Plan | None = None
        self._close_requested = False
        self._leaving = False
        self._publish = publish
        self.locks: list[threading.RLock] = [self.lock]
        self.storages: set[int] = set()
        self._routes: Routes | None = None
        self._seams = Seams()
        self._generating = GenerateSeam(KvOptions.of(config), self.device, self.telemetry)
        self._executor: Executor | None = None
        self._prefetch: PrefetchActor | None = None
        self._scheduler: Scheduler | None = None
        card = self.device if isinstance(self.device, Accelerator) else None
        self._annex = Annex(card, self.telemetry, config.floor_bytes) if card is not None else None
        self.tables = Tables(card, self.telemetry, config, self._check_stop, self.weights.stream_table)
        self.weights.tables = self.tables
        measured = config.calibration
        self._meter = Meter(None if measured is None else load_calibration(measured, device_name(self.device)))
        self._passbook = Passbook(self.telemetry, config.policy, self._learn)
        self._conduct: Conduct | None = None
        self._spilled = False

    # Opening and closing

    def open(self) -> None:
        """Put the modules into streaming.  They are as before if this fails."""
        try:
            self._survey()
            groups.join(self)
        except BaseException:
            self._teardown()
            raise

    def _survey(self, *, begun: bool = False) -> None:
        """Find parameters, decide what fits, and install what is needed."""
        self._generating.put(self.weights.roots.values())
        weights, telemetry = self.weights, self.telemetry
        found = weights.survey()
        annex = self._annex
        fitting = decide(weights, found, self.tables, self.config, annex.device if annex else None, begun=begun)
        totals, memory, fits = fitting.totals, fitting.memory, fitting.fits
        telemetry.weights_bytes = totals.weights_bytes
        telemetry.table_bytes = fitting.table_bytes
        telemetry.kept_bytes = totals.kept_bytes
        telemetry.smallest_bytes = totals.smallest_bytes
        telemetry.memory_bytes = memory
        for name, num_bytes, reason in found.kept:
            if num_bytes:
                telemetry.notes.append(f"{name} ({num_bytes} bytes) stays in place: {reason}")
        self.storages = {m.original.untyped_storage().data_ptr() for m in weights.masters}
        if self.config.spill_dir is not None and not self._spilled and not fits:
            weights.spill(os.fspath(self.config.spill_dir))
            self._spilled = True
        if annex is None and fits:
            self._let_ram_be()
        elif annex is not None and not fits:
            annex.pin(weights, self.config)
        self._count_homes()
        self.resident_plan = budget.all_resident(self.config.policy, weights) if fits else None
        self._routes = None
        if fits and not weights.masters:
            telemetry.notes.append("all weights fit in the memory given: nothing is streamed")
            for index, (name, module) in enumerate(weights.roots.items()):
                self._seams.put(self, Site(index, name, module))
            return
        for name in found.whole:
            note = f"{name} is compiled as a whole, and runs without the compiler while it streams: {REMEDY}"
            if note not in telemetry.notes:
                telemetry.notes.append(note)
        kept = totals.kept_bytes if annex is None else 0
        given = sum(weights.sizes) - weights.unbound_bytes if fits else memory - kept - fitting.row_bytes
        self._start_actors(given, fitting.least_bytes)
        if annex is not None:
            annex.place(weights)
        sending.register()
        weights.install()
        for site in weights.sites:
            self._seams.put(self, site)

    @property
    def _is_automatic(self) -> bool:
        """Whether to take no more of an accelerator's memory than a pass can make use of."""
        return self._annex is not None and self.config.memory == "auto"

    def _count_homes(self) -> None:
        telemetry = self.telemetry
        streamed = [m for m in self.weights.masters if m.index not in self.weights.unbound]
        telemetry.file_bytes = sum(m.span for m in streamed if isinstance(m.home, FileHome))
        telemetry.ram_bytes = telemetry.weights_bytes - telemetry.file_bytes - telemetry.kept_bytes
        self.weights.homes_changed = False

    def _let_ram_be(self) -> None:
        """Where all fits, a master in RAM is used as it is; only files are brought in."""
        weights = self.weights
        in_ram = {id(m.original) for m in weights.masters if not isinstance(m.home, FileHome)}
        if in_ram:
            before = set(weights.in_place)
            weights.in_place |= in_ram
            weights.survey()
            weights.in_place = before
            self.tables.choose(weights.choose_tables() if self.tables.is_any else ())

    def _start_actors(self, memory: int, smallest: int) -> None:
        config = self.config
        total = sum(self.weights.sizes) - self.weights.unbound_bytes
        page_bytes = choose_page_bytes(max(1, min(memory, total)))
        frames = max(1, num_pages(total, page_bytes) if memory >= total else memory // page_bytes)
        if self._prefetch is None:
            self._prefetch = PrefetchActor(config.num_workers, config.staging_bytes, self.telemetry)
        annex, prefetch = self._annex, self._prefetch
        loads = annex.loads(self.weights, prefetch) if annex else Loads(self.weights, prefetch, self.telemetry)
        self._executor = Executor(self.weights, self.device, loads, self.telemetry, frames * page_bytes, page_bytes)
        loads.stop_reason = self.stop_reason
        if annex is not None:
            # Only whole pages are held, and nested calls take theirs apart.
            annex.room.smallest = min(frames, num_pages(smallest, page_bytes) + NESTED_CALLS) * page_bytes
            if self._is_automatic:
                # The user's own tensors come first, and how much they take is seen in a pass.
                self._executor.resize(annex.room.smallest)
            self._meter.known = annex.learn_costs(self._executor, self._meter.known)
        else:
            self._meter.begin(self.telemetry)
        self.weights.executor = self._executor
        limits = Limits(
            memory_bytes=frames * page_bytes,
            page_bytes=page_bytes,
            lookahead=None if config.prefetch_window == "auto" else config.prefetch_window,
            unit_bytes=config.unit_bytes,
        )
        planner = Planner(self.policy, limits, self._meter, automatic=self._is_automatic)
        if self._scheduler is None:
            publish = None if self._publish is None else lambda: self._publish(self.telemetry)  # type: ignore[misc]
            self._scheduler = Scheduler(self.telemetry, publish, self._stop)
            self._scheduler.start()
        room = annex.room if annex is not None else None
        self._routes = Routes(self.weights, self.telemetry, planner, self._scheduler, room)
        self._conduct = Conduct(
            self.weights,
            self._executor,
            self._routes,
            self.tables,
            annex,
            self._meter,
            self._passbook,
            self.telemetry,
            self.resident_plan,
        )

    def _stop(self, reason: BaseException) -> None:
        """Let the run end at its next call or wait, for a reason that is not of its making."""
        self.stop_reason = reason
        if self._executor is not None:
            self._executor.loads.stop_reason = reason

    def _check_stop(self) -> None:
        if self.stop_reason is not None:
            raise self.stop_reason

    def close(self) -> None:
        """Restore the modules and stop the actors.  Idempotent; within a pass it takes effect at its end."""
        if self.forked:
            return
        with self.lock:
            if self.current is not None:
                self._close_requested = True
                return
            self._teardown()

    def _teardown(self) -> None:
        """Undo everything.  Each step may be repeated, so an interrupted one is finished by the next call."""
        if self.closed:
            return
        self.telemetry.ended = time.perf_counter()
        self._leaving = True
        interrupted = True
        try:
            with ExitStack() as steps:  # carried out from the last to the first, whatever one of them raises
                steps.callback(self.weights.close_files)
                steps.callback(self.weights.spilled.bring_back)
                if self._annex is not None:
                    steps.callback(self._annex.unpin)
                if self._scheduler is not None:
                    steps.callback(self._scheduler.close)
                if self._prefetch is not None:
                    steps.callback(self._prefetch.close)
                if self._executor is not None:
                    steps.callback(self._executor.close)
                steps.callback(self.tables.close)
                steps.callback(self._withdraw)
                steps.callback(self._passbook.take_times, block=True)
            interrupted = False
        except Exception:
            interrupted = False
            raise
        finally:
            if not interrupted:
                groups.leave(self)
                self.closed = True

    def _withdraw(self) -> None:
        """Take everything out of the modules again."""
        self._generating.take_out()
        self._seams.take_out()
        self.weights.uninstall()
        if self._annex is not None:
            self._annex.bring_back()
        if self._executor is not None:
            self._executor.close()

    def cancel(self, reason: str = "the run was cancelled") -> None:
        """Let the run end at its next call or wait, with `CancelledRun`.  May be called from any thread."""
        self._stop(CancelledRun(reason))

    # Calls

    def outermost(self, site: Site, plain: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a module that no other streamed module is calling: one pass."""
        if self.forked:
            raise ForkedError(
                f"{site.title!r} streams in the process that this one was forked from: "
                "close the handle before forking, or open one in the child"
            )
        if self._executor is None and not self.closed:
            return self._watched(site, plain, args, kwargs)
        refuse_recording(site.module)
        current = self.current
        if current is not None and current.thread != get_ident() and self._is_inside(site, current):
            # A thread that a forward started: waiting for the pass would be waiting for ourselves.  Stand-ins fault.
            return plain(*args, **kwargs)
        with ExitStack() as locks:
            for lock in self.locks:
                while not lock.acquire(timeout=POLL_SECONDS):
                    if self.stop_reason is not None:
                        raise self.stop_reason
                locks.callback(lock.release)
            if self.closed:
                return plain(*args, **kwargs)
            try:
                return self._pass(site, plain, args, kwargs)
            except StreamError as error:
                self.failure = error
                self._teardown()
                raise
            finally:
                if self._close_requested:
                    self._teardown()

    def _is_inside(self, site: Site, current: Pass) -> bool:
        """Whether a module is part of the one that another thread is calling."""
        root = current.root.module
        return site.module is not root and any(module is site.module for module in root.modules())

    def _watched(self, site: Site, plain: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A pass with nothing to stream."""
        if self.stop_reason is not None:
            raise self.stop_reason
        began = time.perf_counter()
        result = plain(*args, **kwargs)
        ended = time.perf_counter()
        self.telemetry.passes.append(
            PassRecord(site.title, self.config.policy, began, ended, ended - began, 0.0, 0, 0, 0)
        )
        return result

    def _pass(self, site: Site, plain: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        weights = self.weights
        with transforms.outside():
            weights.refresh_masters()
            site = self._present(site)
            if weights.structure_changed() or self._seams.are_replaced():
                site = self._resurvey(site)
        executor, conduct = self._executor, self._conduct
        if executor is None or conduct is None:
            return self._watched(site, plain, args, kwargs)
        try:
            with transforms.outside():
                self.current = current = conduct.begin(site, args, kwargs)
            try:
                if torch.is_inference_mode_enabled() or transforms.are_active():
                    result = self._call(current, site, plain, args, kwargs)
                else:
                    with saved.hooks(lambda: executor.slab, weights.bound_at, weights.begin_graph):
                        result = self._call(current, site, plain, args, kwargs)
            finally:
                weights.end_graph()
            with transforms.outside():
                conduct.finish(current)
                if weights.homes_changed:
                    self._count_homes()
            return result
        except BaseException as error:
            with transforms.outside():
                executor.abort_pass()
                self.tables.abort_pass()
                weights.settle_aliases()
            if self._annex is not None and self._annex.room.fail(error, executor.held_bytes):
                assert self._routes is not None
                self._routes.forget()
            raise
        finally:
            weights.stack.clear()
            self.current = None

    def _call(self, current: Pass, site: Site, plain: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if current.light:
            self.weights.stack.append(site)
            return plain(*args, **kwargs)
        token = current.enter(site)
        try:
            return plain(*args, **kwargs)
        finally:
            current.leave(token)

    def _resurvey(self, site: Site) -> Site:
        """The modules changed: restore them, look again, and go on with new plans."""
        self._withdraw()
        self.tables.give_back()
        self._executor = self._conduct = None
        self.weights.executor = None
        self.weights.changed_shape = False
        self._survey(begun=True)
        groups.join(self)
        self.telemetry.replans += 1
        return self._present(site)

    def _present(self, site: Site) -> Site:
        """The site as the last survey knows it; a thread may have waited for the lock over a new survey."""
        sites = self.weights.sites
        if 0 <= site.index < len(sites) and sites[site.index] is site:
            return site
        return next((known for known in sites if known.module is site.module), Site(-1, site.name, site.module))

    def settle_times(self) -> None:
        """Wait until the times of all passes are known; returns at once while a pass goes on."""
        if not self.forked and self.lock.acquire(blocking=False):
            try:
                if self.current is None:
                    self._passbook.take_times(block=True)
            finally:
                self.lock.release()

    def settle_plans(self) -> None:
        """Wait until the plans that are being made are there; the next passes take them."""
        self.settle_times()
        if self._routes is not None:
            self._routes.settle()

    def _learn(self, ended: Ended) -> None:
        """Let a pass that followed its calls teach about routes, unless all is over."""
        if self._routes is not None and not ended.current.light and not self._leaving:
            self._routes.learn(ended)
