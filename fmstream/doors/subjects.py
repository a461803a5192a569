"""What ``fmstream plan`` looks at: a module without memory, and what one step of it is called with."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fmstream.doors.examples import EXAMPLES
from fmstream.doors.inputs import Inputs, Size, inputs_for
from fmstream.errors import ConfigError

DENOISERS: Final = ("transformer", "unet", "prior")
"""Components of a pipeline of which one is called at every step."""
DTYPE: Final = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Subject:
    """A module to plan for.

    Attributes:
        name: as the user wrote it.
        module: its parameters lie on the meta device, or on the CPU.
        step: what one call of it is, for people.
        inputs: makes the arguments of a call on a device.
    """

    name: str
    module: nn.Module
    step: str
    inputs: Inputs


def find_subject(target: str, size: Size) -> Subject:
    """The module that a target names, and a step of the given size.

    Args:
        target: a bundled example, a folder with the configuration of a diffusers or transformers model (no weights are
            read), or ``module:function`` that returns the module, or the module and its inputs.
        size: of the step; what is None is as usual for the model.

    Raises:
        ConfigError: there is no such target, it cannot be built, or its inputs are not known.
    """
    if target in EXAMPLES:
        example = EXAMPLES[target]
        return _called(target, _from_config(example.library, example.class_name, example.config), size)
    path = Path(target)
    if path.is_dir():
        return _called(target, _from_folder(path), size)
    if ":" in target and not path.exists():
        return _from_function(target, size)
    raise ConfigError(
        f"target {target!r} is neither a bundled example ({', '.join(EXAMPLES)}) nor a folder with a model_index.json "
        "or config.json, nor module:function: give one of these"
    )


def _called(name: str, module: nn.Module, size: Size) -> Subject:
    step, inputs = inputs_for(module, size)
    return Subject(name, module, step, inputs)


# Folders


def _from_folder(folder: Path) -> nn.Module:
    index = folder / "model_index.json"
    if index.is_file():
        parts = _read(index)
        name = next((name for name in DENOISERS if isinstance(parts.get(name), list)), None)
        if name is None:
            raise ConfigError(f"{index} lists none of {', '.join(DENOISERS)}: give the folder of the model itself")
        folder = folder / name
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has neither model_index.json nor config.json: give the folder of a model")
    config = _read(file)
    if "_class_name" in config:
        return _from_config("diffusers", config["_class_name"], config)
    if "model_type" in config:
        return _from_config("transformers", (config.get("architectures") or ["AutoModel"])[0], config)
    raise ConfigError(f"{file} is the configuration of neither a diffusers nor a transformers model")


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON file: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a table of options")
    return found


# Libraries


def _from_config(library: str, class_name: str, config: Mapping[str, Any]) -> nn.Module:
    package = _import(library, f"{class_name} comes from it")
    kind = getattr(package, class_name, None)
    if kind is None:
        raise ConfigError(f"{library} {package.__version__} has no {class_name}: install the version that has it")
    try:
        with torch.device("meta"):
            if library == "diffusers":
                return _cast(kind.from_config(dict(config)), DTYPE)
            configuration = package.AutoConfig.for_model(**config)
            return _cast(kind._from_config(configuration), configuration.dtype or DTYPE)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{class_name} cannot be built from its configuration: {error}") from error


def _import(name: str, why: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed, and {why}: pip install {name}") from error


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Floating-point parameters as they are used, but for those that the model's class keeps in float32."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            wanted = torch.float32 if kept & set(name.split(".")) else dtype
            parameter.data = parameter.data.to(wanted)
    return module.eval().requires_grad_(False)


# Functions


def _from_function(target: str, size: Size) -> Subject:
    made = function_of(target)()
    module, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{target} returned {type(module).__name__}: return an nn.Module, or a module and its inputs")
    module.eval()
    if given is None:
        return _called(target, module, size)
    size.refuse(f"the inputs that {target} returned")
    return Subject(target, module, f"one call of {type(module).__name__}", lambda device: _on(given, device))


def function_of(target: str) -> Callable[[], Any]:
    """The function that ``module:function`` names, modules in the present folder included."""
    where, _, name = target.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as ``python -m`` does: a command has its own folder there
    try:
        module = importlib.import_module(where)
    except (ImportError, ValueError) as error:  # the latter for a name that is empty
        raise ConfigError(f"target {target!r}: {where!r} cannot be imported ({error})") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"target {target!r}: {where} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _on(given: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A mapping as keywords, a list or tuple as arguments, anything else as the only argument."""
    moved = _moved(given, device)
    if isinstance(moved, dict):
        return (), moved
    return (tuple(moved), {}) if isinstance(moved, list | tuple) else ((moved,), {})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device=device) if value.is_meta else value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
