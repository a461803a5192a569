"""A run that is cancelled or interrupted ends soon, and a read that goes on harms nobody."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fmstream
from fmstream.device.files import SourceFile, Staging
from fmstream.doors.stream import Stream
from fmstream.errors import CancelledRun
from tests.kit_runtime import (
    ROOT,
    TIMEOUT,
    Caller,
    Gate,
    Latch,
    Twin,
    check_pages,
    leaves_nothing,
    make_input,
    make_mlp,
    mapped_twin,
    run_python,
    runtime_threads,
)

__all__ = ["leaves_nothing"]


class HeldRead:
    """Holds the n-th read of any file at a latch, before its first byte, and remembers where it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int = 1) -> None:
        self.latch, self.done = Latch(), threading.Event()
        self.place = (0, 0)
        self._count, self._n = 0, n
        self._lock = threading.Lock()
        original = SourceFile.read_into
        held = self

        def read_into(file: SourceFile, address: int, offset: int, nbytes: int, staging: Staging) -> None:
            with held._lock:
                held._count += 1
                mine = held._count == held._n
            if not mine:
                return original(file, address, offset, nbytes, staging)
            held.place = (address, nbytes)
            held.latch.wait_here()
            try:
                return original(file, address, offset, nbytes, staging)
            finally:
                held.done.set()

        monkeypatch.setattr(SourceFile, "read_into", read_into)

    def let_go(self) -> None:
        """Let the read write, and wait until it has."""
        self.latch.open()
        assert self.done.wait(TIMEOUT)


def gated_mlp(latch: Latch, at: int = 3, num_layers: int = 6) -> tuple[Twin, list[int]]:
    """An MLP that is held in its middle the next time that it is called, and the steps that it came to."""
    steps: list[int] = []
    armed = [False]

    def gate(index: int) -> Gate:
        def action() -> None:
            steps.append(index)
            if armed[0] and index == at:
                latch.wait_here()

        return Gate(action)

    layers = make_mlp(num_layers)[::2]
    twin = Twin(nn.Sequential(*(step for i, layer in enumerate(layers) for step in (gate(i), layer))), make_input())
    armed[0] = True
    return twin, steps


def test_a_run_is_cancelled_from_another_thread_between_two_calls() -> None:
    latch = Latch()
    twin, steps = gated_mlp(latch)
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        caller = Caller(twin.module, twin.x)
        latch.wait_reached()
        handle.cancel("enough")
        latch.open()
        with pytest.raises(CancelledRun, match="enough"):
            caller.finish()
        assert steps == [0, 1, 2, 3]
        check_pages(handle)
        with pytest.raises(CancelledRun):
            twin.module(twin.x)
    twin.check_restored()
    twin.check_streams()


def test_a_run_is_cancelled_while_its_read_is_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors")
    held = HeldRead(monkeypatch, 3)
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        caller = Caller(twin.module, twin.x)
        held.latch.wait_reached()
        handle.cancel()
        with pytest.raises(CancelledRun):
            caller.finish()
        assert not held.done.is_set()
        check_pages(handle)
    twin.check_restored()
    held.let_go()
    twin.check_restored()
    twin.check_streams()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_read_that_was_left_behind_never_writes_into_memory_of_a_later_run(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors")
    held = HeldRead(monkeypatch, n)
    first = fmstream.stream(twin.module, memory=twin.memory)
    caller = Caller(twin.module, twin.x)
    held.latch.wait_reached()
    first.cancel()
    with pytest.raises(CancelledRun):
        caller.finish()
    first.close()
    with fmstream.stream(twin.module, memory=twin.memory) as second:
        for _ in range(3):
            twin.check_call()
        executor = second._session._executor
        assert executor is not None
        executor.loads.settle()
        slab = executor.slab
        assert slab is not None
        start, nbytes = held.place
        size = executor.num_frames * executor.page_bytes
        assert start + nbytes <= slab.address or slab.address + size <= start
        before = ctypes.string_at(slab.address, size)
        held.let_go()
        assert ctypes.string_at(slab.address, size) == before
        for _ in range(3):
            twin.check_call()
        check_pages(second)
    twin.check_restored()


def test_an_exception_while_a_later_read_is_blocked_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors")
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        for _ in range(3):
            twin.check_call()
        held = HeldRead(monkeypatch)

        def fail(module: nn.Module, args: Any) -> None:
            held.latch.wait_reached()
            raise KeyboardInterrupt

        # The first layer may be waiting for the read itself; a hook of the root comes before any wait.
        hook = twin.module.register_forward_pre_hook(fail)
        executor = handle._session._executor
        assert executor is not None
        executor.drop_ahead()
        executor._next = 0
        executor._top_up()
        with pytest.raises(KeyboardInterrupt):
            Caller(twin.module, twin.x).finish()
        hook.remove()
        check_pages(handle)
        twin.check_call()
        held.let_go()
        for _ in range(3):
            twin.check_call()
    twin.check_restored()


def test_closing_behind_a_blocked_read_does_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors")
    held = HeldRead(monkeypatch, 2)
    handle = fmstream.stream(twin.module, memory=twin.memory)
    caller = Caller(twin.module, twin.x)
    held.latch.wait_reached()
    handle.cancel()
    with pytest.raises(CancelledRun):
        caller.finish()
    handle.close()
    assert not held.done.is_set()
    twin.check_restored()
    held.let_go()


async def test_a_cancelled_arun_ends_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    latch = Latch()
    twin, steps = gated_mlp(latch)
    cancel = Stream.cancel

    def cancel_and_open(handle: Stream, reason: str = "the run was cancelled") -> None:
        cancel(handle, reason)
        latch.open()

    monkeypatch.setattr(Stream, "cancel", cancel_and_open)
    task = asyncio.create_task(fmstream.arun(twin.module, twin.x, memory=twin.memory))
    await asyncio.to_thread(latch.wait_reached)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, TIMEOUT)
    assert steps == [0, 1, 2, 3]
    twin.check_restored()
    result = await fmstream.arun(twin.module, twin.x, memory=twin.memory)
    assert torch.equal(result.output, twin.plain())


