"""Models that ``fmstream plan`` knows by name: their configurations as published, so that no file is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Example:
    """A model: the library and class that build it, and its configuration."""

    library: str
    class_name: str
    config: Mapping[str, Any]


_FLUX: Final = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
}

EXAMPLES: Final[dict[str, Example]] = {
    "wan2.1-i2v-14b": Example(
        "diffusers",
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 40,
            "attention_head_dim": 128,
            "in_channels": 36,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 13824,
            "num_layers": 40,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "eps": 1e-6,
            "image_dim": 1280,
            "added_kv_proj_dim": 5120,
            "rope_max_seq_len": 1024,
        },
    ),
    "svd": Example(
        "diffusers",
        "UNetSpatioTemporalConditionModel",
        {
            "sample_size": 96,
            "in_channels": 8,
            "out_channels": 4,
            "block_out_channels": (320, 640, 1280, 1280),
            "layers_per_block": 2,
            "num_attention_heads": (5, 10, 20, 20),
            "cross_attention_dim": 1024,
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 768,
            "transformer_layers_per_block": 1,
            "num_frames": 14,
        },
    ),
    "flux": Example("diffusers", "FluxTransformer2DModel", {**_FLUX, "guidance_embeds": True}),
    "flux-schnell": Example("diffusers", "FluxTransformer2DModel", {**_FLUX, "guidance_embeds": False}),
    "sdxl": Example(
        "diffusers",
        "UNet2DConditionModel",
        {
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
            "use_linear_projection": True,
        },
    ),
    "llama-3-8b": Example(
        "transformers",
        "LlamaForCausalLM",
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "dtype": "bfloat16",
        },
    ),
}
