"""What Qwen3-Next and Qwen3.5 share: three gated delta nets to one gated attention.

Attention rotates a part of each head and multiplies its result by a sigmoid gate, stored with the
queries. Norm weights are stored minus one, except those of the delta nets. MoE layers have a gated
shared expert. Layers for multi-token prediction (`mtp.`) are kept, not trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sabia.core.spec.families import llama, qwen3_moe
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import (
    Attention,
    Experts,
    FeedForward,
    GatedDeltaNet,
    Layer,
    Mixer,
    Norms,
)
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FileTemplate, FusedPart, fused_parts

KINDS = ("linear_attention", "full_attention")
_ATTENTION, DELTA, _SHARED = (
    llama.LAYER + name for name in ("self_attn.", "linear_attn.", "mlp.shared_expert")
)
NAMES = qwen3_moe.NAMES | {"mlp.shared_gate": _SHARED + "_gate.weight"}
NAMES |= {f"mlp.shared.{p}": f"{_SHARED}.{p}_proj.weight" for p in ("gate", "up", "down")}
NAMES |= {"delta.o": DELTA + "out_proj.weight", "delta.norm": DELTA + "norm.weight"}
NAMES |= {"delta.a_log": DELTA + "A_log", "delta.dt_bias": DELTA + "dt_bias"}


def mixers(fields: Fields) -> tuple[GatedDeltaNet, Attention]:
    """Read the fields of both kinds of mixer."""
    fields.expect("hidden_act", ("silu",), "silu")  # the delta nets use it too
    sizes = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128}
    sizes |= {"value_head_dim": 128, "conv_kernel_dim": 4}
    delta = GatedDeltaNet(*(fields.size(f"linear_{name}", n) for name, n in sizes.items()))
    fields.defaults(partial_rotary_factor=0.25, max_position_embeddings=32768)
    fields.expect("attn_output_gate", (True,), True)
    full = llama.attention(fields, head_dim=256, partial_rotary=True)
    return delta, replace(full, qk_norm=True, norm_offset=1.0, output_gate=True)


def experts(fields: Fields, count: int, chosen: int) -> Experts:
    """Read the fields of the MoE layers; the numbers are the family's defaults."""
    routed = qwen3_moe.experts(fields, count, chosen, 512, normalised=True)
    shared = fields.size("shared_expert_intermediate_size", 512)
    return replace(routed, shared=shared, shared_gate=True)


def fused(delta: GatedDeltaNet, full: Attention, width: int) -> dict[str, FusedPart]:
    """Tensors that Qwen3-Next and Qwen3.5 store fused: queries with gates, convolutions."""
    names: dict[str, FusedPart] = {}
    for end, last in (("", ("weight", (width,))), ("_bias", ("bias", ()))):
        file, view = f"{_ATTENTION}q_proj.{last[0]}", (full.heads, 2 * full.head_dim, *last[1])
        sizes = {f"attn.q{end}": full.head_dim, f"attn.gate{end}": full.head_dim}
        names |= fused_parts(file, (view[0] * view[1], *last[1]), view, 1, sizes)
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    sizes = {"delta.conv_q": keys, "delta.conv_k": keys, "delta.conv_v": values}
    view = (2 * keys + values, delta.taps)
    return names | fused_parts(DELTA + "conv1d.weight", (view[0], 1, view[1]), view, 0, sizes)


def decoder(
    fields: Fields,
    delta: GatedDeltaNet,
    full: Attention,
    feeds: Sequence[FeedForward],
    names: Mapping[str, FileTemplate],
) -> ModelSpec:
    """Read the kinds of the layers and the fields around them; one of `feeds` a layer."""
    every = fields.size("full_attention_interval", 4)
    usual = [KINDS[(index + 1) % every == 0] for index in range(len(feeds))]
    kinds = fields.each("layer_types", len(feeds), KINDS, usual)
    mixers: dict[str, Mixer] = {KINDS[0]: delta, KINDS[1]: full}
    pairs = zip(kinds, feeds, strict=True)
    layers = tuple(Layer(mixers[kind], feed, Norms(offset=1.0)) for kind, feed in pairs)
    spec = llama.decoder(fields, layers, names)
    return replace(spec, norm_offset=1.0, kept=(r"mtp\..*",))
