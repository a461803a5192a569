"""The language model that ``fmstream validate --kv`` names, with its tokenizer."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from fmstream.doors.subjects import function_of
from fmstream.errors import ConfigError
from fmstream.validate.kv import missing_library
from fmstream.validate.outcome import first_line


class Speaker(NamedTuple):
    """A language model of transformers, in eval mode on the CPU, and its tokenizer."""

    model: Any
    tokenizer: Any


def find_speaker(target: str) -> Speaker:
    """The model that a target names.

    Args:
        target: a folder with a model and its tokenizer as transformers saves them, or with one GGUF file; or
            ``module:function`` that returns both.

    Raises:
        ConfigError: transformers is missing, there is no such target, or it cannot be loaded.
    """
    missing = missing_library()
    if missing:
        raise ConfigError(f"--kv {target} needs a language model: {missing}")
    folder = Path(target)
    if folder.is_dir():
        return _from_folder(folder)
    if ":" in target and not folder.exists():
        return _from_function(target)
    raise ConfigError(f"--kv {target} is neither the folder of a model nor module:function: give one of these")


def _from_folder(folder: Path) -> Speaker:
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    files = sorted(folder.glob("*.gguf"))
    if not (folder / "config.json").is_file() and len(files) != 1:
        raise ConfigError(
            f"--kv {folder} has no config.json, and {len(files)} GGUF files: give a folder with a model that "
            "transformers saved, or with one GGUF file"
        )
    options = {} if (folder / "config.json").is_file() else {"gguf_file": files[0].name}
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
        model = library.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto", **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError(f"--kv {folder} cannot be loaded: {first_line(error)}") from error
    return Speaker(model.eval().requires_grad_(False), tokenizer)


def _from_function(target: str) -> Speaker:
    made = function_of(target)()
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[0], "generate") and callable(made[1])):
        raise ConfigError(f"--kv {target} returned no pair: return a language model of transformers and its tokenizer")
    return Speaker(made[0].eval(), made[1])
