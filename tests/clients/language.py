"""Text models of transformers: decoders, experts, state-space models, encoders, encoder-decoders, generation."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers import PreTrainedModel

from tests.clients.client import Built, Client, client, drawing, forward, ids, wake

BASE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA = {**BASE, "num_key_value_heads": 2}
HEAD = {**GQA, "head_dim": 12}
SEQ2SEQ = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 100,
    "decoder_start_token_id": 0,
}


def causal(config: tf.PretrainedConfig) -> Built:
    """Logits, and the new cache, of a decoder."""
    return forward(tf.AutoModelForCausalLM.from_config(config), ids())


def masked(config: tf.PretrainedConfig) -> Built:
    """Logits of an encoder with its language head."""
    return forward(tf.AutoModelForMaskedLM.from_config(config), ids())


def seq2seq(config: tf.PretrainedConfig) -> Built:
    """Logits of an encoder-decoder."""
    return forward(tf.AutoModelForSeq2SeqLM.from_config(config), ids(), decoder_input_ids=ids(2, 6))


def generation(model: PreTrainedModel, **options: Any) -> Built:
    """Four tokens and their logits from ``generate``."""
    wake(model).eval()
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
    detailed = {"return_dict_in_generate": True, "output_logits": True}
    return Built(model, model.generate, (ids(),), {**options, **detailed})


def llama(**options: Any) -> PreTrainedModel:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**GQA, **options))


def sampled() -> Built:
    """``generate`` that draws tokens with a seed of its own."""
    return drawing(generation(llama(), do_sample=True))


def gemma3n() -> Built:
    layers = 5
    return causal(
        tf.Gemma3nTextConfig(
            **{**HEAD, "num_hidden_layers": layers, "intermediate_size": [96] * layers},
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=100,
            num_kv_shared_layers=0,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * layers,
            layer_types=["full_attention"] * layers,
        )
    )


def deepseek() -> Built:
    return causal(
        tf.DeepseekV3Config(
            **{**BASE, "num_key_value_heads": 4},
            moe_intermediate_size=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    )


GPT = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
MOE = {**GQA, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
MAMBA2 = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 100, "state_size": 8, "num_heads": 8, "head_dim": 8}
ALBERT = {**BASE, "intermediate_size": 192, "embedding_size": 24, "max_position_embeddings": 32}
RELATIVE = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}

DECODERS = [
    client("llama", lambda: causal(tf.LlamaConfig(**GQA)), "decoder"),
    client("llama_tied", lambda: causal(tf.LlamaConfig(**GQA, tie_word_embeddings=True)), "decoder", "tied"),
    client("gemma2", lambda: causal(tf.Gemma2Config(**HEAD)), "decoder", "tied"),
    client("gemma3", lambda: causal(tf.Gemma3TextConfig(**HEAD)), "decoder", "tied"),
    client("gemma3n", gemma3n, "decoder", "tied"),
    client("qwen2", lambda: causal(tf.Qwen2Config(**GQA)), "decoder"),
    client("qwen3", lambda: causal(tf.Qwen3Config(**HEAD)), "decoder"),
    client("phi3", lambda: causal(tf.Phi3Config(**GQA)), "decoder"),
    client("mistral", lambda: causal(tf.MistralConfig(**GQA, sliding_window=4)), "decoder"),
    client("olmo", lambda: causal(tf.OlmoConfig(**GQA)), "decoder"),
    client("olmo2", lambda: causal(tf.Olmo2Config(**GQA)), "decoder"),
    client("cohere", lambda: causal(tf.CohereConfig(**GQA)), "decoder", "tied"),
    client("gpt2", lambda: causal(tf.GPT2Config(**GPT, n_positions=32)), "decoder", "tied"),
    client("gpt_neox", lambda: causal(tf.GPTNeoXConfig(**BASE)), "decoder"),
    client("gptj", lambda: causal(tf.GPTJConfig(**GPT, rotary_dim=8)), "decoder"),
    client(
        "opt",
        lambda: causal(
            tf.OPTConfig(**BASE, ffn_dim=96, word_embed_proj_dim=32, max_position_embeddings=32),
        ),
        "decoder",
        "tied",
    ),
    client("bloom", lambda: causal(tf.BloomConfig(hidden_size=48, n_layer=3, n_head=4, vocab_size=100)), "decoder"),
    client("falcon", lambda: causal(tf.FalconConfig(**BASE, alibi=True)), "decoder"),
]

EXPERTS = [
    client("mixtral", lambda: causal(tf.MixtralConfig(**GQA, num_local_experts=4)), "moe"),
    client("qwen2_moe", lambda: causal(tf.Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=24)), "moe"),
    client("qwen3_moe", lambda: causal(tf.Qwen3MoeConfig(**MOE, head_dim=12)), "moe"),
    client("olmoe", lambda: causal(tf.OlmoeConfig(**GQA, num_experts=4, num_experts_per_tok=2)), "moe"),
    client("gpt_oss", lambda: causal(tf.GptOssConfig(**HEAD, num_local_experts=4, num_experts_per_tok=2)), "moe"),
    client("deepseek_v3", deepseek, "moe"),
]

STATE_SPACE = [
    client(
        "mamba",
        lambda: causal(tf.MambaConfig(hidden_size=32, num_hidden_layers=4, vocab_size=100, state_size=4)),
        "state-space",
        "tied",
    ),
    client("mamba2", lambda: causal(tf.Mamba2Config(**MAMBA2, n_groups=1)), "state-space"),
    client("rwkv", lambda: causal(tf.RwkvConfig(hidden_size=32, num_hidden_layers=3, vocab_size=100)), "state-space"),
    client(
        "recurrent_gemma",
        lambda: causal(tf.RecurrentGemmaConfig(**{**GQA, "num_key_value_heads": 1}, lru_width=32)),
        "state-space",
    ),
    client(
        "falcon_h1",
        lambda: causal(tf.FalconH1Config(**GQA, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8)),
        "state-space",
    ),
]

ENCODERS = [
    client("bert", lambda: masked(tf.BertConfig(**BASE, max_position_embeddings=32)), "encoder", "tied"),
    client("roberta", lambda: masked(tf.RobertaConfig(**BASE, max_position_embeddings=32)), "encoder", "tied"),
    client(
        "electra",
        lambda: masked(tf.ElectraConfig(**BASE, embedding_size=32, max_position_embeddings=32)),
        "encoder",
        "tied",
    ),
    client(
        "distilbert",
        lambda: masked(
            tf.DistilBertConfig(
                dim=48, hidden_dim=96, n_layers=3, n_heads=4, vocab_size=100, max_position_embeddings=32
            )
        ),
        "encoder",
    ),
    client("albert", lambda: masked(tf.AlbertConfig(**ALBERT)), "encoder", "tied"),
    client("deberta_v2", lambda: masked(tf.DebertaV2Config(**BASE, **RELATIVE, max_position_embeddings=32)), "encoder"),
    client(
        "xlnet",
        lambda: forward(
            tf.XLNetLMHeadModel(tf.XLNetConfig(d_model=48, n_layer=3, n_head=4, d_inner=96, vocab_size=100)), ids()
        ),
        "encoder",
    ),
    client(
        "longformer",
        lambda: masked(tf.LongformerConfig(**BASE, attention_window=4, max_position_embeddings=32)),
        "encoder",
        "tied",
    ),
    client("modernbert", lambda: masked(tf.ModernBertConfig(**BASE, cls_token_id=1, sep_token_id=2)), "encoder"),
    client("mpnet", lambda: masked(tf.MPNetConfig(**BASE, max_position_embeddings=32)), "encoder"),
]

SEQ2SEQS = [
    client("t5", lambda: seq2seq(tf.T5Config(**T5)), "seq2seq", "tied"),
    client("bart", lambda: seq2seq(tf.BartConfig(**SEQ2SEQ)), "seq2seq", "tied"),
    client("m2m_100", lambda: seq2seq(tf.M2M100Config(**SEQ2SEQ)), "seq2seq", "tied"),
    client("marian", lambda: seq2seq(tf.MarianConfig(**{**SEQ2SEQ, "pad_token_id": 99})), "seq2seq", "tied"),
]

GENERATION = [
    client("llama_greedy", lambda: generation(llama()), "generate"),
    client("llama_beams", lambda: generation(llama(), num_beams=3), "generate"),
    client("llama_sampled", sampled, "generate"),
    client("t5_greedy", lambda: generation(tf.T5ForConditionalGeneration(tf.T5Config(**T5))), "generate"),
    client("t5_beams", lambda: generation(tf.T5ForConditionalGeneration(tf.T5Config(**T5)), num_beams=2), "generate"),
]

LANGUAGE: list[Client] = [*DECODERS, *EXPERTS, *STATE_SPACE, *ENCODERS, *SEQ2SEQS, *GENERATION]
