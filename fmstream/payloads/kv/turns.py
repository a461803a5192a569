"""One thread at a time changes a pool; one that was left in the middle of a change is not used any more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from fmstream.errors import StreamError

P = ParamSpec("P")
T = TypeVar("T")


class Turn:
    """Whose turn it is to change a pool.  Caches that were forked share one, and may be used by different threads.

    Args:
        lock: held while something is changed; pools whose work goes the same lanes have the same.

    Attributes:
        is_broken: whether somebody left in the middle of a change.
    """

    def __init__(self, lock: AbstractContextManager[bool]) -> None:
        self.lock = lock
        self.is_broken = False


class _InPool(Protocol):
    @property
    def pool(self) -> Any:
        """The pool, if there is one yet."""
        ...


S = TypeVar("S", bound=_InPool)


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let a method of what lies in a pool hold its turn.

    Raises:
        StreamError: (from the method) somebody left the pool in the middle of a change.
    """

    @functools.wraps(method)
    def held(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        pool = self.pool
        if pool is None:
            return method(self, *args, **kwargs)
        turn: Turn = pool.turn
        with turn.lock:
            if turn.is_broken:
                raise StreamError(
                    "a change of keys and values in pages was left in the middle, by Ctrl-C say, so that it is not "
                    "known any more which are right: call reset() of the cache, or begin with a new one"
                )
            try:
                return method(self, *args, **kwargs)
            except BaseException:
                # What was begun has been undone, but Ctrl-C comes between any two lines, of this as well.
                was_broken, turn.is_broken = turn.is_broken, True
                turn.is_broken = was_broken or not pool.is_sound()
                raise

    return held
