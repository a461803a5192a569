"""The handle: modules stream while it is open."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any

from torch import nn

from fmstream.config import MISSING, Missing, StreamConfig
from fmstream.core.telemetry import Telemetry
from fmstream.doors.flash import options_of
from fmstream.doors.targets import find_call, find_roots
from fmstream.errors import ClosedError, ConfigError
from fmstream.payloads import budget
from fmstream.payloads.embeddings import find_tables, least_row_bytes, release
from fmstream.payloads.session import Session
from fmstream.payloads.sites import survey
from fmstream.report import Report, describe_environment
from fmstream.report.progress import make_progress, snapshot

_open: weakref.WeakSet[Stream] = weakref.WeakSet()
_opening = threading.RLock()


class Stream:
    """Streams the weights of some modules from its making to `close`; a context manager.

    The original objects stream: call them as ever.  A second handle on the same modules takes them over, and gives
    them back to the first when it closes.
    """

    def __init__(self, pipeline: Any, roots: dict[str, nn.Module], config: StreamConfig) -> None:
        self._pipeline = pipeline
        self._roots = roots
        self._config = config
        self._modules = {id(m) for root in roots.values() for m in root.modules()}
        self._suspended: list[Stream] = []
        self._suspended_by: Stream | None = None
        self._closed = False
        self.telemetry = Telemetry()
        self._progress = make_progress(config.progress, self.telemetry.notes.append)
        if self._progress is not None:
            self._progress.open(type(pipeline).__name__)
        with _opening:
            self._suspended = [other for other in list(_open) if other._modules & self._modules]
            for other in self._suspended:
                other._suspend(self)
            try:
                self._session = self._start()
            except BaseException:
                self._resume_others()
                self._close_progress()
                raise
            _open.add(self)

    def _start(self) -> Session:
        session = Session(self._roots, self._config, self._publish, self.telemetry)
        session.open()
        return session

    def _publish(self, telemetry: Telemetry) -> None:
        if self._progress is not None:
            self._progress.update(snapshot(telemetry))

    def _suspend(self, by: Stream) -> None:
        current = self._session.current
        if current is not None and current.thread == threading.get_ident():
            raise ConfigError("these modules are streaming in a call that is going on: open the handle before it")
        _open.discard(self)
        self._session.close()
        self._suspended_by = by

    def _resume_others(self) -> None:
        """Give the modules back to whom they were taken from, or leave that to whoever took them from here."""
        heir, self._suspended_by = self._suspended_by, None
        while self._suspended:
            other = self._suspended[-1]
            other._suspended_by = heir
            if heir is not None:
                heir._suspended.append(other)
            elif not other._closed:
                other._session = other._start()
                _open.add(other)
            self._suspended.pop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline.

        Raises:
            ClosedError: the handle is closed.
        """
        if self._closed:
            raise ClosedError("this handle is closed: call the pipeline itself, or open another handle")
        return find_call(self._pipeline, None)(*args, **kwargs)

    @property
    def report(self) -> Report:
        """What was measured so far."""
        self._session.settle_times()
        return Report.from_telemetry(self.telemetry, describe_environment())

    @property
    def is_idle(self) -> bool:
        """Whether no call that streams is going on."""
        return self._session.current is None

    @property
    def closed(self) -> bool:
        """Whether the modules have been given back."""
        return self._closed

    def cancel(self, reason: str = "the run was cancelled") -> None:
        """Let a call that is going on end with `CancelledRun`; from any thread."""
        self._session.cancel(reason)

    def close(self) -> None:
        """Leave the modules as they were.  Idempotent; a Ctrl-C meanwhile is raised when that is done."""
        interrupt: KeyboardInterrupt | None = None
        while not self._closed:
            try:
                self._close()
            except KeyboardInterrupt as error:
                if interrupt is not None:
                    raise
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _close(self) -> None:
        try:
            with _opening:
                _open.discard(self)
                self._session.close()
                self._resume_others()
                self._closed = True
        finally:
            self._close_progress()

    def _close_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def stream(
    pipeline: Any,
    *,
    policy: str | Missing = MISSING,
    memory: int | str | Missing | None = MISSING,
    device: str | Missing | None = MISSING,
    modules: Any = None,
    config: Any = None,
    progress: bool | Missing = MISSING,
    **options: Any,
) -> Stream:
    """Let the modules of a pipeline stream until the handle is closed.

    Args:
        pipeline: a diffusers pipeline, a transformers model, any ``nn.Module``, a mapping or sequence of modules, or a
            callable that uses the modules named by ``modules``.
        policy, memory, device, progress: see `StreamConfig`.
        modules: the modules to stream, where they cannot be found in ``pipeline``.
        config: a `StreamConfig`, a mapping of its options, or the path of a TOML file; the keywords stand above it, and
            it stands above a ``flash_memory_config`` that the model comes with.
        **options: any other option of `StreamConfig`.

    Raises:
        ConfigError: an option or a parameter cannot be used.
        MemoryBudgetError: ``memory`` is less than the least that works; the message names it.
    """
    overrides = {"policy": policy, "memory": memory, "device": device, "progress": progress, **options}
    roots = find_roots(pipeline, modules)
    return Stream(pipeline, roots, StreamConfig.from_options(config, options_of(pipeline, roots), **overrides))


class _Nobody:
    """Keeps masters that are only measured."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a master that is only measured was used: {name}")


def smallest_memory(pipeline: Any, modules: Any = None) -> int:
    """The least ``memory`` in bytes with which a pipeline can stream: its largest module with all around it."""
    roots = find_roots(pipeline, modules)
    cpu = next(iter(roots.values()))
    found = survey(roots, _device_of(cpu), _Nobody(), set())
    tables = find_tables(found.sites, found.masters, set())
    unbound = release(found.sites, found.masters, tables)
    row_bytes = least_row_bytes([found.masters[index] for index in tables])
    smallest = budget.measure(found, roots, unbound, row_bytes).smallest_bytes
    for master in found.masters:
        master.retire()
    return smallest


def _device_of(module: nn.Module) -> Any:
    parameter = next(module.parameters(), None)
    return parameter.device if parameter is not None else None
