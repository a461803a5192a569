"""The summary of a run that users see, keep and compare."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fmstream.core.telemetry import Telemetry
from fmstream.errors import ConfigError
from fmstream.report.advice import advise
from fmstream.report.codec import decode
from fmstream.report.measure import (
    Fault,
    RootRow,
    Totals,
    measure_faults,
    measure_link,
    measure_roots,
    measure_totals,
)
from fmstream.report.pages import Pages, measure_pages

SCHEMA = 2
"""Version of the saved form; it grows when a field is added, removed or changes its meaning."""

DISTRIBUTION = "fmstream-runtime"


@dataclass(frozen=True)
class Report:
    """What a run did and what bounds it.  ``str(report)`` is a table of 100 columns without colour.

    Attributes:
        policy, device: policy in force and execution device.
        versions: of fmstream, torch, python and the platform.
        memory_bytes ... peak_rss_bytes: as in ``Telemetry``.
        roots: one row for each root module, in order of their first pass.
        totals: sums over the run.
        faults: reads outside the plan, most bytes first.
        pages: what became of keys and values in pages, None where there were none.
        notes: fall-backs taken, parameters left in place, and why.
        advice: sentences derived from the numbers.
        schema: version of the saved form.
    """

    policy: str
    device: str
    versions: dict[str, str]
    memory_bytes: int
    weights_bytes: int
    kept_bytes: int
    file_bytes: int
    ram_bytes: int
    smallest_bytes: int
    peak_rss_bytes: int
    roots: tuple[RootRow, ...]
    totals: Totals
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...] = ()
    pages: Pages | None = None
    schema: int = SCHEMA

    @classmethod
    def from_telemetry(cls, telemetry: Telemetry, environment: Mapping[str, str]) -> Report:
        """Summarise telemetry; ``environment`` is what ``describe_environment`` returns."""
        link = measure_link(telemetry)
        report = cls(
            policy=telemetry.policy,
            device=telemetry.device,
            versions={str(name): str(value) for name, value in environment.items()},
            memory_bytes=telemetry.memory_bytes,
            weights_bytes=telemetry.weights_bytes,
            kept_bytes=telemetry.kept_bytes,
            file_bytes=telemetry.file_bytes,
            ram_bytes=telemetry.ram_bytes,
            smallest_bytes=telemetry.smallest_bytes,
            peak_rss_bytes=telemetry.peak_rss_bytes,
            roots=measure_roots(list(telemetry.passes), link),
            totals=measure_totals(telemetry, link),
            faults=measure_faults(telemetry),
            notes=tuple(telemetry.notes),
            pages=measure_pages(telemetry),
        )
        return replace(report, advice=advise(report))

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON types, except that lists are tuples."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Report:
        """The report that ``to_dict`` described.

        Raises ``ConfigError`` if the data is no report, or one of a newer schema.
        """
        schema = data.get("schema") if isinstance(data, dict) else None
        if type(schema) is not int or schema < 1:
            raise ConfigError(f"not an fmstream report: 'schema' is {schema!r}, expected a number from 1 to {SCHEMA}")
        if schema > SCHEMA:
            raise ConfigError(f"the report has schema {schema}, this fmstream reads up to {SCHEMA}: upgrade fmstream")
        if schema == 1:
            data = {"pages": None, **data, "schema": SCHEMA}  # it was the only field to come
        try:
            report: Report = decode(cls, data, "report")
        except ValueError as error:
            raise ConfigError(f"not an fmstream report: {error}") from error
        return report

    def to_json(self) -> str:
        """The report as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report that ``save`` wrote.

        Raises ``OSError`` if the file cannot be read, ``ConfigError`` if it is no report or one of a newer schema.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_bytes()))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not an fmstream report: not JSON ({error})") from error

    def render(self, *, width: int = 100) -> str:
        """The report as plain text of at most ``width`` columns."""
        from fmstream.report.terminal import render_report

        return render_report(self, width=width)

    def __str__(self) -> str:
        return self.render()


def describe_environment() -> dict[str, str]:
    """Versions of fmstream, torch and python, and the platform; names no host and no user."""
    return {
        "fmstream": installed_version(DISTRIBUTION),
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def installed_version(distribution: str) -> str:
    """Version of an installed distribution, "unknown" for one that runs from its sources."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
