"""Every causal-LM architecture that the installed transformers has, and every multimodal one with a text
part, as a tiny configuration in its true shape: grouped heads, windows by layer, soft caps, experts, low
ranks, shared keys and values.

A configuration is the default one of its class with every size made small; what is derived from sizes is
derived again.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

VOCAB = 199
WINDOW = 24

NAMES: tuple[tuple[int, str], ...] = (
    (VOCAB,
     "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size "
     "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab "
     "ngram_vocab_size_base"),
    (512,
     "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
     "max_target_positions rel_extent"),
    (64,
     "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim "
     "ple_embed_dim attention_hidden_size lru_width input_embedding_size output_embedding_size "
     "shape_embed_dim pronunciation_embed_dim"),
    (96,
     "intermediate_size ffn_dim d_inner dff dim_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
     "n_inner dense_intermediate_size intermediate_size_mlp feed_forward_size"),
    (48,
     "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
     "shared_intermediate_size shared_experts_intermediate_size "
     "moe_shared_expert_intermediate_size"),
    (24,
     "q_lora_rank"),
    (WINDOW,
     "sliding_window sliding_window_size local_attention window_size attention_window_size "
     "attention_chunk_size floor_scale"),
    (16,
     "head_dim swa_head_dim dim_head d_head kv_channels qk_nope_head_dim v_head_dim kv_lora_rank "
     "attention_head_size linear_head_dim attention_head_dim index_head_dim index_block_size "
     "mamba_d_state hidden_size_per_layer_input ssm_state_size o_lora_rank linear_key_head_dim "
     "linear_value_head_dim linear_num_key_heads linear_num_value_heads index_topk num_mel_bins"),
    (8,
     "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim "
     "laurel_rank hc_lowrank router_hidden_size gated_norm_rank"),
    (4,
     "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
     "index_topk_blocks encoder_attention_heads num_encoder_attention_heads "
     "num_decoder_attention_heads swa_num_attention_heads num_hidden_layers n_layer n_layers "
     "num_layers decoder_layers num_decoder_layers encoder_layers num_encoder_layers"),
    (2,
     "num_key_value_heads num_kv_heads swa_num_key_value_heads "
     "n_group num_experts_per_tok num_experts_per_token moe_topk moe_k num_expert_group "
     "sliding_window_pattern _sliding_window_pattern global_attn_every_n_layers "
     "num_kv_shared_layers index_n_heads o_groups hc_mult hc_count layer_group_size "
     "heads_per_ngram n_layers_per_attn_res_block"),
    (1,
     "first_k_dense_replace topk_group moe_layer_start_index num_dense_layers "
     "num_nextn_predict_layers zero_expert_num"),
)  # fmt: skip
SIZES: dict[str, Any] = {name: size for size, names in NAMES for name in names.split()}
SIZES |= {"initializer_range": 0.3, "init_std": 0.3, "query_pre_attn_scalar": 16, "use_sliding_window": True}
# What an architecture needs beside that.
PAIRS = ["sliding_attention", "full_attention"] * 2
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
HALF_MROPE = {
    "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
}
# Of two heads all products are negative for every fourth key: its score is zero then, as that of many others,
# and which of these their own code picks is open.
INDEXER = {"index_n_heads": 16}
GEMMA4 = {"layer_types": PAIRS, "num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 32}
QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ple_embed_dim": 64,
    "eos_token_id": 0,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1},
    "axk2": INDEXER,
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": PAIRS,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in set(PAIRS)},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v32": INDEXER,
    "dots1": {"n_shared_experts": 1, "max_window_layers": 2},
    "dots3_note_text": {
        **INDEXER,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
    "glm_moe_dsa": {**INDEXER, "indexer_types": ["full", "shared"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hy_v4": INDEXER,
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "phimoe": {"sliding_window": None},  # as published; transformers' cache and its masks differ about it
    **{name: {"text_config": MROPE} for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paddleocr_vl")},
    **{name: {"text_config": HALF_MROPE} for name in ("glm4v", "glm46v", "glm4v_moe", "glm_ocr", "glmga")},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3_vl_moe": {"text_config": {**MROPE, "sliding_window": None}},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32]},
    "rwkv": {"rescale_every": 2},
    "whisper": {"begin_suppress_tokens": None},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_hidden_layers": 54, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}


def model_types() -> list[str]:
    multimodal = [
        name
        for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and "text_config" in CONFIG_MAPPING[name].sub_configs
    ]
    return list(dict.fromkeys([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *multimodal]))


def tiny(model_type: str) -> PreTrainedConfig:
    """Returns the configuration. Raises what its class raises, if it cannot be this small."""
    config = AutoConfig.for_model(model_type)
    return type(config)(**_values(config, SPECIAL.get(model_type, {})))


def _values(config: PreTrainedConfig, special: dict[str, Any]) -> dict[str, Any]:
    known = {value: name for name, value in config.attribute_map.items()}
    told: dict[str, Any] = {}
    if hasattr(config, "allow_global_per_layer_attribute_access"):
        config.allow_global_per_layer_attribute_access = True
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            told[name] = _values(value, special.get(name, {}))
        elif name in SIZES or known.get(name) in SIZES:
            told[name] = SIZES[name] if name in SIZES else SIZES[known[name]]
        elif name.endswith(("_token_id", "_token_index")):
            told[name] = 0 if isinstance(value, int) else value
    if "qk_rope_head_dim" in told:  # low-rank attention calls the rotated part its head, and shares none
        told["head_dim"] = told["qk_rope_head_dim"]
        told["num_key_value_heads"] = told["num_attention_heads"]
    if "is_decoder" in vars(config) and not config.sub_configs:
        told["is_decoder"] = True
    return told | {name: value for name, value in special.items() if name not in config.sub_configs}
