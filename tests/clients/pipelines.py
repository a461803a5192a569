"""Whole pipelines of diffusers, with guidance."""

from __future__ import annotations

from typing import Any

import diffusers as d
import tokenizers
import torch
import transformers as tf
from torch import Tensor

from tests.clients.client import Built, Client, client, named_modules_of, noise, wake
from tests.clients.diffusion import autoencoder, flux, unet, video_autoencoder, video_unet, wan, wan_autoencoder

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 99,
    "pad_token_id": 0,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 32,
}


def pipeline(pipe: d.DiffusionPipeline, **options: Any) -> Built:
    """Two steps (unless told otherwise) with a generator that each call makes anew.

    Embeddings are inputs that may be put on a device; an image stays on the CPU, where pipelines prepare it.
    """
    for part in named_modules_of(pipe).values():
        wake(part).eval()
    pipe.set_progress_bar_config(disable=True)
    given = {name: options.pop(name) for name in list(options) if name.endswith("_embeds")}
    options = {"num_inference_steps": 2, "output_type": "np", **options}

    def run(**given: Tensor) -> object:
        return pipe(generator=torch.Generator().manual_seed(3), **options, **given)

    return Built(pipe, run, kwargs=given)


def tokenizer() -> tf.PreTrainedTokenizerFast:
    """A tokenizer of single characters, 16 tokens long, made without a file."""
    vocabulary = {"<pad>": 0, "<end>": 99, **{chr(c): c for c in range(ord(" "), ord("a") - 1)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<end>", unk_token="<pad>", model_max_length=16
    )


def stable_diffusion() -> Built:
    """Prompt and negative prompt through the text encoder; both guidance halves in one batch."""
    pipe = d.StableDiffusionPipeline(
        vae=autoencoder(),
        text_encoder=tf.CLIPTextModel(tf.CLIPTextConfig(**TEXT)),
        tokenizer=tokenizer(),
        unet=unet(),
        scheduler=d.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return pipeline(pipe, prompt="A RED FOX", negative_prompt="BLUR", height=16, width=16)


def stable_video_diffusion() -> Built:
    """Image to video: image encoder, encoder, denoiser, decoder in chunks."""
    pipe = d.StableVideoDiffusionPipeline(
        vae=video_autoencoder(),
        image_encoder=tf.CLIPVisionModelWithProjection(tf.CLIPVisionConfig(**IMAGE)),
        unet=video_unet(),
        scheduler=d.EulerDiscreteScheduler(prediction_type="v_prediction"),
        feature_extractor=tf.CLIPImageProcessorPil(),
    )
    image = noise(1, 3, 16, 16).sigmoid()
    return pipeline(pipe, image=image, height=16, width=16, num_frames=2, decode_chunk_size=1)


def flux_pipeline() -> Built:
    """Text embeddings are given; true guidance calls the denoiser twice a step."""
    pipe = d.FluxPipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder(shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=flux(),
    )
    given = {"prompt_embeds": noise(1, 5, 32), "pooled_prompt_embeds": noise(1, 32)}
    negative = {f"negative_{name}": -value for name, value in given.items()}
    return pipeline(pipe, **given, **negative, true_cfg_scale=2.0, height=16, width=16)


def wan_text_to_video() -> Built:
    """Guidance calls the denoiser twice a step."""
    pipe = d.WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=umt5(),
        vae=wan_autoencoder(),
        scheduler=d.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=wan(),
    )
    return pipeline(
        pipe, prompt="A FOX", negative_prompt="BLUR", height=16, width=16, num_frames=5, max_sequence_length=16
    )


def umt5() -> tf.UMT5EncoderModel:
    return tf.UMT5EncoderModel(tf.UMT5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100))


def wan_image_to_video() -> Built:
    """Two denoisers: one for the noisy steps, one for the rest.  Text embeddings are given."""
    pipe = d.WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=wan_autoencoder(),
        scheduler=d.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=wan(in_channels=36),
        transformer_2=wan(in_channels=36),
        boundary_ratio=0.9,
    )
    text = {"prompt_embeds": noise(1, 7, 32), "negative_prompt_embeds": -noise(1, 7, 32)}
    return pipeline(pipe, image=noise(1, 3, 16, 16).sigmoid(), **text, height=16, width=16, num_frames=5)


PIPELINES: list[Client] = [
    client("stable_diffusion", stable_diffusion, "pipeline"),
    client("stable_video_diffusion", stable_video_diffusion, "pipeline", "video"),
    client("flux_pipeline", flux_pipeline, "pipeline"),
    client("wan_text_to_video", wan_text_to_video, "pipeline", "video"),
    client("wan_image_to_video", wan_image_to_video, "pipeline", "video"),
]
