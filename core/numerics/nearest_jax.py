"""Rounding to the values of codes in JAX: `SmallFloat.round`; and those of `integers` and, to
NVFP4, of `scales`, for quantization-aware training."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sabia.core.numerics.floats import E2M1, E4M3, SmallFloat
from sabia.core.numerics.integers import code_range, group_width

Array = jax.Array
NVFP4_GROUP = 16


def nearest(element: SmallFloat, x: Array) -> Array:
    """The values of codes nearest to finite x[...], ties to even; larger ones are clipped."""
    power = jnp.frexp(x)[1] - 1  # 2^power ≤ |x| < 2^(power+1)
    exponent = jnp.maximum(power, 1 - element.bias) - element.mantissa
    # 2^exponent by its bits, because XLA computes powers inexactly
    step = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    return jnp.clip(jnp.round(x / step) * step, -element.max, element.max)


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


def fake_nvfp4(weights: Sequence[Array]) -> list[Array]:
    """weights[..., O, I] in NVFP4 as float32, with one scale for those at an index [...] together.

    Equals decode(encode(...)) of `scales` by absmax. UsageError if 16 does not divide the columns.
    """
    wide = [weight.astype(jnp.float32) for weight in weights]
    sizes = [jnp.abs(weight).max((-2, -1), keepdims=True) for weight in wide]
    largest = jnp.stack(sizes).max(0)[..., None]  # [..., 1, 1, 1]
    whole = np.float32(E4M3.max * E2M1.max) / largest  # g = 448 * 6 / max|w|
    whole = jnp.where((largest > 0) & jnp.isfinite(whole), whole, np.float32(1))
    # XLA would turn a division by a constant into a product
    divisor = jax.lax.optimization_barrier(jnp.float32(E2M1.max))
    made = []
    for weight in wide:
        width = group_width(weight.shape[-1], NVFP4_GROUP)
        groups = weight.reshape(*weight.shape[:-1], -1, width)  # [..., O, I/16, 16]
        wanted = jnp.abs(groups).max(-1, keepdims=True) / divisor
        stored = jnp.maximum(nearest(E4M3, wanted * whole), np.float32(E4M3.values[1]))
        divided = jnp.where(wanted > 0, stored, np.float32(1))
        # nor that by a broadcast number
        step = divided / jax.lax.optimization_barrier(jnp.broadcast_to(whole, divided.shape))
        made.append((nearest(E2M1, groups / step) * step).reshape(weight.shape))
    return made
