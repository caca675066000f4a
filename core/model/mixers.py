"""Mixers: the parts of a layer that mix tokens (attention, delta net, latent attention).

The gated delta net (arXiv 2412.06464, see core.spec.layers): convolution and recurrence need whole
rows, so on a mesh the layout changes before them from a split sequence to split heads, and back
after them: one all-to-all each way, nothing on one device. Decay, write strength and the L2
normalisation of queries and keys are computed in fp32.

Multi-head latent attention (DeepSeek-V3, see core.spec.layers): with several queries per row, keys
and values of all heads are projected up from the latents, then attention is as usual. With one
query per row and a cache, the up-projection is absorbed into the query and the output, so that
attention reads the latents themselves, as one key-value head of kv_rank + rope.dim dimensions
(arXiv 2405.04434 section 2.1.3); otherwise every decoding step would project all cached tokens
again. The parts of queries and keys with and without rotary embedding are named q_rope, k_rope and
q_nope, k_nope as in the paper's code.
"""

from collections.abc import Callable, Mapping

import numpy as np

from sabia.core.model.block import HEADS, KV_HEADS, WHOLE_KV_HEADS, Block
from sabia.core.ops.base import Angles, Array, Ops
from sabia.core.spec.layers import Attention, GatedDeltaNet, LatentAttention

WHOLE = ("batch", None, "split_heads", "head_dim")
UNIT_EPS = 1e-6


def gated_delta_net(part: GatedDeltaNet, block: Block, y: Array) -> Array:
    """The delta net of y[B, T, D]; the state is zero at the start of each packed document, or that
    of the cache."""
    ops, segments, cache = block.ops, block.context.segments, block.context.cache
    if segments is not None:
        segments = ops.whole_segments(segments)
    names = ("delta.q", "delta.k", "delta.v", "delta.decay", "delta.beta", "delta.z")
    q, k, v, decay, beta, z = block.products(y, *names)
    q = _convolved(block, "q", q, part.key_dim, segments)  # [B, T, K, N]
    k = _convolved(block, "k", k, part.key_dim, segments)  # [B, T, K, N]
    v = _convolved(block, "v", v, part.value_dim, segments)  # [B, T, H, V]
    # q̂ = q / (‖q‖ sqrt N), k̂ = k / ‖k‖
    q, k = _scaled_to_length(q, part.key_dim**-0.5, ops), _scaled_to_length(k, 1.0, ops)
    log_decay = _log_decay(block, decay)
    beta = ops.sigmoid(ops.cast(beta, "float32"))
    log_decay, beta = (ops.relayout(x, HEADS[:3], WHOLE[:3]) for x in (log_decay, beta))
    if cache is None:
        out, _ = ops.delta_rule(q, k, v, log_decay, beta, segments)  # [B, T, H, V]
    else:
        layer = cache.layers[block.index]
        if cache.lengths is not None:  # padding leaves the state as it is
            real = np.arange(y.shape[1]) < cache.lengths[:, None]
            mask = ops.cast(ops.integers(real, y), "float32")[..., None]
            log_decay, beta = log_decay * mask, beta * mask
        inputs = q, k, v, log_decay, beta
        out, layer["state"] = ops.delta_rule(*inputs, state=layer["state"])
    out = block.norm("delta.norm", ops.shard(ops.relayout(out, WHOLE, HEADS), HEADS))
    # output gate: RMSNorm(out) · silu(z)
    gate = ops.silu(_per_head(ops, z, part.value_dim))
    return block.project("delta.o", (out * gate).reshape(*y.shape[:2], -1))


def _per_head(ops: Ops, x: Array, size: int) -> Array:
    return ops.shard(x.reshape(*x.shape[:2], -1, size), HEADS)


def _convolved(block: Block, name: str, x: Array, size: int, segments: Array | None) -> Array:
    """silu(causal convolution(projection x)), whole rows of split heads [B, T, H, N]."""
    ops = block.ops
    x = ops.relayout(_per_head(ops, x, size), HEADS, WHOLE)
    taps = block.weights[f"delta.conv_{name}"]
    taps = taps.reshape(-1, size, taps.shape[-1])  # [H, N, taps]
    taps = ops.relayout(taps, ("heads", "head_dim", None), ("split_heads", "head_dim", None))
    flat = x.reshape(*x.shape[:2], -1)  # [B, T, H·N]
    before = 0  # inputs of earlier tokens
    if (cache := block.context.cache) is not None:
        layer, before = cache.layers[block.index], taps.shape[-1] - 1
        flat = ops.concat((layer[name], flat), 1)
        if (ends := cache.lengths) is None:
            layer[name] = flat[:, x.shape[1] :]
        else:
            layer[name] = flat[np.arange(len(flat))[:, None], ends[:, None] + np.arange(before)]
    flat = ops.causal_conv(flat, taps.reshape(-1, taps.shape[-1]), segments)
    return ops.silu(flat[:, before:]).reshape(x.shape)


def _scaled_to_length(x: Array, length: float, ops: Ops) -> Array:
    """x scaled to `length` along its last axis, fp32."""
    size = x.shape[-1]
    wide = ops.cast(x, "float32")
    # x / rms(x) has length sqrt(size); the weight scales that to `length`
    return ops.rms_norm(wide, ops.full((size,), length * size**-0.5, wide), UNIT_EPS / size)


