"""A script whose models stream, while the script itself stays as it is: what ``fmstream run`` does."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from fmstream.config import StreamConfig
from fmstream.doors.stream import Stream
from fmstream.doors.targets import find_roots
from fmstream.errors import ConfigError
from fmstream.payloads.compiled import untraced
from fmstream.payloads.seam import Seam
from fmstream.report import Report

_KEY = "_compiled_call_impl"


def find_script(path: str) -> None:
    """Make sure that there is a script to run.

    Raises:
        ConfigError: there is no such file.
    """
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ConfigError(f"script {path!r} {what}: give the path of a Python file, fmstream run [options] script.py")


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file as ``python path arguments...`` would; what it raises, ``SystemExit`` too, passes through."""
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


@contextmanager
def streaming(config: StreamConfig, reports: list[Report]) -> Iterator[None]:
    """Let every model that is called in the body stream, under one budget for all of them.

    A model is seen when it is first called: a pipeline with all its components, else the outermost module.  A report is
    added to ``reports`` for each set of models that streamed together.
    """
    doorway = Doorway(config, reports)
    before = nn.Module._compiled_call_impl
    nn.Module._compiled_call_impl = doorway  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module._compiled_call_impl = before
        doorway.close()


class Doorway:
    """Stands for ``_compiled_call_impl`` in the class of all modules, which every call of a module looks at.

    A module's own value, such as that of ``module.compile()``, is still found where it was.
    """

    def __init__(self, config: StreamConfig, reports: list[Report]) -> None:
        self._config = config
        self._reports = reports
        self._handle: Stream | None = None
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._known: frozenset[int] = frozenset()
        """``id`` of every module in the roots, which the handle keeps alive."""
        self._opening = threading.Lock()
        self._process = os.getpid()

    @untraced
    def __get__(self, module: nn.Module | None, owner: Any = None) -> Any:
        if module is None:
            return None
        call = module.__dict__.get(_KEY)
        if type(call) is Seam or id(module) in self._known:
            return call
        return _FirstCall(self, module)

    def __set__(self, module: nn.Module, call: Any) -> None:
        module.__dict__[_KEY] = call

    def __delete__(self, module: nn.Module) -> None:
        if module.__dict__.pop(_KEY, None) is None:
            raise AttributeError(_KEY)

    def admit(self, module: nn.Module) -> None:
        """Let a module stream that is not known, and what it is part of.

        One that is first called while another one streams, in it or beside it, has to wait for its next call.
        """
        if next(module.parameters(), None) is None or os.getpid() != self._process:
            return
        if not self._opening.acquire(blocking=False):
            return
        try:
            if self._handle is None or self._handle.is_idle:
                self._open(_owner_of(module))
        finally:
            self._opening.release()

    def _open(self, owner: Any) -> None:
        found = find_roots(owner)
        self.close()
        # Models that the script has dropped since are kept alive by nobody now.
        gc.collect()
        roots = {name: root for name, reference in self._roots.items() if (root := reference()) is not None}
        present = {id(root) for root in roots.values()}
        for name, root in found.items():
            if id(root) not in present:
                roots[_new_name(name or type(root).__name__, roots)] = root
        roots = find_roots(roots)
        self._handle = Stream(owner, roots, self._config)
        self._roots = {name: weakref.ref(root) for name, root in roots.items()}
        self._known = frozenset(id(module) for root in roots.values() for module in root.modules())

    def close(self) -> None:
        """End streaming; the next unknown module begins it again."""
        handle, self._handle = self._handle, None
        self._known = frozenset()
        if handle is not None:
            handle.close()
            if handle.telemetry.passes:
                self._reports.append(handle.report)


class _FirstCall:
    """What a module that is not known calls: it may stream from here on."""

    __slots__ = ("_doorway", "_module")

    def __init__(self, doorway: Doorway, module: nn.Module) -> None:
        self._doorway = doorway
        self._module = module

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        self._doorway.admit(module)
        call = module.__dict__.get(_KEY) or module._call_impl
        return call(*args, **kwargs)


def _owner_of(module: nn.Module) -> Any:
    """The outermost object in whose methods we are that has the module in it; the module itself if there is none."""
    owner: Any = module
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if candidate is not None and candidate is not owner and _holds(candidate, module):
            owner = candidate
        frame = frame.f_back
    return owner


def _holds(candidate: Any, module: nn.Module) -> bool:
    if isinstance(candidate, nn.Module):
        parts: Sequence[Any] = [candidate]
    elif hasattr(type(candidate), "components") and isinstance(candidate.components, Mapping):
        parts = [part for part in candidate.components.values() if isinstance(part, nn.Module)]
    else:
        return False
    return any(inner is module for part in parts for inner in part.modules())


def _new_name(name: str, taken: Mapping[str, Any]) -> str:
    numbered = (f"{name} {number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(other for other in numbered if other not in taken)
