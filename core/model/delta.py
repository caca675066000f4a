"""The gated delta net as a part of a layer (arXiv 2412.06464; settings: core/spec/delta.py).

Convolution and recurrence need whole rows, so on a mesh the layout changes before them from a split
sequence to split heads, and back after them: one all-to-all each way, nothing on one device. Decay,
write strength and the L2 normalisation of queries and keys are computed in fp32.
"""

import numpy as np

from sabia.core.model.block import HEADS, Block
from sabia.core.ops.base import Array, Ops
from sabia.core.spec.delta import GatedDeltaNet

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
        out = ops.delta_rule(q, k, v, log_decay, beta, segments)  # [B, T, H, V]
    else:
        layer = cache.layers[block.index]
        if cache.lengths is not None:  # padding leaves the state as it is
            real = np.arange(y.shape[1]) < cache.lengths[:, None]
            mask = ops.cast(ops.integers(real, y), "float32")[..., None]
            log_decay, beta = log_decay * mask, beta * mask
        out, layer["state"] = ops.delta_rule_from(q, k, v, log_decay, beta, layer["state"])
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