def _log_decay(block: Block, decay: Array) -> Array:
    ops, weights = block.ops, block.weights
    rate, bias = (ops.cast(weights[f"delta.{name}"], "float32") for name in ("a_log", "dt_bias"))
    # log α = -exp(a_log) · softplus(decay(y) + dt_bias), [B, T, H]
    step = ops.softplus(ops.cast(decay, "float32") + bias)
    return step * -ops.exp(rate)


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


_SHARED = ("batch", "sequence", None, None)
_WHOLE_SHARED = ("batch", None, None, None)
_WHOLE_HEADS = ("batch", None, "heads", "head_dim")


def latent_attention(part: LatentAttention, block: Block, y: Array) -> Array:
    """Multi-head latent attention of y[B, T, D], for the layer's queries."""
    ops, context = block.ops, block.context
    angles, of_queries = context.angles[part.rope], context.query_angles[part.rope]
    chosen = context.chosen(y)
    batch, length = chosen.shape[:2]
    q = ops.shard(queries(part, block, chosen).reshape(batch, length, -1, part.key_dim), HEADS)
    # [B, T, H, nope_dim], [B, T, H, rope.dim]
    q_nope, q_rope = q[..., : part.nope_dim], q[..., part.nope_dim :]
    q_rope = _rotated(part, q_rope, of_queries, ops)
    kv_down = block.project("attn.kv_down", y)[:, :, None, :]  # [B, T, 1, kv_rank + rope.dim]
    # the latent and the rotated key are all that the cache stores
    latent = _normed(part, block, "attn.kv_norm", kv_down[..., : part.kv_rank])
    k_rope = _rotated(part, kv_down[..., part.kv_rank :], angles, ops)
    if context.cache is None:
        latent, k_rope = (ops.relayout(x, _SHARED, _WHOLE_SHARED) for x in (latent, k_rope))
    else:
        latent, k_rope = context.cache.extend(
            block.index, {"latent": latent, "rotated": k_rope}, context.slots, context.reads, ops
        )
    attend = _absorbed if context.cache is not None and length == 1 else _multi_head
    out = attend(part, block, q_nope, q_rope, latent, k_rope)
    return block.project("attn.o", ops.shard(out, HEADS).reshape(batch, length, -1))


def queries(part: LatentAttention, block: Block, y: Array) -> Array:
    """[B, T, H·(nope_dim + rope.dim)], through the query latent if the model has one."""
    if part.q_rank is None:
        return block.project("attn.q", y)
    latent = _normed(part, block, "attn.q_norm", block.project("attn.q_down", y))
    return block.project("attn.q_up", latent)


def _normed(part: LatentAttention, block: Block, name: str, x: Array) -> Array:
    return block.ops.rms_norm(x, block.weights[name], part.latent_eps)


def _rotated(part: LatentAttention, x: Array, angles: Angles, ops: Ops) -> Array:
    """x with rotary embedding; interleaved pairs (2i, 2i+1) are first reordered into halves."""
    if part.interleaved:
        x = ops.concat((x[..., 0::2], x[..., 1::2]), -1)
    return rotated(x, angles, ops)


def _multi_head(
    part: LatentAttention, block: Block, q_nope: Array, q_rope: Array, latent: Array, key: Array
) -> Array:
    """Attention over keys and values of all heads.

    q_nope, q_rope[B, T, H, ·]: the two parts of a query; latent, key[B, S, 1, ·].
    """
    ops = block.ops
    keys_values = block.project("attn.kv_up", latent[:, :, 0])  # [B, S, H·(nope_dim + value_dim)]
    keys_values = keys_values.reshape(*latent.shape[:2], -1, part.nope_dim + part.value_dim)
    keys_values, key = (block.context.of_keys(x) for x in (keys_values, key))
    k_nope, values = keys_values[..., : part.nope_dim], keys_values[..., part.nope_dim :]
    k_rope = key + ops.full((part.heads, 1), 0.0, key)  # the same key for every head
    k_rope = ops.relayout(k_rope, _WHOLE_SHARED, _WHOLE_HEADS)
    q, k = ops.concat((q_nope, q_rope), -1), ops.concat((k_nope, k_rope), -1)
    mask = block.context.query_masks[part.window]
    return ops.attention(q, k, values, mask, scale=part.scale)


def _absorbed(
    part: LatentAttention, block: Block, q_nope: Array, q_rope: Array, latent: Array, key: Array
) -> Array:
    """The same for one query per row, with the latents as keys and values of a single head."""
    ops = block.ops
    # [H, nope_dim + value_dim, kv_rank]
    kv_up = block.weights["attn.kv_up"].reshape(-1, part.nope_dim + part.value_dim, part.kv_rank)
    to_key, to_value = kv_up[:, : part.nope_dim], kv_up[:, part.nope_dim :]
    # q · (W_k c) = (W_kᵀ q) · c: project the query instead of the cached latents
    q = (q_nope[:, 0].swapaxes(0, 1) @ to_key).swapaxes(0, 1)[:, None]  # [B, 1, H, kv_rank]
    q, k = ops.concat((q, q_rope), -1), ops.concat((latent, key), -1)
    mask = block.context.masks[part.window]
    out = ops.attention(q, k, k, mask, scale=part.scale)[..., : part.kv_rank]
    # Σ a_j W_v c_j = W_v Σ a_j c_j, [B, 1, H, value_dim]
    return (out[:, 0].swapaxes(0, 1) @ to_value.swapaxes(1, 2)).swapaxes(0, 1)[:, None]


MIXERS: Mapping[type, Callable[..., Array]] = {
    Attention: attention, GatedDeltaNet: gated_delta_net, LatentAttention: latent_attention,
}  # fmt: skip
