"""Helpers for tests of the runtime: small modules, faults at the n-th call, latches, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fmstream
from fmstream.device.homes import FileHome

TIMEOUT = 20.0
"""Seconds after which a wait counts as a hang."""
ROOT = Path(__file__).parent.parent


class Injected(Exception):
    """A fault that a test put there."""


class FailAt:
    """Raises in the n-th call of a function, before the function does anything; counts from 1."""

    def __init__(
        self, function: Callable[..., Any], n: int, make_error: Callable[[], BaseException] = Injected
    ) -> None:
        self.function = function
        self.n = n
        self.make_error = make_error
        self.count = 0
        self.lock = threading.Lock()

    @property
    def fired(self) -> bool:
        """Whether the n-th call came."""
        return self.count >= self.n

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.count += 1
            now = self.count
        if now == self.n:
            raise self.make_error()
        return self.function(*args, **kwargs)

    def as_method(self) -> Callable[..., Any]:
        """The same as a plain function, which a class binds to its instances."""
        return lambda *args, **kwargs: self(*args, **kwargs)


class Latch:
    """Lets a thread say that it has come to a point, and keeps it there until it is opened."""

    made: ClassVar[list[Latch]] = []

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.made.append(self)

    def wait_here(self) -> None:
        """Called by the thread to be held."""
        self.reached.set()
        assert self.opened.wait(TIMEOUT), "nobody opened the latch"

    def wait_reached(self) -> None:
        """Wait for the other thread to come."""
        assert self.reached.wait(TIMEOUT), "nobody came to the latch"

    def open(self) -> None:
        """Let it go on."""
        self.opened.set()


class Caller(threading.Thread):
    """Calls a function in a thread and keeps what came of it."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        super().__init__(daemon=True)
        self.function, self.args = function, args
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Keep the result or the error."""
        try:
            with torch.no_grad():
                self.result = self.function(*self.args)
        except BaseException as error:
            self.error = error

    def finish(self) -> Any:
        """The result; raises what was raised, or fails after `TIMEOUT`."""
        self.join(TIMEOUT)
        assert not self.is_alive(), "the call hangs"
        if self.error is not None:
            raise self.error
        return self.result


class Gate(nn.Module):
    """Does ``action`` in its forward and hands its input on."""

    def __init__(self, action: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.action = action

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.action()
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return Gate()


class Twin:
    """A module, an unstreamed copy of it, an input, and what identifies its parameters."""

    def __init__(self, module: nn.Module, x: torch.Tensor) -> None:
        self.module = module.eval()
        self.copy = copy.deepcopy(module)
        self.x = x
        self.remember()
        self.expected = self.plain()

    def remember(self) -> None:
        """Note which objects are the user's parameters.  Weakly: a master that somebody holds is watched for writes."""
        named = self.module.named_parameters(remove_duplicate=False)
        self.params = {name: weakref.ref(param) for name, param in named}

    def plain(self) -> torch.Tensor:
        """The unstreamed result."""
        with torch.no_grad():
            return self.copy(self.x)  # type: ignore[no-any-return]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters, each once."""
        return weights_bytes(self.module)

    @functools.cached_property
    def memory(self) -> int:
        """A budget under which about half has to stream."""
        return memory_for(self.module, 0.5)

    def check_call(self) -> None:
        """The module, as it stands, gives the twin's result."""
        with torch.no_grad():
            assert torch.equal(self.module(self.x), self.expected)

    def check_restored(self) -> None:
        """Nothing of the streaming is left in the module, and it computes what it did."""
        for name, module in self.module.named_modules():
            assert "_compiled_call_impl" not in module.__dict__, f"{name!r} is still wrapped"
        present = dict(self.module.named_parameters(remove_duplicate=False))
        assert present.keys() == self.params.keys()
        for name, param in present.items():
            assert param is self.params[name](), f"{name} is not the user's parameter"
        for (name, param), other in zip(self.module.named_parameters(), self.copy.parameters(), strict=True):
            assert torch.equal(param, other), f"{name} has another value"
        self.check_call()

    def check_streams(self, passes: int = 3, **options: Any) -> None:
        """A new handle streams, with the twin's results, and restores."""
        with fmstream.stream(self.module, memory=options.pop("memory", self.memory), **options) as handle:
            for _ in range(passes):
                self.check_call()
                check_pages(handle)
        assert sum(record.streamed_bytes for record in handle.telemetry.passes) > 0
        self.check_restored()


