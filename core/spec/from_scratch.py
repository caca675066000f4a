"""Configurations of models trained from scratch, from a few numbers.

`parse_shape("d=128,layers=4")` reads the option --shape; `new_config` sets the other fields with
the usual proportions (heads of 64, or 32 below a width of 512; SwiGLU of 8/3 width rounded up to
a multiple of 32, arXiv 2002.05202; initial values of standard deviation 1/sqrt(d), LeCun et al.
1998 section 4.6: the customary 0.02 is right for a width of 2500 and too small for others) and
returns a Hugging Face config.json as a dictionary.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.from_scratch_moe import MOE_FAMILIES, MoeShape
from sabia.core.spec.from_scratch_variants import VARIANTS
from sabia.core.units import parse_count, parse_length

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
) -> dict[str, Any]:
    """The config.json of a new model; raises UsageError if the numbers do not fit.

    moe: experts, chosen, expert_ffn, shared of core.spec.from_scratch_moe, for MoE families.
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
