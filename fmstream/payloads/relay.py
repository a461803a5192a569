"""An iterator that waits, for an event loop that must not: a thread takes its steps."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fmstream.device.modes import Modes


class Stoppable(Protocol):
    """What is iterated over."""

    def __next__(self) -> Tensor:
        """The next result."""

    def cancel(self, reason: str = ...) -> None:
        """Let the step that is being taken end early."""

    def give_back(self, latents: Tensor) -> None:
        """Take back a result that did not reach the user."""

    def pause(self) -> None:
        """Give up what it keeps between steps."""


Outcome = tuple[Tensor | None, BaseException | None]
"""A result or an error; neither at the end."""


class Request(NamedTuple):
    """What the thread is to call, and who waits for it."""

    call: Callable[[], Tensor | None]
    future: asyncio.Future[Outcome]


async def relay(source: Stoppable) -> AsyncIterator[Tensor]:
    """Take the steps of ``source`` in a daemon thread, each when it is asked for, under the caller's modes.

    Cancelling the task cancels the step, and waits until it has ended.  An iteration that is left pauses the source.
    """
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    loop = asyncio.get_running_loop()
    context, modes, stream = contextvars.copy_context(), Modes(), on_present_stream()

    def work() -> None:
        with modes.entered(), stream:
            while (request := requests.get()) is not None:
                _answer(loop, request.future, context.run(_outcome, request.call))
            source.pause()

    def ask(call: Callable[[], Tensor | None]) -> asyncio.Future[Outcome]:
        future: asyncio.Future[Outcome] = loop.create_future()
        requests.put(Request(call, future))
        return future

    threading.Thread(target=work, name="fmstream latents", daemon=True).start()
    try:
        while True:
            asked = ask(source.__next__)
            try:
                result, error = await asyncio.shield(asked)
            except asyncio.CancelledError:
                source.cancel()
                await asyncio.wait([asked])
                if (late := asked.result()[0]) is not None:
                    source.give_back(late)
                await asyncio.wait([ask(source.pause)])
                raise
            if error is not None:
                raise error
            if result is None:
                return
            yield result
    finally:
        requests.put(None)


def _outcome(call: Callable[[], Tensor | None]) -> Outcome:
    try:
        return call(), None
    except StopIteration:
        return None, None
    except BaseException as error:  # it is raised where the result is awaited
        return None, error


def _answer(loop: asyncio.AbstractEventLoop, asked: asyncio.Future[Outcome], outcome: Outcome) -> None:
    def settle() -> None:
        if not asked.done():
            asked.set_result(outcome)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)


def on_present_stream() -> AbstractContextManager[Any]:
    """A context, for another thread, in which this thread's present stream is the current one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return nullcontext()
    module: Any = torch.get_device_module(device)
    if not getattr(module, "is_initialized", lambda: True)():
        return nullcontext()
    return module.stream(module.current_stream())  # type: ignore[no-any-return]
