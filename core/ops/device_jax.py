"""The operations of one device in JAX: pure functions that work under jit and grad.

Attention, norms, expert products and the vocabulary loss are those of sabia.kernels; all shapes are
static. Importing this module registers KVCache as a pytree (static: `reads`, `rings`, `slack`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sabia.core.errors import UsageError
from sabia.core.ops.base import FORWARD_DTYPES, Angles, Ops, Remat, is_stored
from sabia.core.ops.delta_jax import causal_conv, delta_rule
from sabia.core.ops.experts_jax import (
    DispatchPlan,
    biased,
    combine,
    dispatch,
    grouped,
    weighted_bincount,
)
from sabia.core.ops.kernel_choice import requested_kernels
from sabia.core.ops.kv_cache import KVCache
from sabia.core.ops.product import Matrix, Product, check_product

Array = jax.Array

_STATIC = ["reads", "rings", "slack", "shared"]
jax.tree_util.register_dataclass(KVCache, data_fields=["layers", "lengths"], meta_fields=_STATIC)


def _dtype(dtype: str) -> Any:
    if dtype not in FORWARD_DTYPES:
        raise UsageError(f"dtype: {dtype!r} (expected one of {', '.join(FORWARD_DTYPES)})")
    return jnp.dtype(dtype)


def _linear(x: Array, matrix: Matrix) -> Array:
    weight, axes = matrix.weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ()))
    return biased(jax.lax.dot_general(x, weight, axes), matrix.bias, None)


class JaxOps(Ops):
    """The operations of one device; their descriptions are those of Ops."""

    name = "jax"
    requested = requested_kernels("jax")

    silu, sigmoid = staticmethod(jax.nn.silu), staticmethod(jax.nn.sigmoid)
    softplus, where = staticmethod(jax.nn.softplus), staticmethod(jnp.where)
    exp, tanh = staticmethod(jnp.exp), staticmethod(jnp.tanh)
    log1mexp = staticmethod(lambda x: jnp.log(-jnp.expm1(x)))
    stop_gradient, topk = staticmethod(jax.lax.stop_gradient), staticmethod(jax.lax.top_k)
    causal_conv, delta_rule = staticmethod(causal_conv), staticmethod(delta_rule)
    dispatch, combine = staticmethod(dispatch), staticmethod(combine)
    weighted_bincount = staticmethod(weighted_bincount)

    # of the optimizers
    sqrt, sign, expm1 = staticmethod(jnp.sqrt), staticmethod(jnp.sign), staticmethod(jnp.expm1)
    floor, argsort = staticmethod(jnp.maximum), staticmethod(jnp.argsort)
    mean = staticmethod(lambda x, axes: jnp.mean(x, axes, keepdims=True))
    take, cond = staticmethod(jnp.take_along_axis), staticmethod(jax.lax.cond)
    eigenvectors = staticmethod(lambda x: jnp.linalg.eigh(x)[1][..., ::-1])
    orthonormal = staticmethod(lambda x: jnp.linalg.qr(x)[0])
    repeat = staticmethod(
        lambda times, function, x: jax.lax.fori_loop(0, times, lambda _, y: function(y), x)
    )

    def to_device(
        self, params: Mapping[str, np.ndarray], dtype: str | None = None
    ) -> dict[str, Array]:
        """See Ops.to_device."""
        kind = None if dtype is None else _dtype(dtype)
        # a copy, because on CPU jnp.asarray may share NumPy memory that its owner changes later
        return {
            key: jnp.array(array.decoded() if is_stored(array) else array, dtype=kind, copy=True)
            for key, array in params.items()
        }

    def to_numpy(self, params: Mapping[str, Array]) -> dict[str, np.ndarray]:
        """See Ops.to_numpy."""
        return {key: np.array(value) for key, value in params.items()}

    def integers(self, values: object, like: Array) -> Array:
        """See Ops.integers (int32)."""
        return jnp.asarray(values, dtype=jnp.int32)

    def arange(self, count: int, like: Array) -> Array:
        """See Ops.arange."""
        return jnp.arange(count, dtype=jnp.int32)

    def zeros(self, shape: Sequence[int], dtype: str, like: Array | None = None) -> Array:
        """See Ops.zeros."""
        return jnp.zeros(tuple(shape), dtype=_dtype(dtype))

    def full(self, shape: Sequence[int], value: float, like: Array) -> Array:
        """See Ops.full."""
        return jnp.full(tuple(shape), value, like.dtype)

    def cast(self, x: Array, dtype: str) -> Array:
        """See Ops.cast."""
        return x.astype(_dtype(dtype))

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        """See Ops.concat."""
        return jnp.concatenate(tuple(xs), axis)

    def known_max(self, x: Array) -> int | None:
        """See Ops.known_max: always None, since each new length would be compiled."""
        return None

    def layer_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """See Ops.layer_norm."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        return (wide * weight.astype(jnp.float32)).astype(x.dtype)

    def gelu(self, x: Array, tanh: bool = False) -> Array:
        """See Ops.gelu."""
        return jax.nn.gelu(x, approximate=tanh)

    def softmax(self, x: Array) -> Array:
        """See Ops.softmax."""
        return jax.nn.softmax(x.astype(jnp.float32), axis=-1)

    def logsumexp(self, x: Array) -> Array:
        """See Ops.logsumexp."""
        return jax.nn.logsumexp(x.astype(jnp.float32), axis=-1)

    def rope_angles(
        self, positions: Array, frequencies: tuple[float, ...], growth: Array | None = None
    ) -> Angles:
        """See Ops.rope_angles."""
        # both halves of the head dimension rotate by the same angles
        table: Any = np.asarray(frequencies * 2, dtype=np.float32)
        if growth is not None:
            last = len(frequencies) - 1
            exponents = np.asarray([-pair / last for pair in range(last + 1)] * 2, np.float32)
            table = table * growth[:, :, None] ** exponents
        by_pair = positions[:, :, None].astype(jnp.float32) * table
        angles = by_pair[:, :, None, :]  # [B or 1, T, 1, N]
        return jnp.cos(angles), jnp.sin(angles)

    def rope(self, x: Array, angles: Angles) -> Array:
        """See Ops.rope."""
        cos, sin = angles
        wide = x.astype(jnp.float32)
        first, second = jnp.split(wide, 2, axis=-1)
        # (x1 cos - x2 sin, x2 cos + x1 sin)
        return (wide * cos + jnp.concatenate((-second, first), axis=-1) * sin).astype(x.dtype)

    def cache_write(self, cache: Array, new: Array, slots: Array) -> Array:
        """See Ops.cache_write: a new array (in place inside jit with a donated cache)."""
        rows = jnp.arange(cache.shape[0])[:, None]
        rows = jnp.broadcast_to(rows, new.shape[:2])
        slots = jnp.broadcast_to(slots, new.shape[:2])
        return cache.at[rows, slots].set(new.astype(cache.dtype))

    def remat(self, function: Callable[..., Array], policy: Remat) -> Callable[..., Array]:
        """See Ops.remat."""
        if policy == "none":
            return function
        if policy == "full":
            return jax.checkpoint(function)
        if policy != "matmuls":
            raise UsageError(f"remat: {policy!r} (expected none, matmuls or full)")
        kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(function, policy=kept)

    def embedding(self, table: Array, ids: Array) -> Array:
        """See Ops.embedding."""
        return jnp.take(table, ids, axis=0)

    def take_along(self, x: Array, indices: Array) -> Array:
        """See Ops.take_along."""
        return jnp.take_along_axis(x, indices, axis=-1)

    def put_along(self, x: Array, indices: Array, value: float) -> Array:
        """See Ops.put_along."""
        return jnp.put_along_axis(x, indices, value, axis=-1, inplace=False)

    def grouped(self, rows: Array, matrix: Matrix, plan: DispatchPlan) -> Array:
        """rows[M, in] of each expert times its matrix, plus its bias."""
        return biased(grouped(rows, matrix.weight, plan), matrix.bias, plan)

    def kernel(self, product: Product) -> list[Array]:
        """See Ops.kernel."""
        x, matrices, plan = product
        for matrix in matrices:
            check_product(matrix.name, x, matrix.weight)
        if plan is None:
            return [_linear(x, matrix) for matrix in matrices]
        return [self.grouped(x, matrix, plan) for matrix in matrices]
