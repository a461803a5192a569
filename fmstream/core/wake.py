"""A descriptor that wakes who sleeps on it: the one place that knows how systems do that.

An event descriptor on Linux, a pair of connected sockets elsewhere.  A signal that nobody waits for is kept until
somebody does; several are the same as one.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

SIGNAL = (1).to_bytes(8, sys.byteorder)
"""What native code writes to ``signal_fd``."""


class Wake(Protocol):
    """One sleeper, any number of wakers.  The descriptors live until `close` or until nobody refers to this.

    ``fd`` is readable once signalled; native code signals by writing the eight bytes `SIGNAL` to ``signal_fd``.
    """

    fd: int
    signal_fd: int

    def signal(self) -> None:
        """Wake the sleeper, now or at its next wait."""
        ...

    def drain(self) -> None:
        """Forget the signals that have come.  Never blocks, except on a blocking one without a signal."""
        ...

    @property
    def close(self) -> Callable[[], object]:
        """Close the descriptors; may be called again.  Nobody else may be using them; later signals go nowhere."""
        ...


def wait(wake: Wake, timeout: float) -> bool:
    """Sleep until the next signal, which is forgotten, or for ``timeout`` seconds; whether there was one."""
    readable = bool(select.select([wake.fd], [], [], timeout)[0]) if _poll is None else _poll(wake.fd, timeout)
    if readable:
        wake.drain()
    return readable


def _poll_one(fd: int, timeout: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout * 1000))


# `select` refuses descriptors above 1023; Windows has nothing else, but numbers its sockets otherwise.
_poll = _poll_one if hasattr(select, "poll") else None


def _close(*ends: socket.socket) -> None:
    for end in ends:
        end.close()


class SocketWake:
    """A pair of connected sockets."""

    def __init__(self, blocking: bool = False) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(blocking)
        self._writer.setblocking(False)
        self.fd = self._reader.fileno()
        self.signal_fd = self._writer.fileno()
        self.close = weakref.finalize(self, _close, self._reader, self._writer)

    def signal(self) -> None:
        """See `Wake`."""
        if self.close.alive:
            with contextlib.suppress(BlockingIOError):  # full of signals already
                self._writer.send(SIGNAL)

    def drain(self) -> None:
        """See `Wake`."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)


if sys.platform == "linux":

    class EventWake:
        """An event descriptor."""

        def __init__(self, blocking: bool = False) -> None:
            self.fd = self.signal_fd = os.eventfd(0, os.EFD_CLOEXEC | (0 if blocking else os.EFD_NONBLOCK))
            self.close = weakref.finalize(self, os.close, self.fd)

        def signal(self) -> None:
            """See `Wake`."""
            if self.close.alive:
                os.eventfd_write(self.signal_fd, 1)

        def drain(self) -> None:
            """See `Wake`."""
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)

    def open_wake(*, blocking: bool = False) -> Wake:
        """A new descriptor; ``blocking`` lets native code sleep by reading from it."""
        return EventWake(blocking)

else:

    def open_wake(*, blocking: bool = False) -> Wake:
        """A new pair of sockets; ``blocking`` lets native code sleep by reading from it."""
        return SocketWake(blocking)
