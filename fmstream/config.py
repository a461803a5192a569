"""The options of a run: every knob once, checked when it is set."""

from __future__ import annotations

import difflib
import json
import operator
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, SupportsIndex, TypeGuard

from fmstream.errors import ConfigError

MIN_STAGING_BYTES: Final = 8192
MAX_WORKERS: Final = 64
MAX_PAGE_TOKENS: Final = 65536
MAX_PAGES: Final = 2**31 - 2
MAX_BYTES: Final = 2**63 - 1
"""Sizes are kept in signed 64-bit integers."""

FLASH_KEYS: Final = {
    "prefetch_window": "prefetch_window",
    "prefetch_strategy": "policy",
    "cpu_offload_threshold_mb": "cpu_offload_threshold_mb",
}
"""What the keys of a ``flash_memory_config`` are called here."""

_UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*|%)\s*", re.IGNORECASE | re.ASCII)


class Missing(Enum):
    """Type of `MISSING`."""

    MISSING = "MISSING"


MISSING: Final = Missing.MISSING
"""Default of an option that the caller has not given, where None is a value."""


def parse_size(
    value: SupportsIndex | str, *, of: int | None = None, name: str = "size", whole: str = "the weights"
) -> int:
    """Return the bytes that ``value`` stands for.

    Args:
        value: bytes as an integer, or text: "512MB" (decimal), "6GiB" (binary), "50%" of ``of``.
        of: bytes that a percentage refers to; None where percentages make no sense.
        name: the option, and ``whole`` what a percentage refers to, for the message.

    Raises:
        ConfigError: it is no size, not positive, or a percentage that is out of place or over 100.
    """
    if isinstance(value, bool) or not isinstance(value, str | SupportsIndex):
        raise ConfigError(f"{name}={value!r} is no size: give bytes as an int, or text such as '6GiB' or '512MB'")
    if not isinstance(value, str):
        return _check_bytes(operator.index(value), name, value)
    match = _SIZE.fullmatch(value)
    if match is None or (match[2] != "%" and match[2].lower() not in _UNITS):
        raise ConfigError(
            f"{name}={value!r} is no size: write a number and a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), "
            f"such as '6GiB' or '1.5GB'"
        )
    number = Decimal(match[1])
    if match[2] != "%":
        return _check_bytes(int(number * _UNITS[match[2].lower()]), name, value)
    if of is None:
        raise ConfigError(f"{name}={value!r}: a percentage is of the weights, so only memory takes one; give bytes")
    if not 0 < number <= 100:
        more = "; memory=None sets no limit" if name == "memory" else ""
        raise ConfigError(f"{name}={value!r} is not within 0% to 100% of {whole}{more}")
    return int(number * of / 100)


def _check_bytes(size: int, name: str, value: object) -> int:
    if not 1 <= size <= MAX_BYTES:
        raise ConfigError(f"{name}={value!r} is {size} bytes; it must be from 1 to {MAX_BYTES}: give a size as '6GiB'")
    return size


