"""Attention in JAX: masks, and the choice between JAX's attention and sabia.kernels.

`jax.nn.dot_product_attention` reads grouped keys without a copy; caps, sinks and values of another
size than keys use plain expressions. On accelerators, and where SABIA_KERNELS names an
implementation, rows without a cache use sabia.kernels.attention, whose masks are one interval of
keys per query; XLA cannot partition those kernels, so a mesh uses shard_map
(core.parallel.ops_jax).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from sabia.core.model.kernel_choice import kernels_of, raises_missing_backend, unavailable
from sabia.kernels.attention.interface import attention as attention_kernel
from sabia.kernels.attention.interface import attention_mask as kernel_mask

Array = jax.Array
KERNELS = kernels_of("jax")
_kernel = raises_missing_backend(attention_kernel)


@dataclass(frozen=True)
class AttentionMask:
    """`causal`: the triangle j ≤ t. Otherwise `allowed`, boolean [B or 1, 1, T, S]; None: all."""

    causal: bool
    allowed: Array | None = None


def attention_mask(
    like: Array,
    keys: int,
    *,
    segments: Array | None = None,
    slots: Array | None = None,
    start: int = 0,
    window: int | None = None,
    causal: bool = True,
) -> Any:
    """See Ops.attention_mask: an AttentionMask, or the kernels' own."""
    length = like.shape[1]
    if KERNELS.use("attention", jax.default_backend()):
        if slots is None:
            settings: Any = {
                "segments": segments,
                "start": start,
                "window": window,
                "causal": causal,
            }
            return kernel_mask(like, length, keys, **settings)
        if KERNELS.requested["attention"] == "pallas":
            raise unavailable("attention: pallas has no cached decoding (expected whole rows)")
    free = segments is None and slots is None and (window is None or window >= keys)
    if free and length == keys:
        return AttentionMask(causal)
    queries = jnp.arange(start, start + length)[None] if slots is None else slots  # [B or 1, T]
    distance = queries[:, :, None] - jnp.arange(keys)  # [B or 1, T, S], t - j
    allowed = distance >= 0 if causal else jnp.ones_like(distance, dtype=bool)
    if window is not None:
        allowed &= jnp.abs(distance) < window
    if segments is not None:
        allowed &= segments[:, start : start + length, None] == segments[:, None, :]
    return AttentionMask(False, allowed[:, None])


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Any,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """See Ops.attention."""
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    if not isinstance(mask, AttentionMask):
        options: Any = {"scale": scale, "softcap": softcap, "sinks": sinks}
        options["implementation"] = KERNELS.requested["attention"]
        return _kernel(q, k, v, mask, **options)
    if softcap is not None or sinks is not None or v.shape[-1] != q.shape[-1]:
        return _plain_attention(q, k, v, mask, scale, softcap, sinks)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask.allowed, is_causal=mask.causal, scale=scale
    )


def _plain_attention(
    q: Array, k: Array, v: Array, mask: Any, scale: float, cap: float | None, sinks: Array | None
) -> Array:
    """Attention with soft caps, sinks, or values of another size than keys."""
    batch, length, heads, size = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, size)  # [B, T, K, H/K, N]
    # [B, K, H/K, T, S], fp32
    scores = jnp.einsum("btkgn,bskn->bkgts", q, k).astype(jnp.float32) * scale
    allowed: Any = jnp.tri(length, dtype=bool) if mask.causal else True
    if mask.allowed is not None:
        allowed = mask.allowed[:, None]
    scores = jnp.where(allowed, scores if cap is None else jnp.tanh(scores / cap) * cap, -jnp.inf)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(1, groups, -1, 1, 1)
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = jnp.concatenate((scores, column), -1)
    # the sink is in the denominator only: its own column is dropped
    weights = jax.nn.softmax(scores, -1)[..., : k.shape[1]].astype(v.dtype)
    out = jnp.einsum("bkgts,bskn->btkgn", weights, v)  # [B, T, K, H/K, P]
    return out.reshape(batch, length, heads, v.shape[-1])
