"""Fields of a new MoE model's configuration, per family.

The inner width of an expert is by default the dense width divided by the experts per token, rounded
up to a multiple of 32, so that a token uses as many weights as in the dense model. Attention of
deepseek_v3 has the proportions of DeepSeek-V3: half of a head's size is added as rotated
dimensions, the latent is four heads wide; the first layer is dense, the experts are one group, and
one expert is shared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError


@dataclass(frozen=True)
class MoeShape:
    """Sizes of the MoE layers; chosen: experts per token, shared: shared experts (deepseek_v3)."""

    experts: int = 8
    chosen: int = 2
    expert_ffn: int = 0
    shared: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts or min(self.expert_ffn, self.shared) < 0:
            raise UsageError(
                f"shape: experts={self.experts}, chosen={self.chosen}, expert_ffn={self.expert_ffn}"
                f", shared={self.shared} (expected 1 ≤ chosen ≤ experts and no number below 0)"
            )

    def width(self, dense: int) -> int:
        """Inner width of an expert, for the inner width `dense` of a dense MLP."""
        return self.expert_ffn or -(-dense // (32 * self.chosen)) * 32


def _qwen3_moe(config: Mapping[str, Any], moe: MoeShape) -> dict[str, object]:
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.chosen,
        "moe_intermediate_size": moe.width(config["intermediate_size"]),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _mixtral(config: Mapping[str, Any], moe: MoeShape) -> dict[str, object]:
    return {
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.chosen,
        "intermediate_size": moe.width(config["intermediate_size"]),
        "sliding_window": None,
        "attention_bias": None,
    }


def _deepseek_v3(config: Mapping[str, Any], moe: MoeShape) -> dict[str, object]:
    head = config["head_dim"]
    if config["num_key_value_heads"] != config["num_attention_heads"] or head < 4:
        raise UsageError(
            f"shape: kv={config['num_key_value_heads']}, head_dim={head} in a deepseek_v3 model "
            "(expected no kv, as latent attention has none, and heads of 4 or more)"
        )
    return {
        "head_dim": None,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": head // 4 * 2,
        "v_head_dim": head,
        "kv_lora_rank": 4 * head,
        "q_lora_rank": None,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.chosen,
        "moe_intermediate_size": moe.width(config["intermediate_size"]),
        "n_shared_experts": moe.shared,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }


MOE_FAMILIES: Mapping[str, Callable[[Mapping[str, Any], MoeShape], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
}
