"""A tiny config of every causal language model that transformers has.

Most shrink by the generic rule that the proof at load uses.  The others are given their sizes
here; a value that only makes an incomplete default complete says so by being here.
"""

from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig

from megatrain.models.shrink import shrink, small_configs

DECODER = {
    "is_decoder": True,
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
"""Encoders that can also be built as decoders."""

SEQ2SEQ_DECODER = {
    "vocab_size": 99,
    "d_model": 32,
    "decoder_layers": 3,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""The decoder of an encoder-decoder, alone."""

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DELTA = {"linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
EXPERTS = {"moe_intermediate_size": 16}

ENCODERS = (
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
    "xlm-roberta-xl",
)  # fmt: skip
ENCODER_DECODERS = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp",
    "pegasus", "plbart", "trocr",
)  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(ENCODERS, DECODER),
    "big_bird": {**DECODER, "attention_type": "original_full"},
    "xmod": {**DECODER, "default_language": "en_XX", "languages": ["en_XX"]},
    **dict.fromkeys(ENCODER_DECODERS, SEQ2SEQ_DECODER),
    "whisper": {**SEQ2SEQ_DECODER, "max_target_positions": 64, "max_source_positions": 64},
    "prophetnet": {
        "vocab_size": 99, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 3,
        "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    },
    "codegen": {**GPT, "rotary_dim": 4},
    "gptj": {**GPT, "rotary_dim": 4},
    "bailing_hybrid": {
        **SMALL, **LATENT, **EXPERTS, **DELTA, "num_experts": 4, "num_experts_per_token": 2,
        "num_expert_group": 1, "topk_group": 1, "layer_group_size": 2, "first_k_dense_replace": 1,
    },
    "kimi_linear": {
        **SMALL, **LATENT, **EXPERTS, **DELTA, "num_experts": 4, "num_experts_per_token": 2,
        "q_lora_rank": None,
    },
    "falcon_h1": {
        **SMALL, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "cohere_compass_text": {
        **SMALL,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "vocab_size": 99,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4,
                       "moe_top_k": 2},
    },
    "dory": {
        **SMALL, "head_dim": 8, "num_hidden_layers": 4, "n_input_layers": 1,
        "n_recurrent_layers": 2, "n_output_layers": 1,
    },
    "dots3_note_text": {
        **SMALL, **LATENT, **EXPERTS, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "shared_experts_intermediate_size": 16, "index_topk": 8,
        "index_head_dim": 16, "index_n_heads": 4, "head_dim": 16, "per_layer_config": None,
    },
    "hunyuan_v1_dense": {**SMALL, "head_dim": 8},
    "xlm": {"vocab_size": 99, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "causal": True,
            "max_position_embeddings": 64, "pad_token_id": 2},
    "xlnet": {"vocab_size": 99, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48},
    "gemma4_text": {
        **SMALL, "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 8,
    },
    "dots1": {
        **SMALL, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "deepseek_v2": {
        **SMALL, **LATENT, **EXPERTS, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v32": {
        **SMALL, **LATENT, **EXPERTS, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 4,
        "first_k_dense_replace": 1,
    },
    "glm_moe_dsa": {
        **SMALL, **LATENT, **EXPERTS, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 4,
    },
    "hunyuan_v1_moe": {**SMALL, "head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ministral": {**SMALL, "head_dim": 8},
    "nemotron": {**SMALL, "head_dim": 8},
    "lfm2_moe": {
        **SMALL, **EXPERTS, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "longcat_flash": {
        **{k: v for k, v in SMALL.items() if k != "num_hidden_layers"}, **LATENT, "num_layers": 2,
        "head_dim": 8, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4,
        "zero_expert_num": 2, "moe_topk": 2,
    },
    "xlstm": {
        "vocab_size": 99, "hidden_size": 32, "embedding_dim": 32, "num_hidden_layers": 3,
        "num_blocks": 3, "num_heads": 4, "chunk_size": 8,
    },
    "qwen4_exp_text": {
        **{key: value for key, value in SMALL.items() if key != "intermediate_size"},
        **EXPERTS, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4,
        "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2, "hc_count": 2,
        "hc_lowrank": 8, "ple_embed_dim": 16, "ngram_size": 2, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100, "make_ngram_vocab_size_divisible_by": 4,
        "split_ngram_parts": 1,
    },
    "reformer": {
        **DECODER, "attn_layers": ["local"] * 3, "axial_pos_embds": False,
        "attention_head_size": 8, "feed_forward_size": 48, "local_attn_chunk_length": 4,
    },
    "zamba2": {
        **SMALL, "num_hidden_layers": 6, "mamba_d_state": 8, "n_mamba_heads": 4,
        "mamba_headdim": 16, "chunk_size": 8, "adapter_rank": 4, "num_key_value_heads": 4,
        "hybrid_layer_ids": [1, 4], "layers_block_type": ["mamba", "hybrid", "mamba"] * 2,
    },
    "zamba": {
        **SMALL, "num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "num_key_value_heads": 4,
    },
    "phi4_multimodal": {
        **SMALL,
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "image_size": 28, "crop_size": 28},
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 2,
                         "num_attention_heads": 4, "ext_pw_out_channel": 32,
                         "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
    },
    "gemma4_assistant": {
        "text_config": {**SMALL, "head_dim": 8, "hidden_size_per_layer_input": 0,
                        "vocab_size_per_layer_input": 0},
    },
    "gemma4_unified_assistant": {"text_config": {**SMALL, "head_dim": 8}},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "patcher_config": {**SMALL, "vocab_size": 260},
        **{
            f"{part}_config": {**SMALL, "vocab_size": 260, "hidden_size_global": 32}
            for part in ("encoder", "decoder")
        },
        "global_config": SMALL,
    },
}  # fmt: skip

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NESTED: dict[str, tuple[str, dict[str, Any]]] = {
    "dots3_note": (
        "dots3_note_text",
        {
            "vision_config": {
                **TOWER, "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "dense"],
                "adapter_in_dim": 32, "adapter_out_dim": 32, "per_layer_config": None,
            },
            "audio_config": {**TOWER, "adapter_input_size": 32, "adapter_out_dim": 32},
        },
    ),
    "qwen4_exp": ("qwen4_exp_text", {}),
    "gemma4": ("gemma4_text", {}),
    "gemma4_unified": ("gemma4_text", {}),
}  # fmt: skip
"""Multimodal type -> the type whose sizes above its text part takes, and other parts."""


def tiny_configs(model_type: str) -> Iterator[Any]:
    """Configs to try, smallest first."""
    if model_type in TINY:
        yield without_randomness(AutoConfig.for_model(model_type, **TINY[model_type]))
        return
    if model_type in NESTED:
        text_type, parts = NESTED[model_type]
        config = AutoConfig.for_model(model_type, text_config=TINY[text_type], **parts)
        yield without_randomness(shrink(config, {}))
        return
    yield from map(without_randomness, small_configs(AutoConfig.for_model(model_type)))


def without_randomness(config: Any) -> Any:
    """Dropout of every kind at zero, so that two runs can be compared."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in filter(None, parts):
        for name, value in list(vars(part).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config
