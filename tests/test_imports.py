"""Imports go down: doors, payloads and report, actors, device, policies, core, errors and config."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.tree import MODULES, ROOT

LAYERS = [
    {"errors"},
    {"config"},
    {"core"},
    {"policies"},
    {"device", "emulator"},
    {"actors"},
    {"payloads", "report"},
    {"doors", "doctor", "validate", "cli", "__init__", "__main__"},
]
RANKS = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
DOORS = LAYERS[-1]
ROOMS_WITHOUT_TORCH = {"errors", "config", "core", "policies"}
HEAVY = ("numba", "llvmlite", "matplotlib", "rich", "diffusers", "transformers", "accelerate")


def room_of(module: str) -> str:
    """The room of a module: its first name below the package ("__init__" for the package itself)."""
    return module.split(".")[1] if "." in module else "__init__"


def imported(module: str, tree: ast.AST, *, is_package: bool, known: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yield the full name of each module that ``tree`` imports, wherever the import stands, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parents = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in known else base), node.lineno


def imports_of(module: str, source: str) -> list[tuple[str, int]]:
    is_package = MODULES[module].name == "__init__.py" if module in MODULES else False
    return list(imported(module, ast.parse(source), is_package=is_package, known=frozenset(MODULES)))


def offences(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module."""
    room = room_of(module)
    found = []
    for name, line in imports_of(module, source):
        top, where = name.split(".")[0], f"{module}:{line} imports {name}"
        if top == "torch" and room in ROOMS_WITHOUT_TORCH:
            found.append(f"{where}: {room} knows no torch")
        if top in {"policies", "tests", "bench", "examples"}:
            found.append(f"{where}: it is not there in the installed package")
        if top != "fmstream" or room_of(name) == room:
            continue
        target = room_of(name)
        if target not in RANKS:
            found.append(f"{where}: {target} has no place in the layers")
        # Doors may call one another; rooms of one rank may not.
        elif RANKS[target] > RANKS[room] or (RANKS[target] == RANKS[room] and room not in DOORS):
            found.append(f"{where}: {room} stands no higher than {target}")
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) != "cuda"])
def test_imports_go_down(module: str) -> None:
    assert room_of(module) in RANKS, f"give {module} a place in LAYERS"
    assert offences(module, MODULES[module].read_text(encoding="utf-8")) == []


def test_only_what_plays_on_an_emulated_card_knows_the_emulator() -> None:
    users = {
        module
        for module, path in MODULES.items()
        if room_of(module) != "emulator"
        and any(room_of(name) == "emulator" for name, _ in imports_of(module, path.read_text(encoding="utf-8")))
    }
    assert users <= {"fmstream.doors.dry_run", "fmstream.validate.emulated"}


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("fmstream.core.plan", "import torch", True),
        ("fmstream.policies.sync", "def f():\n    from torch import nn", True),
        ("fmstream.core.plan", "if TYPE_CHECKING:\n    import torch.nn", True),
        ("fmstream.core.plan", "import fmstream.device.store", True),
        ("fmstream.core.plan", "from fmstream import device", True),
        ("fmstream.core.plan", "from .. import device", True),
        ("fmstream.core.plan", "from ..device import store", True),
        ("fmstream.device.store", "from fmstream import StreamConfig", True),
        ("fmstream.payloads.weights", "from fmstream.report import report", True),
        ("fmstream.device.store", "from fmstream.nowhere import x", True),
        ("fmstream.policies.sync", "import policies", True),
        ("fmstream.doors.run", "import bench.kit", True),
        ("fmstream.core.plan", "from .trace import Trace\nfrom ..errors import ConfigError\nimport numpy", False),
        ("fmstream.core", "from .plan import Plan\nfrom . import trace", False),
        ("fmstream.policies.sync", "from fmstream.core.plan import Plan", False),
        ("fmstream.device.store", "import torch\nfrom fmstream import errors", False),
        ("fmstream.doors.run", "from fmstream.cli import main\nfrom fmstream.report import report", False),
        ("fmstream", "from fmstream.doors.run import run", False),
    ],
)
def test_the_walk_sees_every_kind_of_import(module: str, source: str, wrong: bool) -> None:
    assert bool(offences(module, source)) == wrong


def loaded_after(code: str) -> set[str]:
    """Import what ``code`` imports in a new interpreter and return the names of all modules it then holds."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split())


@pytest.mark.parametrize("room", ["core", "policies"])
def test_core_and_policies_leave_torch_out(room: str) -> None:
    names = [name for name in MODULES if room_of(name) == room]
    loaded = loaded_after("\n".join(f"import {name}" for name in names))
    assert names
    assert set(names) <= loaded
    assert "torch" not in loaded


def test_the_package_is_light() -> None:
    loaded = loaded_after("import fmstream")
    assert "fmstream" in loaded
    assert loaded.isdisjoint(HEAVY)
