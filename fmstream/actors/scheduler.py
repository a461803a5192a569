"""The scheduler: an asyncio loop in its own thread that plans, watches memory and publishes progress.

It is never on the path of a copy.  The compute actor hands it work and goes on; it hands back a future.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import psutil

from fmstream.core.telemetry import Telemetry

T = TypeVar("T")

TICK_SECONDS = 0.2
"""Time between two looks at memory and two updates of the progress display."""


class Scheduler:
    """One daemon thread with one event loop.  Starts with the first use; `close` is idempotent and bounded."""

    def __init__(
        self,
        telemetry: Telemetry,
        publish: Callable[[], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._publish = publish
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._process = psutil.Process()

    def start(self) -> None:
        """Start the thread; does nothing if it runs."""
        if self._thread is not None:
            return
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="fmstream scheduler", daemon=True)
        self._thread.start()
        ready.wait()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` on the scheduler's thread."""
        self.start()
        assert self._loop is not None

        async def carry_out() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(carry_out(), self._loop)

    def close(self, timeout: float = 1.0) -> None:
        """Stop the loop and wait for its thread, at most ``timeout`` seconds."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        if thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._watch(ready))
        except BaseException as error:  # nobody waits for this thread: the failure goes to the session
            ready.set()
            if self._on_failure is None:
                raise
            self._on_failure(error)

    async def _watch(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        ready.set()
        while not self._stop.is_set():
            self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_SECONDS)
        self._look()

    def _look(self) -> None:
        rss = self._process.memory_info().rss
        self._telemetry.peak_rss_bytes = max(self._telemetry.peak_rss_bytes, rss)
        if self._publish is not None:
            self._publish()
