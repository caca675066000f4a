"""Attention over packed documents in JAX: the mask, the reference, and the kernels of JAX.

TPU: splash attention (jax.experimental.pallas.ops.tpu.splash_attention) takes documents, window,
cap, sinks, grouped heads and unequal head sizes; its mask is built while tracing, so lengths must
be multiples of 128 and the start a Python number. CUDA: `dot_product_attention(implementation=
"cudnn")` is FlashAttention of cuDNN, half precision, and never forms the triangle; its window is
exact for causal masks. CPU: the same function in XLA, which reads grouped keys without a copy.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from sabia.kernels.runtime.dispatch import (
    Choice,
    Option,
    choose,
    jax_platform,
    pallas_interpret,
    pallas_obstacle,
    reference_option,
)

Array = jax.Array
SPLASH_BLOCK = 128
_HALF = (jnp.bfloat16, jnp.float16)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "until", "runs", "start", "last"],
    meta_fields=["offset", "window"],
)
@dataclass(frozen=True)
class Mask:
    """first[B or 1, T]: the least visible key of each query, S for padding (int32).

    until[B or 1, S]: one past the last position that sees each key, 0 for padding (int32).
    runs[B, S]: number of each document in its row, 0 for padding; None: one document a row.
    start: position of the first query (a scalar array); offset: the same where it is known while
    tracing; window: as given, None where it hides nothing. last[B or 1, T]: the last visible key of
    each query, -1 for padding; None: its own position.
    """

    first: Array
    until: Array
    runs: Array | None
    start: Array
    offset: int | None
    window: int | None
    last: Array | None = None

    @property
    def queries(self) -> int:
        """T."""
        return self.first.shape[-1]

    @property
    def keys(self) -> int:
        """S."""
        return self.until.shape[-1]

    @property
    def seen(self) -> Array:
        """bool[B or 1, T, 1, 1]: queries that are not padding."""
        return (self.first < self.keys)[..., None, None]

    @property
    def square(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return self.offset == 0 and self.first.shape[-1] == self.keys

    def dense(self) -> Array:
        """bool[B or 1, 1, T, S]: which keys each query sees."""
        keys = jnp.arange(self.keys)
        positions = self.start + jnp.arange(self.first.shape[-1])
        last = positions if self.last is None else self.last
        allowed = (keys >= self.first[..., None]) & (keys <= last[..., None])
        return allowed[:, None]


def attention_mask(
    like: Array, queries: int, keys: int, segments: Array | None, start: jax.Array,
    window: int | None, causal: bool,
) -> Mask:  # fmt: skip
    """See attention.attention_mask."""
    window = window if window is not None and window < keys else None
    at = jnp.arange(keys, dtype=jnp.int32)[None]  # [1, S]
    # [1, S] each: a key's document is [begin, end)
    begin, end, runs = jnp.zeros_like(at), jnp.full_like(at, keys), None
    if segments is not None:
        edge = jnp.ones_like(segments[:, :1], dtype=bool)
        # [B, S]: the first token of each document
        change = jnp.concatenate((edge, segments[:, 1:] != segments[:, :-1]), 1)
        runs = jnp.where(segments == 0, 0, jnp.cumsum(change, 1, dtype=jnp.int32))
        begin = jax.lax.cummax(jnp.where(change, at, 0), axis=1)  # [B, S]
        last = jnp.where(jnp.roll(change, -1, 1), at + 1, keys)  # a row's end is always a change
        end = jax.lax.cummin(last, axis=1, reverse=True)  # [B, S]
    if window is not None:
        begin, end = jnp.maximum(begin, at - window + 1), jnp.minimum(end, at + window)
    if segments is not None:
        # an empty interval for padding: first = S, until = 0
        begin, end = jnp.where(segments == 0, keys, begin), jnp.where(segments == 0, 0, end)
    first = jax.lax.dynamic_slice_in_dim(begin, start, queries, 1)  # [B or 1, T]
    offset = start if isinstance(start, int) else None
    until = None if causal else jax.lax.dynamic_slice_in_dim(end, start, queries, 1) - 1
    return Mask(first, end, runs, jnp.asarray(start, jnp.int32), offset, window, until)


def cache_mask(like: Array, keys: int, slots: Array, window: int | None) -> Mask:
    """See attention.attention_mask, with slots."""
    first = jnp.zeros_like(slots) if window is None else jnp.maximum(slots - window + 1, 0)
    until = jnp.full((1, keys), keys, jnp.int32)
    first, last = first.astype(jnp.int32), slots.astype(jnp.int32)
    return Mask(first, until, None, jnp.zeros((), jnp.int32), None, None, last)


def _library_option(
    q: Array, k: Array, v: Array, mask: Mask, softcap: float | None, sinks: Array | None
) -> Option:
    platform = jax_platform()
    plain, obstacle = softcap is None and sinks is None, None
    if platform == "tpu":
        if mask.offset is None:
            obstacle = "splash attention needs a start that is known while tracing"
        elif q.shape[1] % SPLASH_BLOCK or k.shape[1] % SPLASH_BLOCK:
            obstacle = f"splash attention: {q.shape[1]} of {k.shape[1]} tokens (multiples of 128)"
        return Option("library", "splash attention: JAX's TPU kernel", obstacle)
    if not plain:
        obstacle = f"on {platform} JAX has no fused kernel with a cap or sinks"
    elif platform == "gpu":
        bare = mask.square and mask.runs is None and mask.last is None
        if q.dtype not in _HALF or not bare:
            obstacle = "cuDNN: half precision, square causal masks without documents"
        return Option("library", "cuDNN flash attention", obstacle)
    elif q.shape[-1] != v.shape[-1]:
        obstacle = "jax.nn.dot_product_attention needs keys and values of one size"
    return Option("library", "jax.nn.dot_product_attention in XLA", obstacle)


def choose_attention(
    q: Array, k: Array, v: Array, mask: Mask, softcap: float | None, sinks: Array | None,
    implementation: str | None,
) -> Choice:  # fmt: skip
    """See attention.choose_attention."""
    library = _library_option(q, k, v, mask, softcap, sinks)
    on_tpu = jax_platform() == "tpu"
    obstacle = pallas_obstacle() if mask.last is None else "it is causal, this mask is not"
    own = Option("pallas", "one fused TPU kernel", obstacle, automatic=on_tpu)
    return choose("attention", [library, own, reference_option()], implementation)


def _reference(
    q: Array, k: Array, v: Array, mask: Mask, scale: float, softcap: float | None,
    sinks: Array | None,
) -> Array:  # fmt: skip
    batch, length, heads, size = q.shape
    groups = k.shape[2]
    grouped = q.reshape(batch, length, groups, heads // groups, size)  # [B, T, K, H / K, N]
    scores = jnp.einsum("btkgn,bskn->bkgts", grouped, k.astype(q.dtype))  # [B, K, H / K, T, S]
    scores = scores.astype(jnp.float32) * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap  # s = softcap * tanh(s / softcap)
    scores = jnp.where(mask.dense()[:, None], scores, -jnp.inf)
    scores = jnp.where(mask.seen[:, None, None, ..., 0], scores, 0)  # avoids NaN in gradients
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(1, groups, heads // groups, 1, 1)
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))  # [B, K, H / K, T, 1]
        scores = jnp.concatenate((scores, column), -1)
    # exp(s) / (sum exp(s) + exp(z)); the column of z is left out
    weights = jax.nn.softmax(scores, -1)[..., : k.shape[1]].astype(q.dtype)
    out = jnp.einsum("bkgts,bskn->btkgn", weights, v.astype(q.dtype))  # [B, T, K, H / K, M]
    return jnp.where(mask.seen, out.reshape(batch, length, heads, -1), 0)


def splash(
    q: Array, k: Array, v: Array, mask: Mask, scale: float, softcap: float | None,
    sinks: Array | None,
) -> Array:  # fmt: skip
    """Splash attention in its own layout: one row at a time under vmap, q times the scale."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, keys = q.shape[1], k.shape[1]
    offset: Any = mask.offset  # a number here, as its choice asks for
    if mask.window is None and mask.last is not None:
        shape: Any = masks.FullMask((length, keys))
    elif mask.window is None:
        shape = masks.CausalMask((length, keys), offset=offset)
    else:
        after = 0 if mask.last is None else mask.window - 1
        shape = masks.LocalMask((length, keys), (mask.window - 1, after), offset=offset)
    made = kernel.make_splash_mha_single_device(
        masks.MultiHeadMask([shape] * q.shape[2]),
        block_sizes=_splash_blocks(length, keys),
        attn_logits_soft_cap=softcap,
        interpret=bool(pallas_interpret()),
    )
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    # [B, H, T, N], [B, K, S, N], [B, K, S, M]
    q, k, v = (x.astype(q.dtype).swapaxes(1, 2) for x in (q, k, v))
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    if mask.runs is None:
        return jax.vmap(lambda *qkv: made(*qkv, sinks=sinks))(q, k, v).swapaxes(1, 2)
    own_runs = jax.lax.dynamic_slice_in_dim(mask.runs, mask.start, length, 1)
    documents = kernel.SegmentIds(own_runs, mask.runs)
    out = jax.vmap(lambda *args: made(*args, sinks=sinks))(q, k, v, documents)
    return jnp.where(mask.seen, out.swapaxes(1, 2), 0)


