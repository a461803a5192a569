"""Where a streamed module is called: the one thing that is put into it."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import nn

from fmstream.payloads import compiled
from fmstream.payloads.sites import Site

if TYPE_CHECKING:
    from fmstream.payloads.session import Session


KEY = "_compiled_call_impl"
"""What `nn.Module.__call__` takes in place of ``_call_impl``, if it is there."""


class Seam:
    """What a streamed module calls in place of its own call: it stands outside all hooks and leaves ``forward`` alone.

    A copy of the module does not stream: copied or pickled, a seam is None, as in a plain module.
    """

    __slots__ = ("_bound", "_followed", "_session", "_site", "plain")

    def __init__(self, session: Session, site: Site, plain: Callable[..., Any]) -> None:
        self._session = session
        self._site = site
        self.plain = plain
        """What the module would call without it."""
        self._bound, self._followed = compiled.calls(site, plain, session.weights.masters)

    @compiled.untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        current = session.current
        if current is None or current.thread != get_ident():
            compiled.begin(self._site.module)
            call = self._bound if self._bound is self._followed else self._either
            return session.outermost(self._site, call, args, kwargs)
        if current.light:
            if session.stop_reason is not None:
                current.executor.loads.check_stop()
            return self._bound(*args, **kwargs)
        token = current.enter(self._site)
        try:
            return self._followed(*args, **kwargs)
        finally:
            current.leave(token)

    def _either(self, *args: Any, **kwargs: Any) -> Any:
        current = self._session.current
        return (self._bound if current is None or current.light else self._followed)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Seams:
    """The seams of a session, each with what was in its place."""

    def __init__(self) -> None:
        self._put: list[tuple[nn.Module, Seam, Any]] = []

    def put(self, session: Session, site: Site) -> None:
        """See the calls of a module."""
        module = site.module
        before = module.__dict__.get(KEY)
        seam = Seam(session, site, module._call_impl if before is None else before)
        self._put.append((module, seam, before))
        module.__dict__[KEY] = seam

    def are_replaced(self) -> bool:
        """Whether the user compiled a module since: that takes the seam's place."""
        return any(module.__dict__.get(KEY) is not seam for module, seam, _ in self._put)

    def take_out(self) -> None:
        """Put back what was there, except where the user compiled a module since."""
        for module, seam, before in self._put:
            if module.__dict__.get(KEY) is not seam:
                continue
            if before is None:
                module.__dict__.pop(KEY, None)
            else:
                module.__dict__[KEY] = before
        self._put.clear()
