"""Outermost modules, and the routes that are known for each kind of call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from fmstream.actors.loads import POLL_SECONDS
from fmstream.actors.tape import Tape
from fmstream.payloads.passes import Route
from fmstream.payloads.sites import Site

MAX_ROUTES = 8
"""Routes kept for each root; the oldest is dropped."""


@dataclass(slots=True)
class Root:
    """What is known of an outermost module."""

    site: Site
    params: tuple[int, ...]
    num_bytes: int
    routes: dict[Any, Route] = field(default_factory=dict)
    latest: Any = None
    pending: Future[Route | None] | None = None
    pending_key: Any = None
    wants_times: bool = False
    """Whether the times of its passes are off, so that they are to be taken anew."""
    latest_tape: Tape | None = None
    """That of the last pass whose times were taken."""
    between: float = 0.0
    """Seconds between two passes, as they were last seen."""

    def route(self, key: Any) -> Route | None:
        """The route for a kind of call, else the latest one."""
        return self.routes.get(key) or self.routes.get(self.latest)

    @property
    def name(self) -> str:
        """As the report has it."""
        return self.site.title

    def forget(self) -> None:
        """No route is right any more."""
        self.routes.clear()
        self.pending = None

    def settle(self, check_stop: Callable[[], None]) -> None:
        """Take the route that the scheduler has made.  A first one is waited for, a better one may come later."""
        if self.pending is None or (self.pending_key in self.routes and not self.pending.done()):
            return
        pending = self.pending
        while not wait([pending], timeout=POLL_SECONDS).done:
            check_stop()
        self.pending = None
        route = pending.result()
        if route is not None:
            self.routes.pop(self.pending_key, None)
            while len(self.routes) >= MAX_ROUTES:
                self.routes.pop(next(iter(self.routes)))
            self.routes[self.pending_key] = route
            self.latest = self.pending_key


def kind_of(args: Any, kwargs: dict[str, Any]) -> Any:
    """What tells one kind of call from another: which arguments are given, and flags among them."""

    def describe(value: Any) -> Any:
        return value if value is None or isinstance(value, bool | str) else type(value)

    return (tuple(map(describe, args)), tuple((key, describe(kwargs[key])) for key in sorted(kwargs)))
