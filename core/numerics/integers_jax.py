"""The rounding of `integers` in JAX, for quantization-aware training."""

import jax
import jax.numpy as jnp
import numpy as np

from sabia.core.numerics.integers import code_range, group_width

Array = jax.Array


def fake(weight: Array, bits: int, group: int | None) -> Array:
    """weight[O, I] rounded to integer codes with BF16 absmax scales, as float32.

    Equals decode(encode(…)) of `integers`. UsageError if `group` does not divide the columns.
    """
    lowest, highest = code_range(bits)
    width = group_width(weight.shape[-1], group)
    parts = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, width)
    # XLA would turn a division by a constant into a product, and drop a cast to BF16 and back.
    divisor = jax.lax.optimization_barrier(jnp.float32(highest))
    largest = jnp.abs(parts).max(-1, keepdims=True)
    scale = jax.lax.reduce_precision(largest / divisor, 8, 7)
    scale = jnp.where(scale > 0, scale, np.float32(1))
    codes = jnp.clip(jnp.round(parts / scale), lowest, highest)
    return (codes * scale).reshape(weight.shape)
