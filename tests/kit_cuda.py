"""CUDA kernels compiled by a C++ compiler and run on the CPU, for tests of what they compute."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

COMPILER = shutil.which("g++") or shutil.which("clang++")
_SHIM = Path(__file__).parent / "cuda_on_cpu.h"


def kernel_source(name: str) -> str:
    """The text of a kernel that ships."""
    return files("fmstream.cuda").joinpath(name).read_text(encoding="utf-8")


class Kernel:
    """One kernel, compiled with macros of its own; call it with a grid and its arguments in order."""

    def __init__(self, source: str, entry: str, threads: int, macros: Mapping[str, int], folder: Path) -> None:
        declared = re.search(rf"\b{entry}\(([^)]*)\) {{", source)
        assert declared is not None, f"{entry} is not in the source"
        self._types = [" ".join(part.split()[:-1]) for part in declared[1].split(",")]
        assert COMPILER is not None
        unit = folder / f"{entry}.cpp"
        library = folder / f"{entry}.so"
        unit.write_text(self._unit(source, entry, threads, macros), encoding="utf-8")
        subprocess.run(
            [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-w",
             str(unit), "-o", str(library)],
            check=True,
        )  # fmt: skip
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.restype = ctypes.c_int

    def _unit(self, source: str, entry: str, threads: int, macros: Mapping[str, int]) -> str:
        defined = "\n".join(f"#define {name} {value}" for name, value in {**macros, "THREADS": threads}.items())
        kept = "\n".join(f"static {kind.replace('__restrict__', '')} a{i};" for i, kind in enumerate(self._types))
        given = ", ".join(f"{kind.replace('__restrict__', '')} b{i}" for i, kind in enumerate(self._types))
        set_all = " ".join(f"a{i} = b{i};" for i in range(len(self._types)))
        names = ", ".join(f"a{i}" for i in range(len(self._types)))
        return (
            f'{defined}\n#include "{_SHIM}"\n{source}\n{kept}\nstatic void body() {{ {entry}({names}); }}\n'
            f'extern "C" int launch(unsigned x, unsigned y, unsigned z, {given}) {{ {set_all} '
            f"return cpu::run(Index{{x, y, z}}, THREADS, body); }}\n"
        )

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Run all blocks.  Arguments are tensors, ints and floats.

        Raises:
            RuntimeError: threads of a block waited at different barriers.
        """
        converted: list[Any] = [ctypes.c_uint(extent) for extent in grid]
        for value in arguments:
            if isinstance(value, torch.Tensor):
                assert value.is_contiguous()
                converted.append(ctypes.c_void_p(value.data_ptr()))
            else:
                converted.append(ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value))
        if not self._launch(*converted):
            raise RuntimeError("threads of one block wait at different barriers")
