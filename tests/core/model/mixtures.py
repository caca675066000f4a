"""Awkward configurations with experts, latent attention or sinks, as in conftest."""

from typing import Any

from sabia.core.spec import new_config

SHAPE = {"hidden": 72, "layers": 2, "vocab": 293, "heads": 6, "head_dim": 20, "ffn": 104}
SHAPE |= {"context": 256, "tied": False}
STRETCHED = {"factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
YARN = STRETCHED | {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
EXPERTS = {"experts": 5, "chosen": 2, "expert_ffn": 44}
DEEPSEEK = new_config("deepseek_v3", **SHAPE, **EXPERTS | {"experts": 15, "chosen": 4, "shared": 2})
DEEPSEEK |= {"n_group": 5, "topk_group": 2, "routed_scaling_factor": 2.5}
DEEPSEEK |= {"qk_nope_head_dim": 14, "qk_rope_head_dim": 8, "v_head_dim": 18}
DEEPSEEK |= {"kv_lora_rank": 26, "q_lora_rank": 34}
YARN_MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
LONGROPE = {"rope_type": "longrope", "short_factor": [3.0, 1.5, 1.2, 0.9]}
LONGROPE |= {"long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 64}
MINICPM3 = new_config("llama", **SHAPE) | {
    "model_type": "minicpm3", "architectures": ["MiniCPM3ForCausalLM"], "head_dim": None,
    "rope_theta": None, "rope_parameters": LONGROPE | {"rope_theta": 10000.0},
    "scale_emb": 7, "scale_depth": 0.9, "dim_model_base": 50, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 14, "v_head_dim": 18, "kv_lora_rank": 26, "q_lora_rank": 34,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe": new_config("qwen3_moe", **SHAPE, kv_heads=2, **EXPERTS)
    | {"decoder_sparse_step": 1, "mlp_only_layers": [0], "norm_topk_prob": False},
    "mixtral": new_config("mixtral", **SHAPE, kv_heads=3, **EXPERTS) | {"sliding_window": 7},
    "deepseek-v3": DEEPSEEK | {"rope_theta": None, "rope_parameters": YARN_MSCALE},
    "deepseek-plain": DEEPSEEK
    | {"attention_bias": True, "rope_interleave": False, "q_lora_rank": None, "n_group": 1}
    | {"topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0, "v_head_dim": 30},
    "minicpm3": MINICPM3,
    "gpt-oss": new_config("mixtral", **SHAPE, kv_heads=2, **EXPERTS)
    | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "sliding_window": 7}
    | {"attention_bias": True, "swiglu_limit": 0.5, "rope_theta": None}
    | {"rope_parameters": YARN | {"truncate": False}},
}
