"""How numbers are written for people: binary sizes, decimal rates, seconds, shares.  Plain ASCII."""

from __future__ import annotations

GIB = 2**30


def format_bytes(num_bytes: float) -> str:
    """Size in binary units with three significant digits: "512 B", "1.50 GiB"."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def format_rate(bytes_per_second: float) -> str:
    """Rate in decimal units: "2.15 GB/s", "310 MB/s"."""
    if bytes_per_second >= 1e9:
        return f"{_three_digits(bytes_per_second / 1e9)} GB/s"
    return f"{_three_digits(bytes_per_second / 1e6)} MB/s"


def format_seconds(seconds: float) -> str:
    """Duration with three significant digits: "61.2 s", "3.40 ms", "250 us"."""
    if seconds == 0:
        return "0 s"
    size = abs(seconds)
    # The limits lie where rounding to three digits would reach the next unit.
    if size >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if size >= 0.9995e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} us"


def format_share(share: float) -> str:
    """Share of one in whole percent: "62 %"."""
    return f"{share * 100:.0f} %"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"
