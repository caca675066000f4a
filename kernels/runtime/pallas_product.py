"""Matrix products inside Pallas kernels, summed in float32."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Axes = tuple[Sequence[int], Sequence[int]]  # of both matrices
Contraction = tuple[Axes, Axes]  # axes that are summed, and those of batches
NT: Contraction = (((1,), (1,)), ((), ()))  # a bᵀ: contract the columns of both
TN: Contraction = (((0,), (0,)), ((), ()))  # aᵀ b: contract the rows of both
NN: Contraction = (((1,), (0,)), ((), ()))  # a b


def product(a: jax.Array, b: jax.Array, contraction: Contraction) -> jax.Array:
    """The product of two matrices by NT, TN or NN; float32 operands keep their precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, contraction, preferred_element_type=jnp.float32, precision=precision
    )
