"""Mixers: the parts of a layer that mix tokens (attention, delta net), by class of settings."""

from collections.abc import Callable, Mapping

from sabia.core.model.block import HEADS, KV_HEADS, WHOLE_KV_HEADS, Block
from sabia.core.model.delta import gated_delta_net
from sabia.core.ops.base import Angles, Array, Ops
from sabia.core.spec.delta import GatedDeltaNet
from sabia.core.spec.layers import Attention


def rotated(x: Array, angles: Angles | None, ops: Ops) -> Array:
    """x[B, T, H, N] with rotary embedding of its first dimensions, as many as angles have."""
    if angles is None:
        return x
    dims = angles[0].shape[-1]
    if dims == x.shape[-1]:
        return ops.rope(x, angles)
    return ops.concat((ops.rope(x[..., :dims], angles), x[..., dims:]), -1)


def normed(part: Attention, block: Block, name: str, x: Array) -> Array:
    """Queries or keys x[B, T, H, N]; normed per head or over all heads if the part has QK-norm."""
    if part.qk_norm:
        return block.norm(name, x, part.norm_offset)
    if not part.qk_norm_whole:
        return x
    ops, axis = block.ops, "heads" if name == "attn.q_norm" else "kv_heads"
    split, whole = ("batch", "sequence", axis), ("batch", "sequence", None)
    flat = ops.relayout(x.reshape(*x.shape[:2], -1), split, whole)  # [B, T, H·N]
    weight = ops.relayout(block.weights[name], (axis,), (None,))
    flat = ops.rms_norm(flat, weight, block.context.eps, part.norm_offset)
    return ops.relayout(flat, whole, split).reshape(x.shape)


def attention(part: Attention, block: Block, y: Array) -> Array:
    """Grouped-query softmax attention of y[B, T, D], for the layer's queries."""
    ops, context = block.ops, block.context
    names, gated = ("attn.q", "attn.k", "attn.v"), ("attn.gate",) if part.output_gate else ()
    if context.queries is None:  # all by one input
        *qkv, gate = (*block.products(y, *names, *gated), None)[:4]
    else:
        q, gate = (*block.products(context.chosen(y), "attn.q", *gated), None)[:2]
        qkv = [q, *block.products(y, *names[1:])]
    # [B, T, H, N], [B, T, K, N] twice
    q, k, v = (x.reshape(*x.shape[:2], -1, part.head_dim) for x in qkv)
    q, k = normed(part, block, "attn.q_norm", q), normed(part, block, "attn.k_norm", k)
    angles = of_queries = None
    if part.rope is not None:
        angles, of_queries = context.angles[part.rope], context.query_angles[part.rope]
    q = rotated(ops.shard(q, HEADS), of_queries, ops)
    k, v = rotated(ops.shard(k, KV_HEADS), angles, ops), ops.shard(v, KV_HEADS)
    k, v = context.of_keys(k), context.of_keys(v)
    if context.cache is not None:
        new = {"keys": k, "values": v}
        k, v = context.cache.extend(block.index, new, context.slots, context.reads, ops)
    else:
        # context parallelism: queries stay split, keys and values are whole rows
        k, v = (ops.relayout(x, KV_HEADS, WHOLE_KV_HEADS) for x in (k, v))
    mask = context.query_masks[part.window]
    sinks = block.weights["attn.sinks"] if part.sinks else None
    # [B, T, H, N]
    out = ops.attention(q, k, v, mask, scale=part.scale, softcap=part.softcap, sinks=sinks)
    out = ops.shard(out, HEADS).reshape(*out.shape[:2], -1)  # [B, T, H·N]
    if gate is not None:
        out = out * ops.sigmoid(gate)
    return block.project("attn.o", out)


MIXERS: Mapping[type, Callable[..., Array]] = {Attention: attention, GatedDeltaNet: gated_delta_net}
