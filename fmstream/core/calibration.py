"""What was measured of a machine's link, kept in a file: plans are made with it from the first pass on."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from fmstream.core.plan import Costs
from fmstream.errors import ConfigError

SCHEMA: Final = 1
WHAT: Final = "fmstream calibration"
MAKE: Final = "make one with fmstream bandwidth --save FILE"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates in bytes a second; None is what was not measured.

    Attributes:
        device: the maker's name of the card, or of the processor where weights are computed on the CPU.
        h2d_bytes_per_second, d2h_bytes_per_second: large copies to and from the device, from pinned memory.
        pageable_bytes_per_second: large copies to the device from memory that is not pinned.
        latency_seconds: for which a copy occupies the link beyond its bytes.
        seen_seconds: from the end of a copy until compute may use it.
        ram_bytes_per_second: copies within the host's memory.
        disk_bytes_per_second: reads of a file past the page cache.
    """

    device: str
    ram_bytes_per_second: float | None = None
    h2d_bytes_per_second: float | None = None
    d2h_bytes_per_second: float | None = None
    pageable_bytes_per_second: float | None = None
    latency_seconds: float = 0.0
    seen_seconds: float = 0.0
    disk_bytes_per_second: float | None = None

    @property
    def link(self) -> Costs | None:
        """What copies to the device cost; None where there is no such link."""
        if self.h2d_bytes_per_second is None:
            return None
        return Costs(self.h2d_bytes_per_second, self.latency_seconds, self.seen_seconds, shared=True)

    def host_rate(self, *, from_files: bool) -> float | None:
        """Bytes a second at which weights come to fast memory on the CPU; None where that was not measured."""
        return self.disk_bytes_per_second if from_files else self.ram_bytes_per_second

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        document = {"what": WHAT, "schema": SCHEMA, **asdict(self)}
        Path(path).write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def load_calibration(path: str | os.PathLike[str], device: str | None = None) -> Calibration:
    """Read a calibration.

    Args:
        path: what `Calibration.save` wrote.
        device: name of the device that it must be of; None takes any.

    Raises:
        ConfigError: the file cannot be read, is none, or was measured on another device.
    """
    name = f"calibration={os.fspath(path)!r}"
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror}): {MAKE}") from error
    except ValueError as error:
        raise ConfigError(f"{name} is no calibration ({error}): {MAKE}") from error
    if not isinstance(document, dict) or document.get("what") != WHAT:
        raise ConfigError(f"{name} is no calibration: {MAKE}")
    if document.get("schema") != SCHEMA:
        raise ConfigError(f"{name} has schema {document.get('schema')!r}, this version reads {SCHEMA}: {MAKE}")
    found = _read(document, name)
    if device is not None and found.device != device:
        raise ConfigError(f"{name} was measured on {found.device!r}, and this is {device!r}: {MAKE} on this machine")
    return found


def _read(document: dict[str, Any], name: str) -> Calibration:
    known: dict[str, Any] = {field.name: document.get(field.name) for field in fields(Calibration)}
    if not isinstance(known["device"], str):
        raise ConfigError(f"{name}: device={known['device']!r} is no name: {MAKE}")
    for key, value in known.items():
        if key == "device" or (value is None and key.endswith("_per_second")):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and key.endswith("_per_second")):
            raise ConfigError(f"{name}: {key}={value!r} is no rate or time: {MAKE}")
    return Calibration(**known)
