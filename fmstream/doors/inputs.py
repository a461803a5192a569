"""What one step of a known model is called with: tensors of the sizes that its pipeline makes, without values."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor, nn

from fmstream.errors import ConfigError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Inputs = Callable[[torch.device], Arguments]
DTYPE: Final = torch.bfloat16
MAX_SIZE: Final = 1 << 20
TEXT_TOKENS: Final = 512
"""Tokens of a prompt, padded as the pipelines of these models do."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a step; None is as usual for the model.

    Attributes:
        frames, height, width: of the video or image, in pixels.
        batch: samples at once; models with guidance are called with two.
        tokens: that a language model has seen before this one.
    """

    frames: int | None = None
    height: int | None = None
    width: int | None = None
    batch: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            if not 1 <= value <= MAX_SIZE:
                raise ConfigError(f"--{name} {value} is not from 1 to {MAX_SIZE}: give the size of one step")

    def given(self) -> dict[str, int]:
        """What is not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def refuse(self, what: str, known: tuple[str, ...] = ()) -> None:
        """Raise `ConfigError` for a given size that means nothing to ``what``."""
        for name in self.given():
            if name not in known:
                takes = f"it takes {', '.join(f'--{k}' for k in known)}" if known else "leave it out"
                raise ConfigError(f"--{name} means nothing to {what}: {takes}")


@dataclass(frozen=True, slots=True)
class _Maker:
    """How the arguments for a class are made: ``usual`` sizes, and a function of the module, the device and sizes."""

    usual: dict[str, int]
    make: Callable[..., dict[str, Any]]


_makers: dict[str, _Maker] = {}


