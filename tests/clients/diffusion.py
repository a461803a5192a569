"""Denoisers and autoencoders of diffusers."""

from __future__ import annotations

from typing import Any

import diffusers as d
import torch
from torch import Tensor, nn

from tests.clients.client import Built, Client, client, forward, noise, wake

CROSS = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
DOWN = ("DownBlock2D", "CrossAttnDownBlock2D")
UP = ("CrossAttnUpBlock2D", "UpBlock2D")
KL = {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4}


def unet() -> nn.Module:
    """The denoiser of Stable Diffusion."""
    return d.UNet2DConditionModel(sample_size=8, down_block_types=DOWN, up_block_types=UP, **CROSS)


def autoencoder(**options: Any) -> nn.Module:
    """The autoencoder of Stable Diffusion: images are twice as wide as latents."""
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    return d.AutoencoderKL(down_block_types=down, up_block_types=up, **KL, **options)


def video_unet() -> nn.Module:
    """The denoiser of Stable Video Diffusion."""
    return d.UNetSpatioTemporalConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        block_out_channels=(32, 32),
        layers_per_block=1,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        cross_attention_dim=32,
        num_attention_heads=2,
        num_frames=2,
    )


def video_autoencoder() -> nn.Module:
    """The autoencoder of Stable Video Diffusion."""
    return d.AutoencoderKLTemporalDecoder(block_out_channels=(32,), latent_channels=4)


def flux() -> nn.Module:
    return d.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def wan(in_channels: int = 16, **options: Any) -> nn.Module:
    return d.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=in_channels,
        out_channels=16,
        text_dim=32,
        freq_dim=64,
        ffn_dim=64,
        num_layers=3,
        rope_max_seq_len=32,
        **options,
    )


def wan_autoencoder() -> nn.Module:
    return d.AutoencoderKLWan(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def plain_unet() -> Built:
    model = d.UNet2DModel(
        sample_size=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
    )
    return forward(model, noise(1, 3, 8, 8), 3)


def spatio_temporal() -> Built:
    ids = torch.tensor([[6.0, 127.0, 0.02]])
    return forward(video_unet(), noise(1, 2, 8, 8, 8), 3, noise(1, 1, 32), ids)


def controlled() -> Built:
    """A control net and the denoiser that it feeds, as a dict."""
    control = d.ControlNetModel(down_block_types=DOWN, conditioning_embedding_out_channels=(8, 16), **CROSS)
    parts = {"controlnet": wake(control).eval(), "unet": wake(unet()).eval()}

    def run(sample: Tensor, text: Tensor, image: Tensor) -> object:
        down, mid = parts["controlnet"](sample, 3, text, image, return_dict=False)
        residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        return down, parts["unet"](sample, 3, text, **residuals)

    return Built(parts, run, (noise(1, 4, 8, 8), noise(1, 5, 32), noise(1, 3, 16, 16)))


def motion_unet() -> Built:
    model = d.UNetMotionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=32,
        num_attention_heads=2,
        motion_num_attention_heads=2,
        motion_max_seq_length=4,
    )
    return forward(model, noise(1, 4, 2, 8, 8), 3, noise(2, 5, 32))


def flux_forward() -> Built:
    return forward(
        flux(),
        hidden_states=noise(1, 16, 16),
        encoder_hidden_states=noise(1, 5, 32),
        pooled_projections=noise(1, 32),
        timestep=torch.tensor([0.5]),
        guidance=None,
        img_ids=noise(16, 3).round(),
        txt_ids=torch.zeros(5, 3),
    )


def cogvideox() -> Built:
    model = d.CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=8,
        num_layers=3,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        max_text_seq_length=8,
    )
    return forward(model, noise(1, 2, 4, 8, 8), noise(1, 8, 8), torch.tensor([3]))


def sd3() -> Built:
    model = d.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    return forward(model, noise(1, 4, 8, 8), noise(1, 5, 32), noise(1, 32), torch.tensor([3]))


def hunyuan_video() -> Built:
    model = d.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    mask = torch.ones(1, 5, dtype=torch.bool)
    at, guidance = torch.tensor([3]), torch.tensor([6000.0])
    return forward(model, noise(1, 4, 2, 8, 8), at, noise(1, 5, 16), mask, noise(1, 16), guidance)


def ltx() -> Built:
    model = d.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=3,
        caption_channels=16,
    )
    mask = torch.ones(1, 5, dtype=torch.bool)
    size = {"num_frames": 2, "height": 4, "width": 4}
    return forward(model, noise(1, 32, 4), noise(1, 5, 16), torch.tensor([3]), mask, **size)


