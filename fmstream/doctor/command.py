"""``fmstream doctor`` and ``fmstream env``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fmstream.config import parse_size
from fmstream.doctor.environment import describe, render
from fmstream.doctor.examine import examine
from fmstream.doctor.probes import MachineProbes
from fmstream.doctor.system import System, Wanted
from fmstream.errors import ConfigError

WEIGHTS: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of files with weights, preferred ones first: a folder may hold the same weights twice."""


def run_doctor(
    *, path: str | None = None, memory: str | None = None, pinned: str | None = None, loads: bool = True, as_json: bool
) -> int:
    """Examine this machine, print what was found, and return the exit status: 1 if anything failed.

    Args:
        path: the model that is to run, a file or a folder.
        memory: fast memory that it is to be given.
        pinned: host memory that is to be pinned.
        loads: whether cards are put under load.

    Raises:
        ConfigError: there is no such path, or a size is none.
    """
    checkup = examine(System(MachineProbes(), make_wanted(path, memory, pinned, loads=loads)))
    if as_json:
        print(checkup.to_json())
    else:
        from fmstream.doctor.page import print_checkup

        print_checkup(checkup)
    return checkup.status


def make_wanted(path: str | None, memory: str | None, pinned: str | None, *, loads: bool) -> Wanted:
    """What the options say is to be run."""
    found = None if path is None else Path(os.path.abspath(path))
    if found is not None and not found.exists():
        raise ConfigError(f"--path {path}: there is no such file or folder: give the model's")
    model = None if found is None else sum(weights_of(found)) or None
    return Wanted(
        path=None if found is None else found.resolve(),
        model_bytes=model,
        memory_bytes=None if memory is None else parse_size(memory, of=model, name="--memory"),
        pinned_bytes=None if pinned is None else parse_size(pinned, name="--pinned"),
        is_measured=loads,
    )


def weights_of(path: Path) -> Iterator[int]:
    """Sizes of the files with weights in a file or folder, of the first kind that is there."""
    if path.is_file():
        yield path.stat().st_size
        return
    files = [file for file in path.rglob("*") if file.suffix in WEIGHTS and file.is_file()]
    kind = min((file.suffix for file in files), key=WEIGHTS.index, default=None)
    yield from (file.stat().st_size for file in files if file.suffix == kind)


def run_env(*, as_json: bool) -> int:
    """Print versions and hardware, and return the exit status 0."""
    facts = describe(System(MachineProbes()))
    print(json.dumps(facts, indent=2) if as_json else render(facts))
    return 0