def _makes(class_name: str, **usual: int) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., dict[str, Any]]]:
    def add(make: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        _makers[class_name] = _Maker(usual, make)
        return make

    return add


def inputs_for(module: nn.Module, size: Size) -> tuple[str, Inputs]:
    """What a step is, for people, and what makes its arguments.

    Raises:
        ConfigError: the inputs of this class are not known, or a size means nothing to it.
    """
    name = type(module).__name__
    maker = _makers.get(name)
    if maker is None and hasattr(module, "generate") and name.endswith("ForCausalLM"):
        maker = _DECODER
    if maker is None:
        near = difflib.get_close_matches(name, _makers, n=1)
        hint = f"; the nearest known is {near[0]}" if near else ""
        raise ConfigError(
            f"the inputs of {name} are not known{hint}: write a function that returns (module, inputs), inputs being "
            f"its keywords with tensors on the meta device, and give module:function (known: {', '.join(_makers)}, and "
            "transformers' language models)"
        )
    size.refuse(name, tuple(maker.usual))
    sizes = maker.usual | size.given()

    def inputs(device: torch.device) -> Arguments:
        return (), maker.make(module, device, **sizes)

    return f"one step of {name}, {_describe(sizes)}", inputs


def _describe(sizes: dict[str, int]) -> str:
    parts = []
    if "tokens" in sizes:
        parts.append(f"one token after {sizes['tokens']}")
    if "frames" in sizes:
        parts.append(f"{sizes['frames']} frames")
    if "height" in sizes:
        parts.append(f"{sizes['width']}x{sizes['height']}")
    return ", ".join([*parts, f"batch {sizes['batch']}"])


class _On:
    """Tensors on a device: those without values, and zeros where a model asks for the value."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def unknown(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.zeros(shape, dtype=dtype).to(self.device)


@_makes("WanTransformer3DModel", frames=81, height=480, width=832, batch=1)
def _wan(module: Any, device: torch.device, *, frames: int, height: int, width: int, batch: int) -> dict[str, Any]:
    config, on = module.config, _On(device)
    latents = (frames - 1) // 4 + 1  # the autoencoder's strides in time and space are 4 and 8
    made: dict[str, Any] = {
        "hidden_states": on.unknown(batch, config.in_channels, latents, height // 8, width // 8),
        "timestep": on.zeros(batch, dtype=torch.int64),
        "encoder_hidden_states": on.unknown(batch, TEXT_TOKENS, config.text_dim),
        "return_dict": False,
    }
    if config.image_dim is not None:
        made["encoder_hidden_states_image"] = on.unknown(batch, 257, config.image_dim)
    return made


@_makes("UNetSpatioTemporalConditionModel", frames=14, height=576, width=1024, batch=2)
def _svd(module: Any, device: torch.device, *, frames: int, height: int, width: int, batch: int) -> dict[str, Any]:
    config, on = module.config, _On(device)
    num_ids = config.projection_class_embeddings_input_dim // config.addition_time_embed_dim
    return {
        "sample": on.unknown(batch, frames, config.in_channels, height // 8, width // 8),
        "timestep": torch.tensor(1.0).to(device),
        "encoder_hidden_states": on.unknown(batch, 1, config.cross_attention_dim),
        "added_time_ids": on.zeros(batch, num_ids),
        "return_dict": False,
    }


@_makes("FluxTransformer2DModel", height=1024, width=1024, batch=1)
def _flux(module: Any, device: torch.device, *, height: int, width: int, batch: int) -> dict[str, Any]:
    config, on = module.config, _On(device)
    patches = (height // 16) * (width // 16)
    made: dict[str, Any] = {
        "hidden_states": on.unknown(batch, patches, config.in_channels),
        "encoder_hidden_states": on.unknown(batch, TEXT_TOKENS, config.joint_attention_dim),
        "pooled_projections": on.unknown(batch, config.pooled_projection_dim),
        "timestep": on.zeros(batch),
        "img_ids": on.zeros(patches, 3),
        "txt_ids": on.zeros(TEXT_TOKENS, 3),
        "return_dict": False,
    }
    if config.guidance_embeds:
        made["guidance"] = on.zeros(batch)
    return made


@_makes("UNet2DConditionModel", height=1024, width=1024, batch=2)
def _unet(module: Any, device: torch.device, *, height: int, width: int, batch: int) -> dict[str, Any]:
    config, on = module.config, _On(device)
    made: dict[str, Any] = {
        "sample": on.unknown(batch, config.in_channels, height // 8, width // 8),
        "timestep": torch.tensor(1.0).to(device),
        "encoder_hidden_states": on.unknown(batch, 77, config.cross_attention_dim),
        "return_dict": False,
    }
    if config.addition_embed_type == "text_time":
        text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        made["added_cond_kwargs"] = {"text_embeds": on.unknown(batch, text), "time_ids": on.zeros(batch, 6)}
    return made


@_makes("SD3Transformer2DModel", height=1024, width=1024, batch=2)
def _sd3(module: Any, device: torch.device, *, height: int, width: int, batch: int) -> dict[str, Any]:
    config, on = module.config, _On(device)
    return {
        "hidden_states": on.unknown(batch, config.in_channels, height // 8, width // 8),
        "encoder_hidden_states": on.unknown(batch, 333, config.joint_attention_dim),
        "pooled_projections": on.unknown(batch, config.pooled_projection_dim),
        "timestep": on.zeros(batch),
        "return_dict": False,
    }


def _decode(module: Any, device: torch.device, *, tokens: int, batch: int) -> dict[str, Any]:
    from transformers import DynamicCache

    config, on, cache = module.config, _On(device), DynamicCache()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(on.unknown(batch, heads, tokens, size), on.unknown(batch, heads, tokens, size), layer)
    return {
        "input_ids": on.zeros(batch, 1, dtype=torch.int64),
        cache_name(module): cache,
        "position_ids": on.zeros(batch, 1, dtype=torch.int64) + tokens,
        "use_cache": True,
        "return_dict": False,
    }


def cache_name(module: nn.Module) -> str:
    """The keyword under which a language model takes its cache: versions of transformers differ in it."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


_DECODER: Final = _Maker({"tokens": 2048, "batch": 1}, _decode)