def _splash_blocks(length: int, keys: int) -> Any:
    """The largest blocks up to 512 that divide the lengths (untuned)."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import BlockSizes

    rows, columns = (
        next(size for size in (512, 256, 128) if not count % size) for count in (length, keys)
    )
    names = ["block_q", "block_q_dkv", "block_q_dq"]
    names_kv = ["block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute"]
    sizes: Any = dict.fromkeys(names, rows) | dict.fromkeys([*names_kv, "block_kv_dq"], columns)
    return BlockSizes(**sizes)


def _library(
    q: Array, k: Array, v: Array, mask: Mask, scale: float, softcap: float | None,
    sinks: Array | None,
) -> Array:  # fmt: skip
    platform = jax_platform()
    if platform == "tpu":
        return splash(q, k, v, mask, scale, softcap, sinks)
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    if platform == "gpu":
        window = None if mask.window is None else (mask.window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, local_window_size=window, implementation="cudnn"
        )
    # [B or 1, 1, T, S]
    allowed = mask.dense() | ~mask.seen.swapaxes(1, 2)  # rows of padding see all: no 0 / 0
    out = jax.nn.dot_product_attention(q, k, v, mask=allowed, scale=scale)
    return jnp.where(mask.seen, out, 0)


def _pallas(q: Array, k: Array, v: Array, mask: Mask, *scoring: Any) -> Array:
    from sabia.kernels.attention.pallas_impl import attention

    return attention(q, k, v, mask.first, mask.until, mask.start, *scoring)


IMPLEMENTATIONS = {"reference": _reference, "library": _library, "pallas": _pallas}
