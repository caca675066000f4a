"""Random small configurations of every family: all accepted fields vary at once.

Sizes are often odd, optional fields are often absent (the family's default holds), rotations are
written in the old and in the new form. Tensors stay small enough for a few milliseconds a model.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Config = dict[str, Any]
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
TYPE = ("rope_type", "type")
LOCAL, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
SCALED = ("default", "default", "linear", "dynamic", "llama3", "yarn")
_FAMILIES: dict[str, Callable[["Draw"], Config]] = {}
# absent: what the family's default is then
DROPPED = (
    "hidden_act", "hidden_activation", "rms_norm_eps", "norm_eps", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "rope_theta", "num_key_value_heads", "sliding_window",
    "max_window_layers", "use_sliding_window", "layer_types", "norm_topk_prob", "mlp_only_layers",
    "decoder_sparse_step", "num_experts_per_tok", "attn_logit_softcapping", "swiglu_alpha",
    "final_logit_softcapping", "swiglu_limit", "rope_local_base_freq", "routed_scaling_factor",
    "rope_interleave", "first_k_dense_replace", "partial_rotary_factor", "global_rope_theta",
    "local_rope_theta", "local_attention", "classifier_bias", "classifier_activation",
    "decoder_bias", "linear_conv_kernel_dim", "scale_emb", "scale_depth", "dim_model_base",
    "rope_parameters", "rope_scaling", "max_position_embeddings", "attention_dropout",
)  # fmt: skip


class Draw:
    """A source of values for one configuration."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def one(self, *values: Any) -> Any:
        """One of the values, or of the first value if it is the only one and a sequence."""
        values = values[0] if len(values) == 1 else values
        return values[int(self.random.integers(len(values)))]

    def whole(self, low: int, high: int) -> int:
        """low ≤ n ≤ high."""
        return int(self.random.integers(low, high + 1))

    def real(self, low: float, high: float) -> float:
        """Spread evenly in the logarithm."""
        return float(np.exp(self.random.uniform(np.log(low), np.log(high))))

    def flag(self, chance: float = 0.5) -> bool:
        """True with this probability."""
        return bool(self.random.random() < chance)

    def some(self, chance: float, **values: Any) -> Config:
        """Each of the values with this probability."""
        return {name: value for name, value in values.items() if self.flag(chance)}

    def kinds(self, depth: int, *kinds: str) -> list[str]:
        """A kind for each layer."""
        return [self.one(kinds) for _ in range(depth)]


def family(name: str) -> Callable[[Callable[[Draw], Config]], Callable[[Draw], Config]]:
    """Register the function that draws configurations of a family."""

    def register(function: Callable[[Draw], Config]) -> Callable[[Draw], Config]:
        _FAMILIES[name] = function
        return function

    return register


def families() -> tuple[str, ...]:
    """Names of all families with a generator."""
    return tuple(_FAMILIES)


def random_config(name: str, seed: int) -> Config:
    """The configuration of this number; the same numbers give the same configuration."""
    draw = Draw(seed)
    config = _FAMILIES[name](draw) | {"model_type": name, "pad_token_id": 0}
    dropped = {field for field in DROPPED if draw.flag(0.12)}
    return {field: value for field, value in config.items() if field not in dropped}


