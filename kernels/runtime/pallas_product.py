"""Shared by Pallas kernels: matrix products summed in float32, calls with prefetched scalars."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sabia.kernels.runtime.dispatch import pallas_interpret

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


def prefetching_call(
    kernel: Callable[..., None], grid: tuple[int, ...], *, inner: int = 1, out_shape: Any,
    limit: int | None = None, **spec: Any,
) -> Any:  # fmt: skip
    """pallas_call with three prefetched arrays of scalars, its last `inner` grid axes in order;
    limit: bytes of on-chip memory."""
    order: Any = ("parallel",) * (len(grid) - inner) + ("arbitrary",) * inner
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=3, grid=grid, **spec),
        compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=limit),
        interpret=pallas_interpret(),
    )
