"""NVFP4 and FP8 in plain JAX, on any device: see `quantize` for the arithmetic.

`rounded` gives the values themselves, for emulated products; `quantize` the codes and
scales for the hardware units of a chip. Written so that XLA rewrites nothing: no division by a
constant (it would multiply by the inverse), no rounded product inside a sum (it would fuse), no
minimum or maximum of what may be NaN (on CPU it may drop it).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sabia.kernels.quantize.definitions import (
    BITS,
    LARGEST,
    MIX,
    NAN,
    SMALLEST_NORMAL,
    SMALLEST_SCALE,
    Layout,
    Quantized,
)

Array = jax.Array


@partial(jax.jit, static_argnums=1)
def quantize(x: Array, layout: Layout, key: object = None) -> Quantized:
    """See `sabia.kernels.quantize.interface.quantize`; key: uint32[2]."""
    tiled, tiles, scale, draws = _prepare(x, layout, key)
    count, _, power = round_size(tiled, layout.element, draws)
    codes = encode(tiled, count, power, layout.element)
    stored = e4m3_codes(tiles) if layout.scale == "e4m3" else tiles
    return Quantized(_cropped(codes, x), stored if layout.tile else None, scale)


@partial(jax.jit, static_argnums=1)
def rounded(x: Array, layout: Layout, key: object = None) -> tuple[Array, Array]:
    """(values float32 [R, C], scale []) with x ≈ values · scale; BF16 holds every value."""
    tiled, tiles, scale, draws = _prepare(x, layout, key)
    count, steps, _ = round_size(tiled, layout.element, draws)
    values = jnp.copysign(count * steps, tiled) * tiles[:, None, :, None]
    return _cropped(values, x), scale


def hadamard(x: Array, signs: Array) -> Array:
    """x[..., C] with each 16 columns transformed (C a multiple of 16), float32; signs[16]."""
    y = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 16) * signs  # [..., C / 16, 16]
    for stride in (1, 2, 4, 8):
        pairs = y.reshape(*y.shape[:-1], -1, 2, stride)
        # one step of the fast Walsh-Hadamard transform
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack((low + high, low - high), -2).reshape(y.shape)
    return (y * 0.25).reshape(x.shape)  # 1 / sqrt(16): orthonormal


def mix(x: Array) -> Array:
    """The hash on uint32[...]."""
    for shift, factor in zip(MIX[::2], (*MIX[1::2], 1), strict=True):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x


def uniforms(index: Array, key: Array) -> Array:
    """float32 in (0, 1) by key (uint32[2]) and index (uint32 [...])."""
    bits = mix(mix(index ^ key[0]) + key[1])
    odd = (bits >> 9) * np.uint32(2) + np.uint32(1)  # the upper 23 bits: u = odd * 2^-24
    return odd.astype(jnp.float32) * np.float32(2.0**-24)


def indices(rows: int, columns: int, row: object = 0, column: object = 0, width: int = 0) -> Array:
    """Row-major indices of a block [rows, columns] at (row, column) of a matrix `width` wide."""
    down = lax.broadcasted_iota(jnp.uint32, (rows, columns), 0)
    across = lax.broadcasted_iota(jnp.uint32, (rows, columns), 1)
    start = jnp.asarray(row).astype(jnp.uint32), jnp.asarray(column).astype(jnp.uint32)
    return (down + start[0]) * np.uint32(width or columns) + (across + start[1])


def flushed(x: Array) -> Array:
    """x in float32 with subnormal numbers as zeros of their sign."""
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) < SMALLEST_NORMAL, jnp.copysign(jnp.float32(0), wide), wide)


def largest(x: Array, axes: tuple[int, ...]) -> Array:
    """The largest |x| over axes, NaN if there is one: by bits, as XLA may drop it from a max."""
    bits = _bits(jnp.abs(x)).max(axes)
    return lax.bitcast_convert_type(bits, jnp.float32)


def round_size(x: Array, element: str, draws: Array | None) -> tuple[Array, Array, Array]:
    """|x| as (count, step, exponent): value = count · step, all [...]; count keeps NaN."""
    _, mantissa, bias = BITS[element]
    size = jnp.abs(x)
    size = jnp.where(size > LARGEST[element], np.float32(LARGEST[element]), size)
    # exponent of |x|, at least that of the subnormal numbers
    power = jnp.clip((_bits(size) >> 23) - 127, 1 - bias, 127)
    steps = _power(power - mantissa)
    whole = size * _power(mantissa - power)  # |x| in steps of 2^(power - mantissa)
    if draws is None:
        return lax.round(whole, lax.RoundingMethod.TO_NEAREST_EVEN), steps, power
    below = jnp.floor(whole)
    return below + (draws < whole - below).astype(jnp.float32), steps, power


def encode(x: Array, count: Array, power: Array, element: str) -> Array:
    """Codes (uint8) of what `round_size` made of x."""
    exponent, mantissa, bias = BITS[element]
    nan = jnp.isnan(count)
    whole = jnp.where(nan, 0.0, count).astype(jnp.int32)
    code = ((power - (1 - bias)) << mantissa) + whole  # a carry of the count raises the exponent
    code = code | (lax.shift_right_logical(_bits(x), 31) << (exponent + mantissa))
    return jnp.where(nan, NAN[element], code).astype(jnp.uint8)


def global_scale(everything: Array, layout: Layout) -> Array:
    """The scale [] of a matrix in `layout` by its largest |x|."""
    if layout.scale == "power2":
        return jnp.float32(1)
    factor = 1.0 if layout.scale == "tensor" else LARGEST["e4m3"]
    return _at_least(_finite(everything), _reciprocal(factor * LARGEST[layout.element]))


def tile_steps(size: Array, scale: Array, layout: Layout) -> Array:
    """Tile scales [...] by the largest |x| of tiles [...] and the matrix's scale []."""
    limit, size = LARGEST[layout.element], _finite(size)
    if layout.scale == "power2":
        return _power_of_two(size, limit)
    if layout.scale == "tensor":
        return jnp.ones_like(size)
    # E4M3(a(tile) / largest / scale)
    count, steps, _ = round_size(size * _reciprocal(limit) * (1.0 / scale), "e4m3", None)
    return count * steps


