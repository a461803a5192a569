"""The policies: one file each, found by name."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from fmstream.core.policy import Policy, registry
from fmstream.errors import ConfigError


def load_policies() -> None:
    """Import every module of this package, so that each registers what it offers."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def names() -> tuple[str, ...]:
    """Names of all policies, sorted."""
    load_policies()
    return tuple(sorted(registry))


def get(name: str) -> Policy:
    """The policy of that name; raises `ConfigError` that lists the names and the nearest one."""
    known = names()
    if name in registry:
        return registry[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"policy {name!r} is not known{hint} (policies: {', '.join(known)})")
