"""The ``flash_memory_config`` that comes with a model: options beneath those that the caller gives."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from fmstream.config import flash_options
from fmstream.errors import ConfigError

KEY: Final = "flash_memory_config"


def options_of(pipeline: Any, roots: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The options that a pipeline, or else its only model that says something, comes with.

    A configuration is looked for in ``config`` of the object, and in config.json of the folder that it was loaded from,
    for diffusers leaves out keys that it does not know.

    Raises:
        ConfigError: an option is unknown, or two models of a pipeline say different things.
    """
    owner = getattr(pipeline, "__self__", pipeline)
    own = _of_one(owner)
    if own is not None:
        return flash_options(_as_object(own))
    found: dict[str, dict[str, Any]] = {}
    for name, root in roots.items():
        theirs = _of_one(root)
        if theirs is not None:
            found[name] = flash_options(_as_object(theirs))
    first = next(iter(found.values()), {})
    if any(other != first for other in found.values()):
        raise ConfigError(
            f"{' and '.join(found)} come with a {KEY} each, and these differ: give config= to say which counts"
        )
    return first


def _of_one(owner: Any) -> Any:
    """The object, as it was found; None if there is none."""
    config = getattr(owner, "config", None)
    found = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    if found is not None:
        return found
    return next(filter(None, map(_of_file, _files(owner, config))), None)


def _as_object(found: Any) -> Any:
    """A path is one of ours; text that a model has in place of an object is not taken for one."""
    if not isinstance(found, Mapping | Path):
        raise ConfigError(f"{KEY}={found!r} is no object: write its keys within braces")
    return found


def _of_file(path: Path) -> Path | None:
    """The path, if the file has the key.  What cannot be read, or only mentions it, says nothing."""
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeError):
        return None
    if KEY not in text:
        return None
    with contextlib.suppress(ValueError):
        document = json.loads(text)
        return path if isinstance(document, Mapping) and document.get(KEY) is not None else None
    return path  # it was meant to say something: its error is told


def _files(owner: Any, config: Any) -> Iterator[Path]:
    """Where the configuration may have been read from."""
    names = [config.get("_name_or_path")] if isinstance(config, Mapping) else [getattr(config, "_name_or_path", None)]
    for name in (*names, getattr(owner, "name_or_path", None)):
        if isinstance(name, str) and name:
            yield from (Path(name, "config.json"), Path(name, "model_index.json"))
