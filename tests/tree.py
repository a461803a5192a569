"""The modules of the package, as installed, and the files that they come from."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "fmstream": ROOT / "fmstream",
    "fmstream.policies": ROOT / "policies",
    "fmstream.cuda": ROOT / "cuda/kernels",
}


def package_modules() -> dict[str, Path]:
    """Map the full name of each module of the package to its file."""
    modules = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            modules[".".join((package, *parts)).removesuffix(".__init__")] = path
    return modules


MODULES = package_modules()