def resolve_bytes(value: SupportsIndex | str | None, total: int) -> int | None:
    """Return the bytes that ``memory=value`` allows for weights of ``total`` bytes, or None where it is "auto".

    None as a value sets no limit: everything may be resident, which takes ``total`` bytes.
    """
    if value is None:
        return total
    return None if value == "auto" else parse_size(value, of=total, name="memory")


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """The options of `run`, `arun` and `stream`.

    Attributes:
        policy: what is resident and what is loaded when; one of `fmstream.policies`.
        memory: fast memory for weights: bytes, "6GiB", "512MB", "50%" (of the weights), "auto" (half of the host
            memory that is free), or None (no limit).
        device: where to compute: "cpu", "cuda", "cuda:1", or another device with streams; None is the CUDA card where
            there is one.
        prefetch_window: positions staged ahead of the compute actor, at least 1: units of weights, tokens of embedding
            tables; as far as the memory allows.  "auto" lets the planner choose.
        cpu_offload_threshold_mb: mebibytes (2^20 bytes) of the device's memory that are to stay free: where less is,
            residents, staged rows and pages of keys and values are given back; 0 takes what there is.
        unit: target size of a unit, that is of one copy; "auto" lets the planner choose.
        staging: host memory through which files are read.
        num_workers: prefetch threads; while one copies out of its staging, the others keep the disk busy.
        pinned: host memory that may be pinned for an accelerator: bytes, "16GiB", 0 (none: all copies go through
            staging), or "auto" (70 % of the host's memory).
        spill_dir: folder for weights that have no file and should not stay in RAM; None keeps them in RAM.
        calibration: what ``fmstream bandwidth --save`` wrote on this machine: plans are made with the rates in it, and
            the link is not probed; None probes it.
        progress: whether to show the progress of a run on the terminal.
        kv_cache_max_pages: fast memory for keys and values within ``generate``, in pages; None pages them only where
            they would not fit.  For this and the next two see `PagedCache`.
        page_tokens: tokens of such a page.
        kv_host_memory: host memory that pages may take: bytes, "16GiB", or "auto".
        kv_budget: part of all keys and values that lies on the device while a step attends to the pages that matter
            most to it, such as 0.135, or as an int the pages that it attends to; None attends to everything.
        context_window: tokens that each token may attend to; None sets no limit.

    Raises:
        ConfigError: an option has a value that cannot be used.
    """

    policy: str = "overlap_async"
    memory: int | str | None = "auto"
    device: str | None = None
    prefetch_window: int | Literal["auto"] = "auto"
    unit: int | str = "auto"
    staging: int | str = "8MiB"
    cpu_offload_threshold_mb: int = 0
    num_workers: int = 3
    pinned: int | str = "auto"
    spill_dir: str | os.PathLike[str] | None = None
    calibration: str | os.PathLike[str] | None = None
    progress: bool = False
    kv_cache_max_pages: int | None = None
    page_tokens: int = 32
    kv_host_memory: int | str = "auto"
    kv_budget: float | int | None = None
    context_window: int | None = None

    def __post_init__(self) -> None:
        _check_text("policy", self.policy, "name a policy, such as 'overlap_async'")
        resolve_bytes(self.memory, total=MAX_BYTES)
        if self.device is not None:
            _check_text("device", self.device, "name a device, such as 'cuda:0' or 'cpu'")
        _check_window(self.prefetch_window)
        if self.unit != "auto":
            parse_size(self.unit, name="unit")
        if not _is_int(self.cpu_offload_threshold_mb) or not 0 <= self.cpu_offload_threshold_mb <= MAX_BYTES >> 20:
            raise ConfigError(
                f"cpu_offload_threshold_mb={self.cpu_offload_threshold_mb!r} is no number of mebibytes to stay free: "
                "give an int such as 1024, or 0 for none"
            )
        if self.pinned not in ("auto", 0):
            parse_size(self.pinned, name="pinned")
        if not _is_int(self.num_workers) or not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigError(f"num_workers={self.num_workers!r} is no int from 1 to {MAX_WORKERS}: 3 is the default")
        if self.staging_bytes < MIN_STAGING_BYTES * self.num_workers:
            raise ConfigError(
                f"staging={self.staging!r} is less than {MIN_STAGING_BYTES} bytes for each of {self.num_workers} "
                "workers: give some megabytes"
            )
        if self.spill_dir is not None and not is_path(self.spill_dir):
            raise ConfigError(f"spill_dir={self.spill_dir!r} is no folder: give its path")
        if self.calibration is not None and not is_path(self.calibration):
            raise ConfigError(
                f"calibration={self.calibration!r} is no file: name one that fmstream bandwidth --save wrote"
            )
        if not isinstance(self.progress, bool):
            raise ConfigError(f"progress={self.progress!r} is neither True nor False")
        check_kv_options(self.kv_cache_max_pages, self.page_tokens, self.cpu_offload_threshold_mb, self.kv_host_memory)
        check_selection(self.kv_budget, self.context_window)

    @property
    def unit_bytes(self) -> int | None:
        """Target bytes of a unit, None where the planner chooses."""
        return None if self.unit == "auto" else parse_size(self.unit, name="unit")

    @property
    def floor_bytes(self) -> int:
        """Bytes of the device's memory that are to stay free."""
        return self.cpu_offload_threshold_mb << 20

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory through which files are read."""
        return parse_size(self.staging, name="staging")

    @classmethod
    def from_flash_memory_config(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> StreamConfig:
        """Return the configuration that a ``flash_memory_config`` describes.

        Args:
            config: the object itself, or the path of a config.json that has one of that name.

        Raises:
            ConfigError: a key is unknown or has a value that cannot be used, or the file has no such object.
        """
        return cls(**flash_options(config))

    @classmethod
    def from_options(
        cls,
        config: StreamConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        beneath: Mapping[str, Any] | None = None,
        /,
        **overrides: Any,
    ) -> StreamConfig:
        """Return the configuration that ``config`` and, above it, the ``overrides`` describe.

        Args:
            config: a configuration, a mapping of options, or the path of a TOML file whose options stand at the top
                or in a table [fmstream]; None takes the defaults.
            beneath: options that ``config`` may leave out, where it is not a whole configuration.
            overrides: options; those that are `MISSING` are left out, None is a value.

        Raises:
            ConfigError: an option is unknown or has a value that cannot be used, or the file cannot be read.
        """
        source = "the options"
        match config:
            case None:
                options: dict[str, Any] = {}
            case StreamConfig():
                options = asdict(config)
            case Mapping():
                options = dict(config)
            case str() | os.PathLike():
                source = os.fspath(config)
                options = _read_toml(Path(config))
            case _:
                raise ConfigError(
                    f"config={config!r} is of type {type(config).__name__}: "
                    f"give a StreamConfig, a mapping, or the path of a TOML file"
                )
        _check_names(options, source)
        _check_names(overrides, "the options")
        below = {} if isinstance(config, StreamConfig) else dict(beneath or {})
        return cls(**below | options | {name: value for name, value in overrides.items() if value is not MISSING})


def flash_options(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Options, under their names here, of a ``flash_memory_config`` or of the config.json that has one.

    Raises:
        ConfigError: a key is unknown, or the file cannot be read or has no such object.
    """
    source = "flash_memory_config"
    if isinstance(config, str | os.PathLike):
        source = f"{source} of {os.fspath(config)}"
        document = _read_json(Path(config))
        if "flash_memory_config" not in document:
            raise ConfigError(f"{os.fspath(config)} has no object flash_memory_config: write one")
        config = document["flash_memory_config"]
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source}={config!r} is no object: write its keys within braces")
    _check_names(config, source, FLASH_KEYS)
    return {FLASH_KEYS[key]: value for key, value in config.items()}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({error.strerror}): give the path of a config.json") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no JSON file: {error}") from error
    return document if isinstance(document, Mapping) else {}


