"""Qwen3-Next (Qwen team, 2025): the hybrid with MoE layers and fused delta-net projections."""

from sabia.core.spec.families import llama, qwen3_hybrid, qwen3_moe
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import GatedDeltaNet
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FusedPart, fused_parts


def projections(delta: GatedDeltaNet, width: int) -> dict[str, FusedPart]:
    """The delta nets' projections in the files: for each key head q, k, v, z, and beta, decay."""
    per_key = delta.value_heads // delta.key_heads
    inner = per_key * delta.value_dim
    sizes = {"delta.q": delta.key_dim, "delta.k": delta.key_dim, "delta.v": inner}
    names: dict[str, FusedPart] = {}
    for file, parts in (
        ("in_proj_qkvz.weight", sizes | {"delta.z": inner}),
        ("in_proj_ba.weight", {"delta.beta": per_key, "delta.decay": per_key}),
    ):
        view = (delta.key_heads, sum(parts.values()), width)
        names |= fused_parts(qwen3_hybrid.DELTA + file, (view[0] * view[1], width), view, 1, parts)
    return names


def read(fields: Fields) -> ModelSpec:
    """The model of a `qwen3_next` configuration."""
    fields.defaults(num_key_value_heads=2)
    delta, full = qwen3_hybrid.mixers(fields)
    fields.expect("mlp_bias", (False,), False)
    dense, moe = llama.mlp(fields), qwen3_hybrid.experts(fields, 512, 10)
    feeds = [moe if routed else dense for routed in qwen3_moe.sparse(fields)]
    width = fields.hidden
    names = qwen3_hybrid.NAMES | qwen3_hybrid.fused(delta, full, width) | projections(delta, width)
    return qwen3_hybrid.decoder(fields, delta, full, feeds, names)
