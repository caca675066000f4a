"""The operations in JAX: pure functions that work under jit and grad, with static shapes.

Large vocabulary losses run over chunks of tokens and recompute logits in the backward pass. On
accelerators, and where SABIA_KERNELS names one (core.model.kernel_choice), the kernels of
sabia.kernels are used. Importing this module registers KVCache as a pytree (its `reads` is static).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sabia.core.errors import UsageError
from sabia.core.model.kernel_choice import kernels_of, raises_missing_backend
from sabia.core.model.kv_cache import KVCache
from sabia.core.model.ops import FORWARD_DTYPES, Angles, Axes, Remat
from sabia.core.model.ops_jax_attention import attention, attention_mask  # noqa: F401
from sabia.core.model.ops_jax_delta import causal_conv, delta_rule  # noqa: F401
from sabia.core.model.ops_jax_moe import (  # noqa: F401
    biased,
    combine,
    dispatch,
    grouped_matmul,
    weighted_bincount,
)
from sabia.kernels.vocabulary_loss.interface import linear_cross_entropy as loss_kernel

Array = jax.Array
name = "jax"
DEFAULT_CHUNK_BYTES = 256 << 20
KERNELS = kernels_of("jax")
_loss_kernel = raises_missing_backend(loss_kernel)

jax.tree_util.register_dataclass(KVCache, data_fields=["layers"], meta_fields=["reads"])


def _dtype(dtype: str) -> Any:
    if dtype not in FORWARD_DTYPES:
        raise UsageError(f"dtype: {dtype!r} (expected one of {', '.join(FORWARD_DTYPES)})")
    return jnp.dtype(dtype)


def to_device(params: Mapping[str, np.ndarray], dtype: str | None = None) -> dict[str, Array]:
    """See Ops.to_device."""
    kind = None if dtype is None else _dtype(dtype)
    # a copy, because on CPU jnp.asarray may share NumPy memory that its owner changes later
    return {key: jnp.array(array, dtype=kind, copy=True) for key, array in params.items()}


def to_numpy(params: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """See Ops.to_numpy."""
    return {key: np.array(value) for key, value in params.items()}


def integers(values: Any, like: Array) -> Array:
    """See Ops.integers (int32)."""
    return jnp.asarray(values, dtype=jnp.int32)


def arange(count: int, like: Array) -> Array:
    """See Ops.arange."""
    return jnp.arange(count, dtype=jnp.int32)


def zeros(shape: Sequence[int], dtype: str, like: Array | None = None) -> Array:
    """See Ops.zeros."""
    return jnp.zeros(tuple(shape), dtype=_dtype(dtype))


def full(shape: Sequence[int], value: float, like: Array) -> Array:
    """See Ops.full."""
    return jnp.full(tuple(shape), value, like.dtype)


def positions(length: int, like: Array) -> Array:
    """See Ops.positions."""
    return arange(length, like)[None, :]


def cast(x: Array, dtype: str) -> Array:
    """See Ops.cast."""
    return x.astype(_dtype(dtype))


def concat(xs: Sequence[Array], axis: int) -> Array:
    """See Ops.concat."""
    return jnp.concatenate(tuple(xs), axis)


def known_max(x: Array) -> int | None:
    """See Ops.known_max: always None, since each new length would be compiled."""
    return None


def embedding(table: Array, ids: Array) -> Array:
    """See Ops.embedding."""
    return jnp.take(table, ids, axis=0)


def linear(x: Array, weight: Array, bias: Array | None = None, *, name: str = "") -> Array:
    """See Ops.linear."""
    out = jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))
    return out if bias is None else out + bias.astype(x.dtype)


def rms_norm(x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
    """See Ops.rms_norm."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * (weight.astype(jnp.float32) + offset)).astype(x.dtype)


