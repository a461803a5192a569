"""llm-layer-prefetch: threads that carry equal layers from a file through pinned buffers into device slots."""

from __future__ import annotations

import copy
import importlib.util
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor
from torch.func import functional_call

from bench.peers.contract import TIGHT, Adapter, Peer, Running, Unavailable
from bench.peers.model import Net
from bench.peers.wrapped import Between

MODULE: Final = "layer_streamer_core"
FILE: Final = "layers.bin"


def build(model: Net, budget: int, *, n_gpu: int, n_cpu_pinned: int, n_cpu: int) -> Running:
    """`LayerStreamer` over the blocks, written to a file first; the time of its file reads is not modelled."""
    core = _load_core()
    folder = TemporaryDirectory(prefix="layer-prefetch-")
    tensors = _write(model, Path(folder.name) / FILE)
    first = dict(model.blocks[0].named_parameters())
    streamer = core.LayerStreamer(
        folder.name,
        tensors,
        {FILE: 0},
        list(first),
        {key: p.numel() for key, p in first.items()},
        torch.float32,
        len(model.blocks),
        n_gpu=n_gpu,
        n_cpu_pinned=n_cpu_pinned,
        n_cpu=n_cpu,
        batch_gpu=None,
        batch_cpu_pinned=None,
        batch_cpu=None,
        track_progress=False,
    )
    skeleton = copy.deepcopy(model.blocks[0]).to("meta")

    def layer(x: Tensor, weights: dict[str, Tensor], index: int) -> Any:
        return functional_call(skeleton, weights, (x,), strict=True)

    return Running(Between(model, lambda x: streamer.run_pass(x, layer)), folder.cleanup)


def _load_core() -> Any:
    # The package's __init__ needs a newer Python than this project asks for; the file with the streamer does not.
    place = Path(str(distribution("llm-layer-prefetch").locate_file("layer_streamer/layer_streamer.py")))
    found = importlib.util.spec_from_file_location(MODULE, place)
    if found is None or found.loader is None or not place.exists():
        raise Unavailable(f"llm-layer-prefetch has no {place.name}")
    core = importlib.util.module_from_spec(found)
    found.loader.exec_module(core)
    return core


def _write(model: Net, path: Path) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """All blocks' parameters one after the other; returns file, offset and shape by the names that are looked up."""
    tensors: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    with path.open("wb") as file:
        for index, block in enumerate(model.blocks):
            for key, parameter in block.named_parameters():
                tensors[f"model.layers.{index}.{key}"] = (FILE, file.tell(), tuple(parameter.shape))
                file.write(parameter.detach().numpy().tobytes())
    return tensors


PEERS: Final[list[Peer]] = [
    Adapter(
        "llm-layer-prefetch",
        "llm-layer-prefetch",
        TIGHT,
        build,
        {"n_gpu": 2, "n_cpu_pinned": 4, "n_cpu": 4},
        (MODULE,),
    )
]
