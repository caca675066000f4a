"""Grouped matrix products in JAX: a loop over groups as the reference, and JAX's own kernels.

`jax.lax.ragged_dot_general` has its gradients and a native lowering; megablox (jax.experimental
.pallas.ops.tpu.megablox) is its tuned counterpart on TPU. Both leave rows beyond the counts to be
cleared.
"""

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
MEGABLOX_ROWS = 128
# x[M, D] · weight[E, F, D] by groups of rows, contracting the last axes
_DIMENSIONS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


def choose_grouped_matmul(x: Array, weight: Array, implementation: str | None) -> Choice:
    """See grouped_matmul.choose_grouped_matmul."""
    on_tpu, obstacle = jax_platform() == "tpu", None
    if on_tpu and x.shape[0] % MEGABLOX_ROWS:
        obstacle = f"megablox: {x.shape[0]} rows (a multiple of {MEGABLOX_ROWS})"
    elif on_tpu and x.dtype not in (jnp.bfloat16, jnp.float32):
        obstacle = f"megablox takes bfloat16 and float32, not {x.dtype}"
    library = Option("library", "megablox" if on_tpu else "jax.lax.ragged_dot", obstacle)
    own = Option("pallas", "a TPU kernel for any shape", pallas_obstacle(), automatic=on_tpu)
    return choose("grouped_matmul", [library, own, reference_option()], implementation)


def _reference(x: Array, weight: Array, counts: Array, full: bool) -> Array:
    ends = jnp.cumsum(counts)  # [E]
    row = jnp.arange(x.shape[0])[:, None]
    out = jnp.zeros((x.shape[0], weight.shape[1]), x.dtype)
    for group in range(weight.shape[0]):
        in_group = (row >= ends[group] - counts[group]) & (row < ends[group])  # [M, 1]
        out = jnp.where(in_group, x @ weight[group].T.astype(x.dtype), out)  # [M, F]
    return out


def _cleared(x: Array, counts: Array) -> Array:
    return jnp.where(jnp.arange(x.shape[0])[:, None] < jnp.sum(counts), x, 0)


def megablox(x: Array, weight: Array, counts: Array) -> Array:
    """The TPU kernel of JAX; its tiles are cut to the shapes."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    sizes = (MEGABLOX_ROWS * (4 if x.shape[0] % 512 == 0 else 1), x.shape[1], weight.shape[1])
    tiling = (sizes[0], *(min(512, -(-size // 128) * 128) for size in sizes[1:]))
    arrays = (_cleared(x, counts), weight.astype(x.dtype), counts.astype(jnp.int32))
    interpret = bool(pallas_interpret())
    return _cleared(gmm(*arrays, x.dtype, tiling, transpose_rhs=True, interpret=interpret), counts)


def _library(x: Array, weight: Array, counts: Array, full: bool) -> Array:
    if jax_platform() == "tpu":
        return megablox(x, weight, counts)
    counts = counts.astype(jnp.int32)
    rows = x if full else _cleared(x, counts)
    out = jax.lax.ragged_dot_general(rows, weight.astype(x.dtype), counts, _DIMENSIONS)
    return out if full else _cleared(out, counts)


def _pallas(x: Array, weight: Array, counts: Array, full: bool) -> Array:
    from sabia.kernels.grouped_matmul.pallas_impl import grouped_matmul

    return grouped_matmul(x, weight.astype(x.dtype), counts.astype(jnp.int32))


IMPLEMENTATIONS = {"reference": _reference, "library": _library, "pallas": _pallas}