def check_kv_options(max_pages: object, page_tokens: object, threshold_mb: object, host_memory: int | str) -> None:
    """Check the options of pages of keys and values.

    Raises:
        ConfigError: one has a value that cannot be used.
    """
    if max_pages is not None and not (_is_int(max_pages) and 1 <= max_pages <= MAX_PAGES):
        raise ConfigError(
            f"kv_cache_max_pages={max_pages!r} is no number of pages from 1 to {MAX_PAGES}: one layer of all sequences "
            "is the least; None takes what is needed"
        )
    if not _is_int(page_tokens) or not 1 <= page_tokens <= MAX_PAGE_TOKENS:
        raise ConfigError(f"page_tokens={page_tokens!r} is no int from 1 to {MAX_PAGE_TOKENS}: 32 is the default")
    if not _is_int(threshold_mb) or threshold_mb < 0:
        raise ConfigError(f"cpu_offload_threshold_mb={threshold_mb!r} is no number of mebibytes; 0 sets none")
    host_bytes(host_memory)


def check_selection(budget: object, window: object) -> None:
    """Check what pages may be chosen.

    Raises:
        ConfigError: one has a value that cannot be used.
    """
    if budget is not None:
        part = isinstance(budget, float) and 0 < budget <= 1
        if not part and not (_is_int(budget) and 1 <= budget <= MAX_PAGES):
            raise ConfigError(
                f"kv_budget={budget!r} is neither a part of all keys and values, a float over 0 and up to 1.0, nor a "
                f"number of pages from 1 to {MAX_PAGES}: give 0.135, say; None attends to everything"
            )
    if window is not None and not (_is_int(window) and 1 <= window <= MAX_PAGES):
        raise ConfigError(f"context_window={window!r} is no number of tokens from 1 to {MAX_PAGES}; None sets no limit")


def host_bytes(value: int | str) -> int | None:
    """Bytes that ``kv_host_memory=value`` allows, None where it is "auto"; 0 allows none."""
    if value == "auto":
        return None
    return 0 if _is_int(value) and value == 0 else parse_size(value, name="kv_host_memory")


def is_path(value: object) -> bool:
    """Whether a value can be the path of something: text that is not empty and that the system can take."""
    return isinstance(value, str | os.PathLike) and os.fspath(value) not in ("", b"") and "\0" not in os.fsdecode(value)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_text(name: str, value: object, remedy: str) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={value!r} is no name: {remedy}")


def _check_window(value: object) -> None:
    if value == "auto":
        return
    if _is_int(value) and value == 0:
        raise ConfigError(
            'prefetch_window=0 stages nothing ahead: use policy="sync" for that, or a window of at least 1'
        )
    if not _is_int(value) or value < 1:
        raise ConfigError(f'prefetch_window={value!r} is no number of positions: give an int of at least 1, or "auto"')


def _check_names(options: Mapping[str, Any], source: str, names: Iterable[str] = ()) -> None:
    """Raise `ConfigError` for a name that is none of ``names``, by default those of all options."""
    known = list(names) or [field.name for field in fields(StreamConfig)]
    for name in options:
        if name in known:
            continue
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"unknown option {name!r} in {source}: {remedy}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config={str(path)!r} cannot be read ({error.strerror}): give the path of a file") from error
    except ValueError as error:
        raise ConfigError(f"config={str(path)!r} is no TOML file: {error}") from error
    if "fmstream" not in document:
        return document
    table = document.pop("fmstream")
    if not isinstance(table, dict):
        raise ConfigError(f"fmstream={table!r} in {path} is no table: write [fmstream] above the options")
    # Other tables belong to other tools; an option outside the table would be ignored without a word.
    for name in document.keys() & {field.name for field in fields(StreamConfig)}:
        raise ConfigError(f"option {name!r} in {path} stands outside the table [fmstream]: move it into the table")
    return table
