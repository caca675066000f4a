"""GPT-OSS (arXiv 2508.10925): attention with sinks, windows in every other layer, clamped experts.

In the files the gate and up columns of each expert alternate in one [in, out] tensor, in bf16 or as
MXFP4 blocks (core.numerics.published). The softmax is over the scores of the selected experts.
"""

from dataclasses import replace

from sabia.core.spec.families import llama
from sabia.core.spec.families.qwen3 import KINDS
from sabia.core.spec.families.qwen3_moe import read_router_losses
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import ClampedSwiglu, Experts, Layer, Router
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FusedPart

_MLP = llama.LAYER + "mlp."
_MATRICES = ("gate", "up", "down")
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
_ROPE |= {"truncate": False}
NAMES = llama.NAMES | {
    "attn.sinks": llama.LAYER + "self_attn.sinks",
    "mlp.router": _MLP + "router.weight",
    "mlp.router_bias": _MLP + "router.bias",
    "mlp.experts.down_bias": _MLP + "experts.down_proj_bias",
}


def fused(count: int, width: int, inner: int) -> dict[str, FusedPart]:
    """The stacked [expert, out, in] matrices in the files."""
    both = (count, width, 2 * inner)
    down = (count, inner, width)
    whole = tuple((0, size, 1) for size in down)
    parts = {
        "mlp.experts.down": FusedPart(_MLP + "experts.down_proj", down, down, whole, (0, 2, 1))
    }
    for offset, name in enumerate(("gate", "up")):
        columns = (offset, 2 * inner, 2)
        cut = ((0, count, 1), (0, width, 1), columns)
        file = _MLP + "experts.gate_up_proj"
        parts[f"mlp.experts.{name}"] = FusedPart(file, both, both, cut, (0, 2, 1))
        shape = (count, 2 * inner)
        bias = FusedPart(file + "_bias", shape, shape, ((0, count, 1), columns), (0, 1))
        parts[f"mlp.experts.{name}_bias"] = bias
    return parts


def separate() -> dict[str, str]:
    """Names of experts that are stored one by one, as in files of quantized models."""
    names = {f"mlp.experts.{name}": f"experts.{{expert}}.{name}_proj" for name in _MATRICES}
    return {
        ours + end: f"{_MLP}{file}.{last}"
        for ours, file in names.items()
        for end, last in (("", "weight"), ("_bias", "bias"))
    }


def read(fields: Fields) -> ModelSpec:
    """The model of a `gpt_oss` configuration."""
    fields.defaults(attention_bias=True, sliding_window=128, num_key_value_heads=8)
    fields.defaults(max_position_embeddings=131072)
    depth = fields.depth
    mixer = replace(llama.attention(fields, head_dim=64, theta=150000.0, scaling=_ROPE), sinks=True)
    fields.expect("hidden_act", ("silu",), "silu")
    count = fields.size("num_local_experts", 128, alias="num_experts")
    chosen = fields.size("num_experts_per_tok", 4)
    fields.expect("experts_per_token", (chosen,), chosen)  # repeats it
    inner = fields.size("intermediate_size")
    activation = ClampedSwiglu(
        fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
    )
    scores = Router(count, chosen, scores="softmax_top_k", bias=True)
    experts = Experts(scores, inner, activation, bias=True)
    read_router_losses(fields)
    fields.take("initial_context_length", int, None)  # repeated in the rotary fields
    usual = [KINDS[(index + 1) % 2] for index in range(depth)]
    window = fields.size("sliding_window", None)
    layers = tuple(
        Layer(replace(mixer, window=None if kind == KINDS[0] else window), experts)
        for kind in fields.each("layer_types", depth, KINDS, usual)
    )
    names = NAMES | fused(count, fields.hidden, inner)
    return replace(llama.decoder(fields, layers, names, eps=1e-5), other_names=separate())