def layer_norm(x: Array, weight: Array, eps: float) -> Array:
    """See Ops.layer_norm."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


# functions that are JAX's own; see Ops
silu = jax.nn.silu
sigmoid = jax.nn.sigmoid
softplus = jax.nn.softplus
exp = jnp.exp
where = jnp.where
stop_gradient = jax.lax.stop_gradient
topk = jax.lax.top_k


def gelu(x: Array, tanh: bool = False) -> Array:
    """See Ops.gelu."""
    return jax.nn.gelu(x, approximate=tanh)


def softmax(x: Array) -> Array:
    """See Ops.softmax."""
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1)


def softcap(x: Array, cap: float) -> Array:
    """See Ops.softcap."""
    return jnp.tanh(x / cap) * cap


def take_along(x: Array, indices: Array) -> Array:
    """See Ops.take_along."""
    return jnp.take_along_axis(x, indices, axis=-1)


def logsumexp(x: Array) -> Array:
    """See Ops.logsumexp."""
    return jax.nn.logsumexp(x.astype(jnp.float32), axis=-1)


def rope_angles(
    positions: Array, frequencies: tuple[float, ...], growth: Array | None = None
) -> Angles:
    """See Ops.rope_angles."""
    # both halves of the head dimension rotate by the same angles
    table: Any = np.asarray(frequencies * 2, dtype=np.float32)
    if growth is not None:
        last = len(frequencies) - 1
        exponents = np.asarray([-pair / last for pair in range(last + 1)] * 2, np.float32)
        table = table * growth[:, :, None] ** exponents
    angles = (positions[:, :, None].astype(jnp.float32) * table)[:, :, None, :]  # [B or 1, T, 1, N]
    return jnp.cos(angles), jnp.sin(angles)


def rope(x: Array, angles: Angles) -> Array:
    """See Ops.rope."""
    cos, sin = angles
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    # (x1 cos - x2 sin, x2 cos + x1 sin)
    return (wide * cos + jnp.concatenate((-second, first), axis=-1) * sin).astype(x.dtype)


def whole_segments(segments: Array) -> Array:
    """See Ops.whole_segments: one device, so segments itself."""
    return segments


def cache_write(cache: Array, new: Array, slots: Array) -> Array:
    """See Ops.cache_write: a new array (in place inside jit with a donated cache)."""
    rows = jnp.arange(cache.shape[0])[:, None]
    rows = jnp.broadcast_to(rows, new.shape[:2])
    slots = jnp.broadcast_to(slots, new.shape[:2])
    return cache.at[rows, slots].set(new.astype(cache.dtype))


def _losses(hidden: Array, weight: Array, targets: Array, cap: float | None) -> tuple[Array, Array]:
    scores = linear(hidden, weight).astype(jnp.float32)  # [rows, V]
    scores = scores if cap is None else softcap(scores, cap)
    lse = jax.nn.logsumexp(scores, axis=-1)
    target_scores = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(targets >= 0, lse - target_scores, 0.0), lse


def _chunked_losses(
    hidden: Array, weight: Array, targets: Array, cap: float | None, rows: int
) -> tuple[Array, Array]:
    tokens = hidden.shape[0]
    chunks = -(-tokens // rows)
    padding = chunks * rows - tokens
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, rows, -1)
    targets = jnp.pad(targets, (0, padding)).reshape(chunks, rows)
    # the logits of a chunk exist only while it is computed
    one = jax.checkpoint(lambda part: _losses(part[0], weight, part[1], cap))
    nll, lse = jax.lax.map(one, (hidden, targets))
    return nll.reshape(-1)[:tokens], lse.reshape(-1)[:tokens]


def linear_cross_entropy(
    hidden: Array, weight: Array, targets: Array, *, softcap: float | None = None
) -> tuple[Array, Array]:
    """See Ops.linear_cross_entropy."""
    flat, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    # rows of fp32 logits in the budget
    rows = max(1, DEFAULT_CHUNK_BYTES // (4 * weight.shape[0]))
    if KERNELS.use("vocabulary_loss", jax.default_backend()):
        options: Any = {"implementation": KERNELS.requested["vocabulary_loss"]}
        nll, lse = _loss_kernel(flat, weight, flat_targets, softcap=softcap, **options)
    elif rows >= flat.shape[0]:
        nll, lse = _losses(flat, weight, flat_targets, softcap)
    else:
        nll, lse = _chunked_losses(flat, weight, flat_targets, softcap, rows)
    return nll.reshape(targets.shape), lse.reshape(targets.shape)


def stage_input(embed: Callable[[], Array], layers: int) -> tuple[Array, range]:
    """See Ops.stage_input: there are no pipelines here."""
    return embed(), range(layers)


def stage_output(x: Array, stats: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    """See Ops.stage_output: there are no pipelines here."""
    return x, stats


def gather(weights: Mapping[str, Array], names: Mapping[str, str]) -> Mapping[str, Array]:
    """See Ops.gather: arrays are global, so weights itself."""
    return weights


def relayout(x: Array, from_axes: Axes, to_axes: Axes) -> Array:
    """See Ops.relayout: one device, so x itself."""
    return x


def shard(x: Array, axes: Axes) -> Array:
    """See Ops.shard: one device, so x itself."""
    return x


def remat(function: Callable[..., Array], policy: Remat) -> Callable[..., Array]:
    """See Ops.remat."""
    if policy == "none":
        return function
    if policy == "full":
        return jax.checkpoint(function)
    if policy != "matmuls":
        raise UsageError(f"remat: {policy!r} (expected none, matmuls or full)")
    return jax.checkpoint(function, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
