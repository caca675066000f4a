"""Fields of a new model's configuration with windows, other norms or delta nets, per family.

The proportions are the published ones: Gemma's windows and 5:1 local layers, Qwen3-Next's three
delta nets to one attention with as many key heads as attention heads, twice as many value heads.
The pattern is counted from the last layer, which has full attention.
"""

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]


def _kinds(config: Config, local: str, period: int) -> list[str]:
    depth = config["num_hidden_layers"]
    return [local if n % period else "full_attention" for n in reversed(range(depth))]


def _mistral(config: Config) -> dict[str, object]:
    return {"sliding_window": 4096, "attention_bias": None}


def _gemma2(config: Config) -> dict[str, object]:
    return {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["head_dim"],
        "sliding_window": max(1, min(4096, config["max_position_embeddings"] // 2)),
        "layer_types": _kinds(config, "sliding_attention", 2),
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


def _gemma3(config: Config) -> dict[str, object]:
    return _gemma2(config) | {
        "model_type": "gemma3_text",
        "sliding_window": max(1, min(512, config["max_position_embeddings"] // 4)),
        "layer_types": _kinds(config, "sliding_attention", 6),
        "rope_local_base_freq": 10000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _hybrid(config: Config) -> dict[str, object]:
    """Qwen3.5: a quarter of each attention head is rotated, or all of it if a quarter is odd."""
    heads, size = config["num_attention_heads"], config["head_dim"]
    return {
        "model_type": "qwen3_5_text",
        "partial_rotary_factor": 1.0 if size % 8 else 0.25,
        "layer_types": _kinds(config, "linear_attention", 4),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": 2 * heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": 4,
    }


def _qwen3_next(config: Config) -> dict[str, object]:
    """The hybrid with the experts of Qwen3 MoE and a shared expert of the same width."""
    shared = {"shared_expert_intermediate_size": config["moe_intermediate_size"]}
    return _hybrid(config) | shared | {"model_type": "qwen3_next"}


VARIANTS: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "qwen3_5": _hybrid,
    "qwen3_next": _qwen3_next,
}
