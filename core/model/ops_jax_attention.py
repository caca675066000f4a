"""Attention in JAX: what a query may see, and who computes it.

`jax.nn.dot_product_attention` reads grouped keys without a copy; caps, sinks and values of another
size than keys are plain expressions. On accelerators, and where SABIA_KERNELS names an
implementation, rows without a cache go to sabia.kernels.attention, whose masks are one interval a
query; the compiler cannot partition those kernels, so a mesh maps them (core.parallel.ops_jax).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from sabia.core.model.kernel_choice import kernels_of, obeyed, refusal
from sabia.kernels.attention.interface import attention as attention_kernel
from sabia.kernels.attention.interface import attention_mask as kernel_mask

Array = jax.Array
KERNELS = kernels_of("jax")
_kernel = obeyed(attention_kernel)


@dataclass(frozen=True)
class AttentionMask:
    """`causal`: the plain triangle. Otherwise `allowed`, boolean [B or 1, 1, T, S]; None: all."""

    causal: bool
    allowed: Array | None = None


def attention_mask(
    like: Array,
    keys: int,
    *,
    segments: Array | None = None,
    slots: Array | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Any:
    """See Ops.attention_mask: an AttentionMask, or the kernels' own."""
    length = like.shape[1]
    if KERNELS.serve("attention", jax.default_backend()):
        if slots is None:
            settings: Any = {"segments": segments, "window": window, "causal": causal}
            return kernel_mask(like, length, keys, **settings)
        if KERNELS.asked["attention"] == "pallas":
            raise refusal("attention: pallas cannot serve: keys lie in slots (expected whole rows)")
    if segments is None and slots is None and (window is None or window >= length):
        return AttentionMask(causal)
    queries = jnp.arange(length)[None] if slots is None else slots
    distance = queries[:, :, None] - jnp.arange(keys)
    allowed = distance >= 0 if causal else jnp.ones_like(distance, dtype=bool)
    if window is not None:
        allowed &= jnp.abs(distance) < window
    if segments is not None:
        allowed &= segments[:, :, None] == segments[:, None, :]
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
        named = KERNELS.asked["attention"]
        options = {"scale": scale, "softcap": softcap, "sinks": sinks, "implementation": named}
        return _kernel(q, k, v, mask, **options)
    if softcap is not None or sinks is not None or v.shape[-1] != q.shape[-1]:
        return _plain_attention(q, k, v, mask, scale, softcap, sinks)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask.allowed, is_causal=mask.causal, scale=scale
    )


def _plain_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: AttentionMask,
    scale: float,
    cap: float | None,
    sinks: Array | None,
) -> Array:
    """What `dot_product_attention` cannot: caps, sinks, values of another size than keys."""
    batch, length, heads, size = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, size)
    scores = jnp.einsum("btkgn,bskn->bkgts", q, k).astype(jnp.float32) * scale
    allowed: Any = jnp.tri(length, dtype=bool) if mask.causal else True
    if mask.allowed is not None:
        allowed = mask.allowed[:, None]
    scores = jnp.where(allowed, scores if cap is None else jnp.tanh(scores / cap) * cap, -jnp.inf)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(1, groups, -1, 1, 1)
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = jnp.concatenate((scores, column), -1)
    weights = jax.nn.softmax(scores, -1)[..., : k.shape[1]].astype(v.dtype)
    out = jnp.einsum("bkgts,bskn->btkgn", weights, v)
    return out.reshape(batch, length, heads, v.shape[-1])
