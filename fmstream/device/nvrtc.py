"""Builds CUDA sources on the user's machine with NVRTC, through cuda-bindings; needs no card."""

from __future__ import annotations

import importlib
from typing import Any, Final

OPTIONS: Final = ("--std=c++17",)


class BuildError(RuntimeError):
    """NVRTC is not there, does not know the architecture, or refused a source; says which, in its own words."""


class Compiler:
    """NVRTC of this environment.

    Raises:
        BuildError: cuda-bindings or NVRTC itself is not installed.
    """

    def __init__(self) -> None:
        try:
            self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        except ImportError as error:
            raise BuildError("cuda-bindings is not installed") from error
        try:
            major, minor = self._call("nvrtcVersion")
        except (RuntimeError, OSError) as error:
            raise BuildError(f"NVRTC is not found: {str(error).partition(chr(10))[0]}") from error
        self.version = f"NVRTC {major}.{minor}"

    def architectures(self) -> tuple[str, ...]:
        """What it builds for, as "sm_89"."""
        (numbers,) = self._call("nvrtcGetSupportedArchs")
        return tuple(f"sm_{number}" for number in numbers)

    def build(self, source: str, name: str, architecture: str) -> bytes:
        """Machine code of a source for one architecture, "sm_89".

        Machine code, not PTX: a driver refuses the PTX of a compiler that is newer than itself.

        Raises:
            BuildError: the architecture is not known, or the source does not compile.
        """
        if architecture not in self.architectures():
            raise BuildError(f"{self.version} does not know {architecture}, only {' '.join(self.architectures())}")
        (program,) = self._call("nvrtcCreateProgram", source.encode(), name.encode(), 0, [], [])
        try:
            options = [f"--gpu-architecture={architecture}", *OPTIONS]
            (status,) = self._nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
            if int(status):
                raise BuildError(f"{name} for {architecture}: {self._log(program)}")
            (size,) = self._call("nvrtcGetCUBINSize", program)
            code = bytearray(size)
            self._call("nvrtcGetCUBIN", program, code)
        finally:
            self._nvrtc.nvrtcDestroyProgram(program)
        return bytes(code)

    def _log(self, program: Any) -> str:
        (size,) = self._call("nvrtcGetProgramLogSize", program)
        text = bytearray(size)
        self._call("nvrtcGetProgramLog", program, text)
        return text.decode(errors="replace").strip("\0\n ")

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        status, *values = getattr(self._nvrtc, name)(*arguments)
        if int(status):
            raise BuildError(f"{name}: {status.name}")
        return tuple(values)