async def test_an_arun_cancelled_while_its_read_is_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors")
    held = HeldRead(monkeypatch, 2)
    with torch.no_grad():
        task = asyncio.create_task(fmstream.arun(twin.module, twin.x, memory=twin.memory))
        await asyncio.to_thread(held.latch.wait_reached)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, TIMEOUT)
    assert not held.done.is_set()
    twin.check_restored()
    held.let_go()
    twin.check_streams()


async def test_an_arun_under_a_timeout() -> None:
    latch = Latch()
    twin, _ = gated_mlp(latch)

    async def bounded() -> None:
        async with asyncio.timeout(3600) as bound:
            task = asyncio.ensure_future(fmstream.arun(twin.module, twin.x, memory=twin.memory))
            await asyncio.to_thread(latch.wait_reached)
            bound.reschedule(asyncio.get_running_loop().time())
            latch_opener = asyncio.get_running_loop().call_soon(lambda: None)
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                latch_opener.cancel()
                task.cancel()
                latch.open()
                await asyncio.wait([task])
                raise

    with pytest.raises(TimeoutError):
        await bounded()
    twin.check_restored()


async def test_an_arun_that_is_cancelled_before_it_starts_leaves_the_module() -> None:
    latch = Latch()
    twin, _ = gated_mlp(latch)
    latch.open()
    task = asyncio.create_task(fmstream.arun(twin.module, twin.x, memory=twin.memory))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, TIMEOUT)
    for thread in runtime_threads():
        await asyncio.to_thread(thread.join, TIMEOUT)
    twin.check_restored()


SCRIPT = """
import os, signal, sys, threading
import torch
import fmstream
from fmstream.device.files import SourceFile
from tests.kit_runtime import make_input, make_mlp, map_weights
from pathlib import Path

module = map_weights(make_mlp(), Path(sys.argv[1]) / "w.safetensors").eval()
x = make_input()
never = threading.Event()
original, blocked = SourceFile.read_into, threading.Event()

def block_later_reads(after):
    count = [0]
    def read_into(file, *args):
        count[0] += 1
        if count[0] > after:
            blocked.set()
            print("blocked", flush=True)
            never.wait()
        return original(file, *args)
    SourceFile.read_into = read_into

half = sum(p.numel() * 4 for p in module.parameters()) // 2
"""


@pytest.mark.parametrize("after", [0, 3])
def test_ctrl_c_reaches_the_caller_though_a_read_never_returns(after: int, tmp_path: Path) -> None:
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(f"""
        block_later_reads({after})
        try:
            with torch.no_grad():
                fmstream.run(module, x, memory=half)
        except KeyboardInterrupt:
            clean = not any("_compiled_call_impl" in m.__dict__ for m in module.modules())
            print("interrupted", clean, flush=True)
            sys.exit(7)
        print("went on", flush=True)
        """)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "blocked\n"
            child.send_signal(signal.SIGINT)
            # The read is blocked for ever: to come back at all is not to wait for it.
            out, errors = child.communicate(timeout=TIMEOUT)
        finally:
            child.kill()
    assert out.endswith("interrupted True\n"), (out, errors)
    assert child.returncode == 7, errors


@pytest.mark.parametrize("ending", ["pass", "raise RuntimeError('mine')"])
def test_exit_without_close_does_not_wait_for_a_read(ending: str, tmp_path: Path) -> None:
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(f"""
        handle = fmstream.stream(module, memory=half)
        caller = threading.Thread(target=module, args=(x,), daemon=True)
        block_later_reads(2)
        caller.start()
        blocked.wait()
        {ending}
        """)
    done = run_python(code, str(tmp_path), timeout=2 * TIMEOUT)
    assert done.returncode == (1 if "mine" in ending else 0), done.stderr
    assert ("mine" in done.stderr) == ("mine" in ending)


def test_exit_with_an_open_handle_is_quiet(tmp_path: Path) -> None:
    code = textwrap.dedent(SCRIPT) + textwrap.dedent("""
        handle = fmstream.stream(module, memory=half)
        with torch.no_grad():
            for _ in range(4):
                module(x)
        """)
    done = run_python(code, str(tmp_path), timeout=2 * TIMEOUT)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on(tmp_path: Path) -> None:
    code = textwrap.dedent(SCRIPT) + textwrap.dedent("""
        import copy
        torch.set_num_threads(1)
        twin = copy.deepcopy(module)
        with torch.no_grad(), fmstream.stream(module, memory=half) as handle:
            expected = twin(x)
            for _ in range(3):
                assert torch.equal(module(x), expected)
            pid = os.fork()
            if pid == 0:
                signal.alarm(30)
                bad = 0
                for call in (lambda: module(x), lambda: handle(x), lambda: module[2](x)):
                    try:
                        call()
                        bad += 1
                    except fmstream.ForkedError as error:
                        bad += "open" not in str(error)
                handle.close()
                os._exit(bad)
            _, status = os.waitpid(pid, 0)
            print("child", os.waitstatus_to_exitcode(status))
            for _ in range(3):
                assert torch.equal(module(x), expected)
        assert torch.equal(module(x), expected)
        print("parent fine")
        """)
    done = run_python(code, str(tmp_path), timeout=2 * TIMEOUT)
    assert done.stdout == "child 0\nparent fine\n", done.stderr
    assert done.returncode == 0
