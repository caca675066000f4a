"""Configurations of models trained from scratch, from a few numbers.

`parse_shape("d=128,layers=4")` reads the option --shape; `new_config` sets the other fields with
the usual proportions (heads of 64, or 32 below a width of 512; SwiGLU of 8/3 width rounded up to
a multiple of 32, arXiv 2002.05202; initial values of standard deviation 1/sqrt(d), LeCun et al.
1998 section 4.6: the customary 0.02 is right for a width of 2500 and too small for others) and
returns a Hugging Face config.json as a dictionary.

MoE models: the inner width of an expert is by default the dense width divided by the experts per
token, rounded up to a multiple of 32, so that a token uses as many weights as in the dense model.
Attention of deepseek_v3 has the proportions of DeepSeek-V3: half of a head's size is added as
rotated dimensions, the latent is four heads wide; the first layer is dense, the experts are one
group, and one expert is shared.

Models with windows, other norms or delta nets: the proportions are the published ones: Gemma's
windows and 5:1 local layers, Qwen3-Next's three delta nets to one attention with as many key heads
as attention heads, twice as many value heads. The pattern is counted from the last layer, which has
full attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.units import parse_count, parse_length


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


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def _whole(text: str) -> int:
    return int(parse_count(text))


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise UsageError(f"--shape: {text!r} (expected true or false)")
    return text == "true"


# key of --shape → parameter of new_config, function that reads its value
_KEYS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "family": ("family", str),
    "d": ("hidden", _whole),
    "hidden": ("hidden", _whole),
    "layers": ("layers", _whole),
    "heads": ("heads", _whole),
    "kv": ("kv_heads", _whole),
    "head_dim": ("head_dim", _whole),
    "ffn": ("ffn", _whole),
    "vocab": ("vocab", _whole),
    "context": ("context", parse_length),
    "theta": ("rope_theta", parse_count),
    "init": ("init_std", float),
    "experts": ("experts", _whole),
    "chosen": ("chosen", _whole),
    "expert_ffn": ("expert_ffn", _whole),
    "shared": ("shared", _whole),
    "tied": ("tied", _flag),
}


def parse_shape(text: str) -> dict[str, Any]:
    """Arguments of `new_config` from `d=128,layers=4,heads=4,kv=2,ffn=384,tied=false`."""
    shape: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS:
            raise UsageError(
                f"--shape: {part!r} (expected KEY=VALUE with KEY of {', '.join(_KEYS)})"
            )
        name, read = _KEYS[key]
        shape[name] = read(value)
    return shape


def new_config(
    family: str = "llama",
    *,
    hidden: int,
    layers: int,
    vocab: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn: int | None = None,
    context: int = 2048,
    rope_theta: float = 10000.0,
    init_std: float | None = None,
    tied: bool = True,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    **moe: int,
) -> dict[str, object]:
    """The config.json of a new model; raises UsageError if the numbers do not fit.

    moe: experts, chosen, expert_ffn, shared of core.spec.from_scratch, for MoE families.
    """
    if family not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UsageError(f"family: {family!r} (expected one of {known})")
    if min(hidden, layers, vocab, context) < 1:
        raise UsageError(
            f"shape: d={hidden}, layers={layers}, vocab={vocab}, context={context} (expected ≥ 1)"
        )
    if moe and family not in MOE_FAMILIES:
        raise UsageError(
            f"shape: {', '.join(moe)} in a {family} model (expected family="
            f"{', '.join(MOE_FAMILIES)})"
        )
    count = heads or max(1, hidden // (32 if hidden < 512 else 64))
    groups = kv_heads or count
    if hidden % count or count % groups or (hidden // count) % 2:
        raise UsageError(
            f"shape: d={hidden}, heads={count}, kv={groups} (expected heads that divide d into an "
            "even number, and kv that divides heads)"
        )
    config = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn or -int(-(hidden * 8 / 3) // 32) * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": count,
        "num_key_value_heads": groups,
        "head_dim": head_dim or hidden // count,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "initializer_range": init_std or hidden**-0.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
    }
    if family in MOE_FAMILIES:
        config |= MOE_FAMILIES[family](config, MoeShape(**moe))
    if family in VARIANTS:
        config |= VARIANTS[family](config)
    return {key: value for key, value in config.items() if value is not None or "token" in key}
