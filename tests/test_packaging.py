"""What is installed is what stands here: the wheel's contents, its metadata, the pins, the public names."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

import fmstream
from fmstream import cuda, policies
from tests.tree import MODULES, ROOT

SOURCES = ["fmstream", "policies", "cuda", "tests", "bench", "examples"]
FILES = ["pyproject.toml", "README.md", "LICENSE"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources without a network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index"]
    build = subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def archive(wheel: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel) as opened:
        yield opened


def test_the_wheel_holds_every_module_and_nothing_else(archive: zipfile.ZipFile) -> None:
    expected = {
        "/".join(name.split(".")) + ("/__init__.py" if path.name == "__init__.py" else ".py")
        for name, path in MODULES.items()
    }
    expected.add("fmstream/py.typed")
    kernels = [path for path in (ROOT / "cuda/kernels").iterdir() if path.suffix in {".cu", ".cuh"}]
    expected.update(f"fmstream/cuda/{path.name}" for path in kernels)
    held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected
    assert {"fmstream/policies/__init__.py", "fmstream/cuda/__init__.py"} <= held


def test_the_files_in_the_wheel_are_those_here(archive: zipfile.ZipFile) -> None:
    assert archive.read("fmstream/errors.py") == (ROOT / "fmstream/errors.py").read_bytes()
    assert archive.read("fmstream/policies/__init__.py") == (ROOT / "policies/__init__.py").read_bytes()


def test_metadata(archive: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "fmstream-runtime"
    assert metadata["Version"] == fmstream.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert "fmstream = fmstream.cli:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_the_wheel_imports_on_its_own(wheel: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r})\n"
        "import fmstream.policies, fmstream.core, fmstream.cuda, importlib.resources\n"
        "print(fmstream.policies.__file__)\n"
        "print(importlib.resources.files('fmstream.cuda').joinpath('__init__.py').is_file())"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.split() == [str(wheel / "fmstream/policies/__init__.py"), "True"], done.stderr


def test_the_rooms_beside_the_package_are_part_of_it() -> None:
    assert policies.__name__ == "fmstream.policies"
    assert cuda.__name__ == "fmstream.cuda"
    assert not (ROOT / "cuda/__init__.py").exists(), "it would hide NVIDIA's cuda namespace package"


def test_public_names_resolve() -> None:
    names = fmstream.__all__
    assert "__version__" in names
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(fmstream, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fmstream.nothing  # noqa: B018


def normalised(requirement: str) -> str:
    """The name in a requirement, spelled as package indexes compare it."""
    match = re.match(r"[\w.-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    wanted = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    assert {normalised(r) for r in wanted} <= {normalised(pin) for pin in pins}
    assert "torch==2.13.0" in pins, "a local build label would refuse every other build of torch"