def sizes(draw: Draw, head_dims: tuple[int, ...] = (2, 4, 6, 10, 16), own: bool = True) -> Config:
    """Fields of all decoders; own: head_dim is a field, else it is hidden_size / heads."""
    heads = draw.whole(1, 6)
    size = draw.one(head_dims)
    width = heads * (draw.whole(3, 15) if own else size)
    config = {
        "hidden_size": width,
        "intermediate_size": draw.whole(5, 60),
        "num_hidden_layers": draw.whole(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.one([n for n in range(1, heads + 1) if heads % n == 0]),
        "vocab_size": draw.whole(40, 130),
        "rms_norm_eps": draw.real(1e-7, 1e-2),
        "hidden_act": draw.one(ACTIVATIONS),
        "tie_word_embeddings": draw.flag(),
        "attention_bias": draw.flag(),
        "max_position_embeddings": draw.one(16, 24, 40, 64, 512),
        "attention_dropout": 0.0,
    }
    return config | ({"head_dim": size} if own else {})


def scaling(draw: Draw, kind: str, dims: int) -> Config:
    """Fields of a scaled rotation of `dims` dimensions, without its base."""
    original = draw.one(8, 20, 32, 64)
    if kind == "llama3":
        low = draw.real(0.5, 2.0)
        numbers = {"low_freq_factor": low, "high_freq_factor": low + draw.real(0.5, 4.0)}
        return numbers | {"factor": draw.real(1, 16), "original_max_position_embeddings": original}
    if kind == "yarn":
        values = {"factor": draw.real(1, 40), "original_max_position_embeddings": original}
        values |= draw.some(0.4, beta_fast=draw.real(4, 64), beta_slow=draw.real(0.2, 3))
        values |= draw.some(0.4, mscale=draw.real(0.3, 2), mscale_all_dim=draw.real(0.3, 2))
        return values | draw.some(0.3, attention_factor=draw.real(0.5, 2), truncate=draw.flag())
    if kind == "longrope":
        factors = {
            f"{name}_factor": [draw.real(0.8, 8) for _ in range(dims // 2)]
            for name in ("short", "long")
        }
        values = {"original_max_position_embeddings": original}
        some = draw.some(0.3, attention_factor=draw.real(0.5, 2), factor=draw.real(1, 8))
        return factors | values | some
    return {} if kind == "default" else {"factor": draw.real(1, 8)}


def rotation(
    draw: Draw, dims: int, kinds: tuple[str, ...] = SCALED, share: float | None = None
) -> Config:
    """Rotary fields in the old or the new form; share: partial_rotary_factor."""
    kind = draw.one([kind for kind in kinds if kind != "dynamic" or dims > 2])
    values, theta = scaling(draw, kind, dims), {"rope_theta": draw.real(50, 1e6)}
    part = {} if share is None else {"partial_rotary_factor": share}
    if kind == "default" and draw.flag():
        return theta | part
    values[draw.one(TYPE)] = kind
    if draw.flag():
        return {"rope_scaling": values} | theta | part
    values |= draw.one([theta, {}])
    top = {} if "rope_theta" in values else theta
    return top | (
        {"rope_parameters": values | part} if draw.flag() else {"rope_parameters": values} | part
    )


def window(draw: Draw) -> int | None:
    """A sliding window, or none."""
    return draw.one(None, 1, 3, 8, 20, 100)


@family("llama")
def _llama(draw: Draw) -> Config:
    config = sizes(draw)
    return config | rotation(draw, config["head_dim"]) | {"mlp_bias": draw.flag()}


@family("mistral")
def _mistral(draw: Draw) -> Config:
    config = sizes(draw) | {"attention_bias": False, "sliding_window": window(draw)}
    return config | rotation(draw, config["head_dim"])


@family("olmo2")
def _olmo2(draw: Draw) -> Config:
    config = sizes(draw, own=draw.flag())
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config | rotation(draw, size)


@family("phi3")
def _phi3(draw: Draw) -> Config:
    config = sizes(draw, head_dims=(4, 8, 12, 20), own=False) | {"attention_bias": False}
    config |= {"sliding_window": window(draw), "resid_pdrop": 0.0, "embd_pdrop": 0.1}
    size = config["hidden_size"] // config["num_attention_heads"]
    share = draw.one(None, 0.5, 1.0)
    fields = rotation(draw, int(size * (share or 1)), ("default", "longrope"), share)
    original = {"original_max_position_embeddings": draw.one(8, 20, 64)}
    return config | fields | (original if draw.flag(0.7) else {})


def _windows(draw: Draw, config: Config) -> Config:
    """Qwen3's fields of windows."""
    used = draw.flag(0.7)
    fields: Config = {"use_sliding_window": used, "sliding_window": window(draw)}
    fields["max_window_layers"] = draw.whole(0, 4)
    if draw.flag():
        kinds = (LOCAL, FULL) if used and fields["sliding_window"] else (FULL,)
        fields["layer_types"] = draw.kinds(config["num_hidden_layers"], *kinds)
    return fields


@family("qwen2")
def _qwen2(draw: Draw) -> Config:
    config = sizes(draw) | {"attention_bias": True}
    return config | rotation(draw, config["head_dim"]) | _windows(draw, config)


@family("qwen3")
def _qwen3(draw: Draw) -> Config:
    config = sizes(draw)
    return config | rotation(draw, config["head_dim"]) | _windows(draw, config)


def _experts(draw: Draw, norm: bool | None = None) -> Config:
    count = draw.whole(1, 7)
    fields = {"num_experts": count, "num_experts_per_tok": draw.whole(1, count)}
    fields |= {"moe_intermediate_size": draw.whole(3, 30), "norm_topk_prob": draw.flag()}
    return fields | draw.one([{}, {"router_aux_loss_coef": 0.1}])


def _sparse(draw: Draw, depth: int) -> Config:
    dense = [n for n in range(depth) if draw.flag(0.3)]
    return {"decoder_sparse_step": draw.whole(1, 3), "mlp_only_layers": dense}


@family("qwen3_moe")
def _qwen3_moe(draw: Draw) -> Config:
    config = sizes(draw)
    config |= rotation(draw, config["head_dim"]) | _experts(draw)
    fields = _windows(draw, config)
    fields.pop("layer_types", None)
    return config | fields | _sparse(draw, config["num_hidden_layers"])


@family("mixtral")
def _mixtral(draw: Draw) -> Config:
    config = sizes(draw) | {"attention_bias": False, "hidden_act": "silu"}
    count = draw.whole(1, 7)
    config |= {"num_local_experts": count, "num_experts_per_tok": draw.whole(1, count)}
    config |= {"sliding_window": window(draw), "router_jitter_noise": 0.0}
    return config | rotation(draw, config["head_dim"])


def _gemma(draw: Draw) -> Config:
    config = sizes(draw)
    config |= {"hidden_activation": config.pop("hidden_act")}
    config |= {"query_pre_attn_scalar": draw.whole(2, 40), "sliding_window": draw.whole(1, 30)}
    config |= {"final_logit_softcapping": draw.one(None, 2.0, 30.0)}
    return config | {"attn_logit_softcapping": draw.one(None, 1.0, 50.0)}


@family("gemma")
def _gemma1(draw: Draw) -> Config:
    config = sizes(draw) | {"hidden_act": draw.one(ACTIVATIONS)}
    return config | rotation(draw, config["head_dim"])


@family("gemma2")
def _gemma2(draw: Draw) -> Config:
    config = _gemma(draw)
    kinds = {"layer_types": draw.kinds(config["num_hidden_layers"], LOCAL, FULL)}
    return config | rotation(draw, config["head_dim"]) | draw.some(0.7, **kinds)


def _two_rotations(draw: Draw, dims: int, names: tuple[str, str]) -> Config:
    """A rotation for local layers and one for the others; names: fields of their bases."""
    bases = {names[0]: draw.real(50, 1e5), names[1]: draw.real(50, 1e6)}
    usable = tuple(kind for kind in SCALED if kind != "dynamic" or dims > 2)
    if draw.flag():
        return bases
    if draw.flag():
        kind = draw.one(usable)
        return bases | {"rope_scaling": scaling(draw, kind, dims) | {draw.one(TYPE): kind}}
    values = {}
    for name in (LOCAL, FULL):
        kind = draw.one(usable)
        fields = scaling(draw, kind, dims) | {draw.one(TYPE): kind}
        values[name] = fields | draw.some(0.5, rope_theta=draw.real(50, 1e5))
    return draw.one([bases, {}]) | {"rope_parameters": values}


@family("gemma3_text")
def _gemma3(draw: Draw) -> Config:
    config = _gemma(draw)
    kinds = draw.kinds(config["num_hidden_layers"], LOCAL, FULL)
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    config |= draw.one({"layer_types": kinds}, {draw.one(names): draw.whole(1, 4)})
    bases = ("rope_local_base_freq", "rope_theta")
    return config | _two_rotations(draw, config["head_dim"], bases)


def _latent(draw: Draw) -> Config:
    config = sizes(draw)
    del config["head_dim"]
    config |= {"num_key_value_heads": config["num_attention_heads"]}
    config |= {"qk_rope_head_dim": draw.one(2, 4, 10), "qk_nope_head_dim": draw.whole(1, 15)}
    config |= {"kv_lora_rank": draw.whole(3, 30), "q_lora_rank": draw.one(None, 7, 20)}
    config |= {"v_head_dim": draw.whole(1, 20)}
    return config


@family("deepseek_v3")
def _deepseek(draw: Draw) -> Config:
    config = _latent(draw) | {"hidden_act": "silu"}
    config |= rotation(draw, config["qk_rope_head_dim"])
    groups, size = draw.whole(1, 4), draw.whole(2, 4)
    best = draw.whole(1, groups)
    config |= {"n_routed_experts": groups * size, "n_group": groups, "topk_group": best}
    config |= {"num_experts_per_tok": draw.whole(1, size * best), "norm_topk_prob": draw.flag()}
    config |= {"moe_intermediate_size": draw.whole(3, 30), "n_shared_experts": draw.whole(1, 3)}
    config |= {"routed_scaling_factor": draw.real(0.3, 3), "rope_interleave": draw.flag()}
    return config | {"first_k_dense_replace": draw.whole(0, 3)}


@family("minicpm3")
def _minicpm3(draw: Draw) -> Config:
    config = _latent(draw) | {"mlp_bias": draw.flag()}
    width = draw.one([{"v_head_dim": None}, {}])
    config |= rotation(draw, config["qk_rope_head_dim"], (*SCALED, "longrope", "longrope")) | width
    config |= {"scale_emb": draw.one(1, 12, draw.real(0.5, 20))}
    config |= {"scale_depth": draw.one(None, 1.4, draw.real(0.3, 3))}
    return config | {"dim_model_base": draw.one(None, 256, draw.whole(3, 90))}


@family("gpt_oss")
def _gpt_oss(draw: Draw) -> Config:
    config = sizes(draw) | {"hidden_act": "silu", "sliding_window": draw.whole(1, 30)}
    count = draw.whole(1, 7)
    config |= {"num_local_experts": count, "num_experts_per_tok": draw.whole(1, count)}
    config |= {"swiglu_alpha": draw.real(0.5, 3), "swiglu_limit": draw.real(0.2, 9)}
    kinds = {"layer_types": draw.kinds(config["num_hidden_layers"], LOCAL, FULL)}
    return config | draw.some(0.6, **kinds) | rotation(draw, config["head_dim"])


def _hybrid(draw: Draw) -> Config:
    config = sizes(draw, head_dims=(4, 8, 12, 20)) | {"hidden_act": "silu"}
    share = draw.one(0.5, 1.0)
    config |= rotation(draw, int(config["head_dim"] * share), share=share)
    heads = draw.one(1, 2, 3, 5)
    config |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads * draw.whole(1, 3)}
    config |= {"linear_key_head_dim": draw.whole(1, 20), "linear_value_head_dim": draw.whole(1, 20)}
    config |= {"linear_conv_kernel_dim": draw.whole(1, 5)}
    kinds = draw.kinds(config["num_hidden_layers"], LINEAR, FULL)
    every = {"full_attention_interval": draw.whole(1, 4)}
    return config | draw.one([{"layer_types": kinds}, every, every])


@family("qwen3_next")
def _qwen3_next(draw: Draw) -> Config:
    config = _hybrid(draw) | _experts(draw)
    config |= {"shared_expert_intermediate_size": draw.whole(3, 30)}
    return config | _sparse(draw, config["num_hidden_layers"])


@family("qwen3_5_text")
def _qwen3_5(draw: Draw) -> Config:
    return _hybrid(draw)


@family("qwen3_5_moe_text")
def _qwen3_5_moe(draw: Draw) -> Config:
    config = _hybrid(draw) | _experts(draw) | {"norm_topk_prob": True}
    del config["intermediate_size"]
    return config | {"shared_expert_intermediate_size": draw.whole(3, 30)}


@family("modernbert")
def _modernbert(draw: Draw) -> Config:
    config = sizes(draw, own=False)
    config |= {
        "hidden_activation": config.pop("hidden_act"),
        "norm_eps": config.pop("rms_norm_eps"),
    }
    del config["num_key_value_heads"]
    config |= {"local_attention": draw.whole(2, 30), "mlp_bias": draw.flag()}
    config |= {"classifier_bias": draw.flag(), "classifier_activation": draw.one(ACTIVATIONS)}
    config |= {"decoder_bias": draw.flag(), "mlp_dropout": 0.1, "embedding_dropout": 0.1}
    kinds = {"layer_types": draw.kinds(config["num_hidden_layers"], LOCAL, FULL)}
    config |= draw.one([kinds, {"global_attn_every_n_layers": draw.whole(1, 4)}, {}])
    size = config["hidden_size"] // config["num_attention_heads"]
    return config | _two_rotations(draw, size, ("local_rope_theta", "global_rope_theta"))