def weights_bytes(module: nn.Module) -> int:
    """Bytes of all parameters, each once."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def memory_for(module: nn.Module, share: float) -> int:
    """A share of the weights, or the least that works."""
    memory = max(int(weights_bytes(module) * share), fmstream.smallest_memory(module))
    gc.collect()  # what was measured leaves cycles that hold the parameters
    return memory


def make_mlp(num_layers: int = 6, width: int = 64, seed: int = 0) -> nn.Sequential:
    """Linear layers with activations between them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        steps: list[nn.Module] = []
        for _ in range(num_layers):
            steps += [nn.Linear(width, width), nn.GELU()]
        return nn.Sequential(*steps)


def make_input(width: int = 64, seed: int = 1) -> torch.Tensor:
    """A batch of three."""
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed))


def mlp_twin(num_layers: int = 6, width: int = 64) -> Twin:
    """An MLP whose masters lie in RAM."""
    return Twin(make_mlp(num_layers, width), make_input(width))


def map_weights(module: nn.Module, path: Path) -> nn.Module:
    """Write the module's weights to a safetensors file, and let it hold tensors that are mapped from there."""
    save_file({name: value.contiguous() for name, value in module.state_dict().items()}, path)
    module.load_state_dict(load_file(path), assign=True)
    return module


def mapped_twin(path: Path, num_layers: int = 6, width: int = 64) -> Twin:
    """An MLP whose masters lie in a safetensors file."""
    return Twin(map_weights(make_mlp(num_layers, width), path), make_input(width))


def masters_of(handle: fmstream.Stream) -> list[Any]:
    """The handle's masters."""
    return handle._session.weights.masters


def assert_all_in_files(handle: fmstream.Stream) -> None:
    """Every master is read from a file."""
    masters = masters_of(handle)
    assert masters
    assert [m.name for m in masters if not isinstance(m.home, FileHome)] == []


def poison(handle: fmstream.Stream) -> None:
    """Fill the mapped memory of every file-home master with NaN bytes: only reads of the file give true values.

    The mappings are private, so that the file stays whole; the module cannot be used after the handle is closed.
    """
    for master in masters_of(handle):
        if isinstance(master.home, FileHome):
            ctypes.memset(master.original.data_ptr(), 0xFF, master.span)


def check_pages(handle: fmstream.Stream) -> None:
    """The laws of the page table hold, and between passes nothing is pinned."""
    executor = handle._session._executor
    if executor is not None:
        executor.pages.check()
        if handle._session.current is None:
            assert not executor.pages.pins.any()


def runtime_threads() -> list[threading.Thread]:
    """Threads of this package that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("fmstream")]


def assert_no_threads() -> None:
    """Every thread of this package ends within a bounded time."""
    deadline = time.monotonic() + TIMEOUT
    for thread in runtime_threads():
        thread.join(max(0.0, deadline - time.monotonic()))
    assert runtime_threads() == []


def open_descriptors(folder: Path) -> list[str]:
    """Files under a folder that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(str(folder)):
                found.append(path)
    return found


def assert_clean(folder: Path) -> None:
    """No thread, no open file."""
    assert_no_threads()
    if open_descriptors(folder):
        gc.collect()  # a module that is garbage still maps its file
    assert open_descriptors(folder) == []


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and everything that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def run_python(code: str, *args: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a script in a child process; it fails where the child needs longer than ``timeout`` seconds."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        check=False,
    )


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path: Path) -> Iterator[None]:
    """After every test: no thread of the runtime, no open file of the test."""
    yield
    while Latch.made:  # a test that failed may have left a thread behind
        Latch.made.pop().open()
    assert_clean(tmp_path)