def inverse_step(tiles: Array, scale: Array) -> Array:
    """1/(tile scale · scale), 0 where that is 0."""
    step = tiles * scale
    return jnp.where(step == 0, 0.0, 1.0 / step)


def _prepare(x: Array, layout: Layout, key: object) -> tuple[Array, Array, Array, Array | None]:
    """(x over its scales, tiled; tile scales [down, across]; scale; draws, tiled)."""
    tiled = _tiled(flushed(x), layout)
    size = largest(tiled, (1, 3))  # [down, across]: a(tile)
    scale = global_scale(largest(size, (0, 1)), layout)
    tiles = tile_steps(size, scale, layout)
    draws = None
    if key is not None:
        draws = _tiled(uniforms(indices(*x.shape), jnp.asarray(key, jnp.uint32)), layout)
    return tiled * inverse_step(tiles, scale)[:, None, :, None], tiles, scale, draws


def _tiled(x: Array, layout: Layout) -> Array:
    """x[R, C], padded with zeros, as [down, height, across, width]."""
    rows, columns = x.shape
    height, width = layout.tile or (rows, columns)
    down, across = layout.tiles(rows, columns)
    x = jnp.pad(x, ((0, down * height - rows), (0, across * width - columns)))
    return x.reshape(down, height, across, width)


def _cropped(tiled: Array, like: Array) -> Array:
    if tiled.ndim == 4:
        tiled = tiled.reshape(tiled.shape[0] * tiled.shape[1], -1)
    return tiled[: like.shape[0], : like.shape[1]]


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.nan)


def _reciprocal(x: float) -> np.float32:
    return np.float32(1) / np.float32(x)


def _at_least(size: Array, factor: np.float32) -> Array:
    scale = size * factor
    scale = jnp.where(scale < SMALLEST_SCALE, np.float32(SMALLEST_SCALE), scale)
    return jnp.where(size == 0, np.float32(1), scale)


def _power_of_two(size: Array, largest: float) -> Array:
    """The least power of two ≥ size/largest, by exponents: exact."""
    bits, bound = _bits(size), int(np.float32(largest).view(np.int32))
    above = ((bits & 0x7FFFFF) > (bound & 0x7FFFFF)).astype(jnp.int32)
    scale = _power(jnp.maximum((bits >> 23) - (bound >> 23) + above, -100))
    return jnp.where(size == 0, 1.0, jnp.where(jnp.isnan(size), jnp.nan, scale))


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _power(exponent: Array) -> Array:
    """2^exponent by its bits."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def e4m3_codes(values: Array) -> Array:
    """Codes of numbers ≥ 0 that E4M3 holds."""
    count, _, power = round_size(values, "e4m3", None)
    return encode(values, count, power, "e4m3")
