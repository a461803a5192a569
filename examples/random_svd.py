"""Make a Stable Video Diffusion checkpoint of seeded random weights, for machines without the real one."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
)
from torch import nn
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

OUTPUT_GAIN = 0.3
"""Size of the decoder's output: pixels are cut off at -1 and 1, and most should lie between."""

EMBEDDING = 512
"""Width of the image embedding to which the denoiser attends."""

DENOISER = {
    # The published model has (320, 640, 1280, 1280) channels: the same layers, 0.4 times as wide.
    "sample_size": 16,
    "num_frames": 6,
    "block_out_channels": (128, 256, 512, 512),
    "num_attention_heads": (2, 4, 8, 8),
    "cross_attention_dim": EMBEDDING,
}
AUTOENCODER = {
    # Four levels, as published: a latent is an eighth of the image in each direction.
    "block_out_channels": (32, 32, 64, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 128,
}
IMAGE_ENCODER = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "patch_size": 32,
    "image_size": 224,
    "projection_dim": EMBEDDING,
}
SCHEDULER = {
    # As published with the model.
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "interpolation_type": "linear",
    "prediction_type": "v_prediction",
    "timestep_spacing": "leading",
    "timestep_type": "continuous",
    "sigma_min": 0.002,
    "sigma_max": 700.0,
    "steps_offset": 1,
    "use_karras_sigmas": True,
}


def make_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write a diffusers checkpoint of about 1 GB in float32 to ``folder``, holding one tensor at a time in RAM.

    The folder appears whole or not at all: an interrupted run leaves only ``folder`` with ``.partial`` appended.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with torch.device("meta"):
        vae = AutoencoderKLTemporalDecoder(**AUTOENCODER)
        image_encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(**IMAGE_ENCODER))
        unet = UNetSpatioTemporalConditionModel(**DENOISER)
    scheduler, extractor = EulerDiscreteScheduler(**SCHEDULER), CLIPImageProcessor()
    pipeline = StableVideoDiffusionPipeline(vae, image_encoder, unet, scheduler, extractor)
    pipeline.save_config(partial)
    scheduler.save_pretrained(partial / "scheduler")
    extractor.save_pretrained(partial / "feature_extractor")
    rng = np.random.default_rng(seed)
    for name, module in (("vae", vae), ("unet", unet)):
        module.save_config(partial / name)
        write_random_weights(module, partial / name / "diffusion_pytorch_model.safetensors", rng)
    image_encoder.config.save_pretrained(partial / "image_encoder")
    write_random_weights(image_encoder, partial / "image_encoder" / "model.safetensors", rng)
    partial.rename(folder)


def write_random_weights(module: nn.Module, path: Path, rng: np.random.Generator) -> None:
    """Write float32 values for the parameters of ``module`` (on the meta device) to a safetensors file.

    Layout: https://github.com/huggingface/safetensors#format.  The header is padded with spaces, which the format
    allows, so that the data begins at a multiple of 64 bytes.
    """
    params = dict(module.named_parameters())
    norms = {name for name, owner in module.named_modules() if isinstance(owner, (nn.LayerNorm, nn.GroupNorm))}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, param in params.items():
        start, end = end, end + 4 * param.numel()
        header[name] = {"dtype": "F32", "shape": list(param.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, param in params.items():
            values = random_values(tuple(param.shape), name.rpartition(".")[0] in norms, rng)
            if name == "decoder.time_conv_out.weight":
                values *= np.float32(OUTPUT_GAIN)
            file.write(values.data)
        file.flush()
        os.fsync(file.fileno())


def random_values(shape: tuple[int, ...], of_norm: bool, rng: np.random.Generator) -> np.ndarray:
    """Values that keep the size of activations: variance 1 / fan-in for matrices, near 1 for norms, small for biases.

    None is zero, also where training would begin from zero: a weight that is read wrongly must show in the frames.
    """
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) >= 2:
        return values * np.float32(1 / math.sqrt(math.prod(shape[1:])))
    return values * np.float32(0.1) + np.float32(of_norm)
