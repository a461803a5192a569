"""Which sessions are open, and the locks that those which share memory take together."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Member(Protocol):
    """A session as its group knows it.

    Attributes:
        storages: addresses of the storages that it streams.
        locks: what its calls take, in order; at first its own alone.
        forked: whether it belongs to the process that this one was forked from.
    """

    storages: set[int]
    locks: list[threading.RLock]
    forked: bool


_members: weakref.WeakSet[Member] = weakref.WeakSet()
_joining = threading.Lock()


def join(member: Member) -> None:
    """Let a member, and all that hold some of the same memory, take all their locks, in an order that all agree on."""
    with _joining:
        group = [other for other in list(_members) if other is not member and other.storages & member.storages]
        locks = {id(lock): lock for each in (member, *group) for lock in each.locks}
        ordered = [locks[key] for key in sorted(locks)]
        for other in list(_members):
            if any(id(lock) in locks for lock in other.locks):
                other.locks = ordered
        member.locks = ordered
        _members.add(member)


def leave(member: Member) -> None:
    """A member is closed."""
    _members.discard(member)


def _after_fork_in_child() -> None:
    for member in list(_members):
        member.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
