"""Where the functions of the C library lie that native code calls: the one place that knows how systems differ."""

from __future__ import annotations

import ctypes
import sys
from typing import Final, NamedTuple

_CLOCK_MONOTONIC: Final = 1
_CLOCK_UPTIME_RAW: Final = 8


class Symbols(NamedTuple):
    """Addresses of functions, and the number of the clock that ``time.perf_counter`` reads."""

    read: int
    write: int
    pread: int
    errno: int
    gettime: int
    clock: int


def symbols() -> Symbols:
    """Look the functions up.

    Raises:
        OSError: this platform has no positional reads or no clock under the names that are known here.
    """
    if sys.platform == "win32":
        raise OSError("the C library of Windows has no positional reads")
    library = ctypes.CDLL(None)
    darwin = sys.platform == "darwin"
    return Symbols(
        read=_address(library, "read"),
        write=_address(library, "write"),
        # Where file offsets have 32 bits by default, the other name takes 64.
        pread=_address(library, "pread64", "pread"),
        errno=_address(library, "__errno_location", "__error"),
        gettime=_address(library, "clock_gettime"),
        clock=_CLOCK_UPTIME_RAW if darwin else _CLOCK_MONOTONIC,
    )


def _address(library: ctypes.CDLL, *names: str) -> int:
    for name in names:
        try:
            function = getattr(library, name)
        except AttributeError:
            continue
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address
        return address
    raise OSError(f"the C library has none of {', '.join(names)}")
