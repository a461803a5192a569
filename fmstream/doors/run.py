"""One call, streamed: the shortest way in."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fmstream.config import MISSING, Missing, StreamConfig
from fmstream.device.modes import Modes
from fmstream.doors.flash import options_of
from fmstream.doors.latents import HostStage, LatentHook, hook_latents
from fmstream.doors.stream import Stream
from fmstream.doors.targets import find_call, find_roots, refuse_shared_names
from fmstream.errors import ConfigError
from fmstream.report import Report


@dataclass(frozen=True, slots=True)
class Run:
    """What a streamed call gave back, and what was measured."""

    output: Any
    report: Report


@dataclass(frozen=True, slots=True)
class _Job:
    """A call that is ready to be made."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    open: Callable[[], Stream]
    hook: LatentHook | None = None

    def carry_out(self, opened: Callable[[Stream], None] = lambda _: None) -> Run:
        with self.open() as handle, ExitStack() as stack:
            if self.hook is not None:
                stack.enter_context(self.hook.opened(handle.telemetry))
            opened(handle)
            output = self.call(*self.args, **self.kwargs)
        return Run(output, handle.report)


def _prepare(
    pipeline: Any,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    method: str | None,
    modules: Any,
    config: Any,
    call_kwargs: Mapping[str, Any] | None,
    host_stage: Any,
    preview: Any,
    kwargs: Mapping[str, Any],
) -> _Job:
    call = find_call(pipeline, method)
    own = {"method": method, "modules": modules, "config": config, "host_stage": host_stage, "preview": preview}
    given = [name for name, value in options.items() if value is not MISSING]
    refuse_shared_names(call, [*given, *(name for name, value in own.items() if value is not None)], kwargs)
    twice = sorted(set(kwargs) & set(call_kwargs or {}))
    if twice:
        raise ConfigError(f"{twice[0]}= is given as a keyword and in call_kwargs: give it once")
    roots = find_roots(pipeline, modules)
    chosen = StreamConfig.from_options(config, options_of(pipeline, roots), **options)
    arguments, hook = hook_latents(call, {**kwargs, **(call_kwargs or {})}, host_stage, preview)
    return _Job(call, args, arguments, lambda: Stream(pipeline, roots, chosen), hook)


def run(
    pipeline: Any,
    *args: Any,
    policy: str | Missing = MISSING,
    memory: int | str | Missing | None = MISSING,
    device: str | Missing | None = MISSING,
    method: str | None = None,
    modules: Any = None,
    config: Any = None,
    progress: bool | Missing = MISSING,
    call_kwargs: Mapping[str, Any] | None = None,
    host_stage: HostStage | Callable[..., Any] | None = None,
    preview: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Run:
    """Call a pipeline with its weights streaming; the result is the unstreamed call's, bit for bit.

    Args:
        pipeline: a diffusers pipeline, a transformers model, any ``nn.Module``, or a callable that uses ``modules``.
        *args, **kwargs: the pipeline's own arguments; the caller's grad, inference and autocast modes hold.
        policy, memory, device, progress: see `StreamConfig`.
        method: name of what to call, such as "generate"; None calls the object itself.
        modules: the modules to stream, where they cannot be found in ``pipeline``.
        config: a `StreamConfig`, a mapping of its options, or the path of a TOML file.
        call_kwargs: arguments of the pipeline whose names are options of fmstream too.
        host_stage: a function, or `HostStage`, through which the latents go on the host after each step, frame by frame
            where they have frames (diffusers, through ``callback_on_step_end``; a callback of the user's own comes
            first).  The next step needs them all, so what overlaps is frame with frame, a frame's copies with the
            stage of another one, and the next step's first weights with all of that.
        preview: a folder for a small picture of the latents after each step (the same pipelines).  The run does not
            wait for pictures: steps that end while one is being written have none.

    Raises:
        ConfigError: an option or a parameter cannot be used.
        MemoryBudgetError: ``memory`` is less than the least that works; the message names it.
        StreamError: a read failed; the modules are as before.
        StageError: ``host_stage`` failed; the message names the frame.
    """
    options = {"policy": policy, "memory": memory, "device": device, "progress": progress}
    job = _prepare(pipeline, args, options, method, modules, config, call_kwargs, host_stage, preview, kwargs)
    return job.carry_out()


async def arun(
    pipeline: Any,
    *args: Any,
    policy: str | Missing = MISSING,
    memory: int | str | Missing | None = MISSING,
    device: str | Missing | None = MISSING,
    method: str | None = None,
    modules: Any = None,
    config: Any = None,
    progress: bool | Missing = MISSING,
    call_kwargs: Mapping[str, Any] | None = None,
    host_stage: HostStage | Callable[..., Any] | None = None,
    preview: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Run:
    """`run` for asyncio: the call is made in a thread, under the modes of the caller.

    Cancelling the task ends the call after the operator that is running, restores the modules, and raises
    ``asyncio.CancelledError``.
    """
    options = {"policy": policy, "memory": memory, "device": device, "progress": progress}
    job = _prepare(pipeline, args, options, method, modules, config, call_kwargs, host_stage, preview, kwargs)
    return await _in_thread(job)


async def _in_thread(job: _Job) -> Run:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Run] = loop.create_future()
    handles: list[Stream] = []
    cancelled = threading.Event()
    context, modes = contextvars.copy_context(), Modes()

    def opened(handle: Stream) -> None:
        handles.append(handle)
        if cancelled.is_set():
            handle.cancel()

    def work() -> None:
        try:
            with modes.entered():
                result = context.run(job.carry_out, opened)
        except BaseException as error:  # whatever the call raised is the caller's
            _deliver(loop, done, None, error)
        else:
            _deliver(loop, done, result, None)

    # Not the loop's executor: it would be joined at the loop's end, even behind a blocked read.
    threading.Thread(target=work, name="fmstream run", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        cancelled.set()
        for handle in handles:
            handle.cancel()
        if job.hook is not None:
            job.hook.cancel()
        await asyncio.wait([done])
        if done.exception() is None:
            done.result()
        raise


def _deliver(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[Run], result: Run | None, error: BaseException | None
) -> None:
    def settle() -> None:
        if done.done():
            return
        if error is not None:
            # A future refuses StopIteration; it would end the awaiting coroutine silently.
            wrapped = RuntimeError("the call raised StopIteration") if isinstance(error, StopIteration) else error
            done.set_exception(wrapped)
        else:
            assert result is not None
            done.set_result(result)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
