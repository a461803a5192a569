"""Options are checked when they are set, and every message names the value and the remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmstream.config import MAX_BYTES, MISSING, StreamConfig, parse_size, resolve_bytes
from fmstream.errors import ConfigError, FmstreamError


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (1, 1),
        (np.int64(4096), 4096),
        ("4096", 4096),
        ("7B", 7),
        ("64KiB", 64 * 1024),
        ("512MB", 512_000_000),
        ("1.5GB", 1_500_000_000),
        ("6GiB", 6 * 1024**3),
        ("2TB", 2 * 10**12),
        ("1TiB", 1024**4),
        (" 6 gib ", 6 * 1024**3),
        ("0.1KB", 100),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_sizes(value: Any, num_bytes: int) -> None:
    assert parse_size(value) == num_bytes


@given(st.integers(1, 10**6), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_binary_and_decimal_units_differ_as_powers(number: int, unit: str) -> None:
    power = ["KiB", "MiB", "GiB", "TiB"].index(unit) + 1
    assert parse_size(f"{number}{unit}") == number * 1024**power
    assert parse_size(f"{number}{unit.replace('i', '')}") == number * 1000**power


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "six", "6 G", "6XB", "-1GB", "1e9", "1,5GB", "nan", "auto", "50%%", None, 1.5, True, [], b"6GB"],
)
def test_what_is_no_size(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"staging=.* is no size: .*'6GiB'"):
        parse_size(value, name="staging")


@pytest.mark.parametrize("value", [0, -1, "0", "0GiB", "0.1B", MAX_BYTES + 1, "9000000000TiB"])
def test_sizes_out_of_range(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"is -?\d+ bytes; it must be from 1 to {MAX_BYTES}"):
        parse_size(value)


def test_percentages() -> None:
    assert parse_size("50%", of=1000) == 500
    assert parse_size("12.5 %", of=1000) == 125
    assert parse_size("100%", of=0) == 0
    for value in ("0%", "101%"):
        with pytest.raises(ConfigError, match=f"{value!r} is not within 0% to 100%"):
            parse_size(value, of=1000)
    with pytest.raises(ConfigError, match="only memory takes one"):
        parse_size("50%")


def test_resolve_bytes() -> None:
    assert resolve_bytes(None, 1000) == 1000
    assert resolve_bytes("auto", 1000) is None
    assert resolve_bytes("25%", 1000) == 250
    assert resolve_bytes(7, 1000) == 7


def test_defaults_are_valid() -> None:
    config = StreamConfig()
    assert (config.policy, config.memory, config.prefetch_window) == ("overlap_async", "auto", "auto")
    assert config.unit_bytes is None
    assert config.staging_bytes == 8 * 1024**2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.memory = 1  # type: ignore[misc]


def test_sizes_of_a_configuration() -> None:
    config = StreamConfig(unit="4MiB", staging=32768, memory="50%", spill_dir=Path("spill"))
    assert (config.unit_bytes, config.staging_bytes) == (4 * 1024**2, 32768)
    assert resolve_bytes(config.memory, 10) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": ""}, r"policy='' is no name: .*'overlap_async'"),
        ({"policy": 3}, r"policy=3 is no name"),
        ({"memory": 0}, r"memory=0 is 0 bytes"),
        ({"memory": "lots"}, r"memory='lots' is no size"),
        ({"memory": "150%"}, r"memory='150%' is not within .*memory=None sets no limit"),
        ({"memory": 6e9}, r"memory=6000000000\.0 is no size: give bytes as an int"),
        ({"device": ""}, r"device='' is no name: .*'cuda:0'"),
        ({"prefetch_window": 0}, r'prefetch_window=0 stages nothing ahead: use policy="sync"'),
        ({"prefetch_window": -1}, r"prefetch_window=-1 is no number of positions: give an int of at least 1"),
        ({"prefetch_window": "wide"}, r"prefetch_window='wide' is no number of positions"),
        ({"prefetch_window": True}, r"prefetch_window=True is no number of positions"),
        ({"prefetch_window": False}, r"prefetch_window=False is no number of positions"),
        ({"unit": 0}, r"unit=0 is 0 bytes"),
        ({"unit": "10%"}, r"unit='10%': a percentage is of the weights, so only memory takes one"),
        ({"staging": "1KiB"}, r"staging='1KiB' is less than 8192 bytes for each of 3 workers: give some megabytes"),
        ({"staging": "auto"}, r"staging='auto' is no size"),
        ({"num_workers": 0}, r"num_workers=0 is no int from 1 to 64"),
        ({"num_workers": 65}, r"num_workers=65 is no int from 1 to 64"),
        ({"num_workers": True}, r"num_workers=True is no int"),
        ({"num_workers": 2.0}, r"num_workers=2\.0 is no int"),
        ({"spill_dir": ""}, r"spill_dir='' is no folder: give its path"),
        ({"spill_dir": 7}, r"spill_dir=7 is no folder"),
        ({"spill_dir": "a\0b"}, r"spill_dir='a\\x00b' is no folder"),
        ({"progress": "yes"}, r"progress='yes' is neither True nor False"),
    ],
)
def test_values_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamConfig(**options)


def test_errors_are_value_errors_of_this_package() -> None:
    with pytest.raises(ValueError, match="policy"):
        StreamConfig(policy="")
    with pytest.raises(FmstreamError, match="policy"):
        StreamConfig(policy="")


def test_overrides_stand_above_a_configuration() -> None:
    base = StreamConfig(policy="sync", memory="6GiB", num_workers=3)
    config = StreamConfig.from_options(base, memory=None, policy=MISSING, num_workers=1)
    assert config == StreamConfig(policy="sync", memory=None, num_workers=1)
    assert base.memory == "6GiB"
    assert StreamConfig.from_options(None) == StreamConfig.from_options() == StreamConfig()
    assert StreamConfig.from_options({"unit": "1MiB"}, unit=5) == StreamConfig(unit=5)


def test_overrides_are_checked() -> None:
    with pytest.raises(ConfigError, match="prefetch_window=0"):
        StreamConfig.from_options(StreamConfig(), prefetch_window=0)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("memmory", "did you mean 'memory'"),
        ("prefetch", "did you mean 'prefetch_window'"),
        ("workers", "did you mean 'num_workers'"),
        ("xyzzy", "known are policy, memory"),
    ],
)
def test_unknown_options_name_the_nearest(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option {name!r} in the options: {remedy}"):
        StreamConfig.from_options({name: 1})
    with pytest.raises(ConfigError, match=f"unknown option {name!r} in the options: {remedy}"):
        StreamConfig.from_options(**{name: 1})


@pytest.mark.parametrize("header", ["", "[fmstream]\n", "[tool.other]\nx = 1\n[fmstream]\n"])
def test_toml(tmp_path: Path, header: str) -> None:
    file = tmp_path / "stream.toml"
    file.write_text(header + 'memory = "50%"\npolicy = "one_ahead"\nprogress = true\n')
    expected = StreamConfig(memory="50%", policy="one_ahead", progress=True)
    assert StreamConfig.from_options(file) == StreamConfig.from_options(str(file)) == expected
    assert StreamConfig.from_options(file, memory=1).memory == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory = ", r"is no TOML file: "),
        ("fmstream = 3", r"fmstream=3 in .* is no table: write \[fmstream\]"),
        ('memory = "1GB"\n[fmstream]\nunit = 5', r"option 'memory' in .* stands outside the table \[fmstream\]"),
        ("[fmstream]\nmemmory = 1", r"unknown option 'memmory' in .*stream\.toml: did you mean 'memory'"),
        ("nothing = 1", r"unknown option 'nothing' in .*stream\.toml"),
        ("num_workers = 0", r"num_workers=0 is no int"),
    ],
)
def test_toml_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "stream.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        StreamConfig.from_options(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        StreamConfig.from_options(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        StreamConfig.from_options(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no TOML file"):
        StreamConfig.from_options(tmp_path / "binary.toml")


def test_other_configurations_are_refused() -> None:
    with pytest.raises(ConfigError, match="config=3 is of type int: give a StreamConfig"):
        StreamConfig.from_options(3)  # type: ignore[arg-type]
