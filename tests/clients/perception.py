"""Vision and audio models of transformers."""

from __future__ import annotations

from typing import Any

import transformers as tf
from torch import nn

from tests.clients.client import Built, Client, client, drawing, forward, ids, noise

VIT = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SPEECH = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "vocab_size": 40,
}
DECODER = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
}


def vision(model: nn.Module, **kwargs: Any) -> Built:
    """Features of two 32 x 32 images."""
    return forward(model, noise(2, 3, 32, 32), **kwargs)


def detr() -> Built:
    backbone = tf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"])
    return vision(tf.DetrForObjectDetection(tf.DetrConfig(backbone_config=backbone, num_queries=5, **DECODER)))


def segformer() -> Built:
    config = tf.SegformerConfig(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], decoder_hidden_size=32)
    return forward(tf.SegformerForSemanticSegmentation(config), noise(1, 3, 64, 64))


def sam() -> Built:
    encoder = {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        "mlp_dim": 64,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 8,
        "initializer_range": 0.1,
    }
    prompt = {
        "hidden_size": 16,
        "image_size": 32,
        "patch_size": 8,
        "mask_input_channels": 4,
        "image_embedding_size": 4,
    }
    decoder = {
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
        "attention_downsample_rate": 2,
    }
    config = tf.SamConfig(vision_config=encoder, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    return vision(tf.SamModel(config), input_points=30 * noise(2, 1, 1, 2).abs())


def clip() -> Built:
    config = tf.CLIPConfig(text_config=TEXT, vision_config=VIT, projection_dim=32)
    return forward(tf.CLIPModel(config), input_ids=ids(), pixel_values=noise(2, 3, 32, 32))


def llava() -> Built:
    """A picture of 16 patches in the middle of a text."""
    text = {**TEXT, "model_type": "llama", "num_key_value_heads": 2}
    vit = {**VIT, "model_type": "clip_vision_model"}
    config = tf.LlavaConfig(text_config=text, vision_config=vit, image_token_index=99, vision_feature_layer=-1)
    tokens = ids(1, 22)
    tokens[:, 3:19] = 99
    return forward(tf.LlavaForConditionalGeneration(config), input_ids=tokens, pixel_values=noise(1, 3, 32, 32))


def whisper() -> Built:
    config = tf.WhisperConfig(
        **DECODER,
        vocab_size=100,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return forward(tf.WhisperForConditionalGeneration(config), noise(2, 8, 40), decoder_input_ids=ids(2, 6))


def encodec() -> Built:
    config = tf.EncodecConfig(
        num_filters=8,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=2,
        use_causal_conv=False,
    )
    model = tf.EncodecModel(config)
    for layer in model.quantizer.layers:
        layer.codebook.embed.normal_()
    return forward(model, noise(1, 1, 640))


def vits() -> Built:
    """Speech from text; the model draws its noise from the global generator."""
    config = tf.VitsConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        flow_size=16,
        spectrogram_bins=17,
        upsample_initial_channel=32,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        prior_encoder_num_flows=2,
        posterior_encoder_num_wavenet_layers=2,
        duration_predictor_num_flows=2,
    )
    return drawing(forward(tf.VitsModel(config), ids(1, 9)))


VISION = [
    client("vit", lambda: vision(tf.ViTModel(tf.ViTConfig(**VIT))), "vision"),
    client("dinov2", lambda: vision(tf.Dinov2Model(tf.Dinov2Config(**VIT))), "vision"),
    client(
        "swin",
        lambda: vision(
            tf.SwinModel(
                tf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4)
            )
        ),
        "vision",
    ),
    client("clip", clip, "vision"),
    client(
        "clip_vision",
        lambda: vision(tf.CLIPVisionModelWithProjection(tf.CLIPVisionConfig(**VIT, projection_dim=32))),
        "vision",
    ),
    client("clip_text", lambda: forward(tf.CLIPTextModel(tf.CLIPTextConfig(**TEXT)), ids()), "vision", "encoder"),
    client("siglip", lambda: vision(tf.SiglipVisionModel(tf.SiglipVisionConfig(**VIT))), "vision"),
    client("sam", sam, "vision"),
    client("detr", detr, "vision"),
    client(
        "convnext",
        lambda: vision(tf.ConvNextModel(tf.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2))),
        "vision",
    ),
    client("segformer", segformer, "vision"),
    client(
        "blip2_qformer",
        lambda: forward(
            tf.Blip2QFormerModel(tf.Blip2QFormerConfig(**TEXT, encoder_hidden_size=32)),
            noise(2, 4, 48),
            encoder_hidden_states=noise(2, 7, 32),
        ),
        "vision",
    ),
    client("llava", llava, "vision", "decoder"),
]

AUDIO = [
    client("wav2vec2", lambda: forward(tf.Wav2Vec2Model(tf.Wav2Vec2Config(**SPEECH)), noise(1, 800)), "audio"),
    client("hubert", lambda: forward(tf.HubertModel(tf.HubertConfig(**SPEECH)), noise(1, 800)), "audio"),
    client("whisper", whisper, "audio", "seq2seq"),
    client("encodec", encodec, "audio"),
    client("vits", vits, "audio"),
]

PERCEPTION: list[Client] = [*VISION, *AUDIO]