def mochi() -> Built:
    model = d.MochiTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=16,
        max_sequence_length=8,
    )
    mask = torch.ones(1, 8, dtype=torch.bool)
    return forward(model, noise(1, 4, 2, 8, 8), noise(1, 8, 16), torch.tensor([3]), mask)


def pixart() -> Built:
    model = d.PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        cross_attention_dim=32,
        sample_size=8,
        caption_channels=16,
        use_additional_conditions=False,
    )
    return forward(
        model, noise(1, 4, 8, 8), noise(1, 5, 16), torch.tensor([3]), {"resolution": None, "aspect_ratio": None}
    )


def dit() -> Built:
    model = d.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8, num_embeds_ada_norm=10
    )
    return forward(model, noise(1, 4, 8, 8), torch.tensor([3]), torch.tensor([1]))


def sana() -> Built:
    model = d.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=3,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=8,
    )
    return forward(model, noise(1, 4, 8, 8), noise(1, 5, 16), torch.tensor([3]))


def qwen_image() -> Built:
    model = d.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    mask = torch.ones(1, 5, dtype=torch.long)
    return forward(model, noise(1, 16, 16), noise(1, 5, 16), mask, torch.tensor([0.5]), [(1, 4, 4)])


def image_roundtrip(model: nn.Module, sample: Tensor, **decode: Any) -> Built:
    """``encode`` and ``decode``, which are methods and not ``forward``."""
    wake(model).eval()

    def run(sample: Tensor) -> object:
        latents = model.encode(sample).latent_dist.mode()
        return latents, model.decode(latents, **decode)

    return Built(model, run, (sample,))


def tiled_roundtrip() -> Built:
    """Decodes tile by tile: the decoder is called many times in one pass."""
    model = autoencoder()
    model.enable_tiling()
    model.tile_sample_min_size, model.tile_latent_min_size = 16, 8
    return image_roundtrip(model, noise(1, 3, 24, 24))


def cogvideox_autoencoder() -> Built:
    four = 4
    model = d.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * four,
        up_block_types=("CogVideoXUpBlock3D",) * four,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    return image_roundtrip(model, noise(1, 3, 5, 16, 16))


def vector_quantised() -> Built:
    model = wake(d.VQModel(block_out_channels=(32,), latent_channels=3, norm_num_groups=8, num_vq_embeddings=32)).eval()
    return Built(model, lambda sample: model.decode(model.encode(sample).latents), (noise(1, 3, 16, 16),))


DENOISERS = [
    client("unet2d", plain_unet, "denoiser"),
    client("unet2d_condition", lambda: forward(unet(), noise(2, 4, 8, 8), 3, noise(2, 5, 32)), "denoiser"),
    client("unet_spatio_temporal", spatio_temporal, "denoiser", "video"),
    client("unet_motion", motion_unet, "denoiser", "video"),
    client("controlnet", controlled, "denoiser"),
    client(
        "wan", lambda: forward(wan(), noise(1, 16, 2, 8, 8), torch.tensor([3]), noise(1, 7, 32)), "denoiser", "video"
    ),
    client("flux", flux_forward, "denoiser"),
    client("cogvideox", cogvideox, "denoiser", "video"),
    client("sd3", sd3, "denoiser"),
    client("hunyuan_video", hunyuan_video, "denoiser", "video"),
    client("ltx_video", ltx, "denoiser", "video"),
    client("mochi", mochi, "denoiser", "video"),
    client("pixart", pixart, "denoiser"),
    client("dit", dit, "denoiser"),
    client("sana", sana, "denoiser"),
    client("qwen_image", qwen_image, "denoiser"),
]

AUTOENCODERS = [
    client("kl", lambda: image_roundtrip(autoencoder(), noise(1, 3, 16, 16)), "autoencoder", "methods"),
    client("kl_tiled", tiled_roundtrip, "autoencoder", "methods"),
    client(
        "kl_temporal",
        lambda: image_roundtrip(video_autoencoder(), noise(2, 3, 16, 16), num_frames=2),
        "autoencoder",
        "methods",
    ),
    client("kl_wan", lambda: image_roundtrip(wan_autoencoder(), noise(1, 3, 5, 16, 16)), "autoencoder", "methods"),
    client("kl_cogvideox", cogvideox_autoencoder, "autoencoder", "methods"),
    client("vq", vector_quantised, "autoencoder", "methods"),
]

DIFFUSION: list[Client] = [*DENOISERS, *AUTOENCODERS]
