"""NVFP4 and FP8 as one Pallas kernel: scales and codes of a block of whole tiles in one pass.

The body is the arithmetic of jax_arithmetic on one block; the largest value of the matrix is found
first, where the layout needs it. `interpret` runs it without a TPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sabia.kernels.quantize.definitions import Layout, Quantized
from sabia.kernels.quantize.jax_arithmetic import (
    e4m3_codes,
    encode,
    flushed,
    global_scale,
    indices,
    inverse_step,
    largest,
    round_size,
    tile_steps,
    uniforms,
)

Array = jax.Array
_BLOCK = (32, 512)  # rows, columns of a program at least: whole tiles of every layout


@partial(jax.jit, static_argnums=1, static_argnames="interpret")
def quantize(x: Array, layout: Layout, key: object = None, *, interpret: bool = False) -> Quantized:
    """See `sabia.kernels.quantize.interface.quantize`; key: uint32[2]."""
    rows, columns = x.shape
    tile = layout.tile or (1, 1)
    block = tuple(max(a, b) for a, b in zip(tile, _BLOCK, strict=True))
    grid = -(-rows // block[0]), -(-columns // block[1])
    x = jnp.pad(x, ((0, grid[0] * block[0] - rows), (0, grid[1] * block[1] - columns)))
    everything = largest(flushed(x), (0, 1)) if layout.scale != "power2" else jnp.float32(0)
    scale = global_scale(everything, layout)
    words = jnp.zeros(2, jnp.uint32) if key is None else jnp.asarray(key, jnp.uint32)
    inner = block[0] // tile[0], block[1] // tile[1]
    kind = jnp.float32 if layout.scale == "power2" else jnp.uint8
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.uint8)]
    shapes += [jax.ShapeDtypeStruct((grid[0] * inner[0], grid[1] * inner[1]), kind)]
    fixed = pl.BlockSpec((1,), lambda i, j: (0,)), pl.BlockSpec((2,), lambda i, j: (0,))
    moving = [pl.BlockSpec(size, lambda i, j: (i, j)) for size in (block, inner)]
    codes, tiles = pl.pallas_call(
        partial(_encode, layout=layout, columns=columns, stochastic=key is not None),
        out_shape=shapes,
        grid=grid,
        in_specs=[moving[0], *fixed],
        out_specs=moving,
        interpret=interpret,
    )(x, scale[None], words)
    down, across = layout.tiles(rows, columns)
    stored = tiles[:down, :across] if layout.tile else None
    return Quantized(codes[:rows, :columns], stored, scale)


def _encode(
    x: jax.Array, scale: jax.Array, key: jax.Array, codes: jax.Array, tiles: Any, *,
    layout: Layout, columns: int, stochastic: bool,
) -> None:  # fmt: skip
    height, width = layout.tile or (1, 1)
    rows, across = x.shape
    # [down, height, right, width]
    shaped = flushed(x[...]).reshape(rows // height, height, across // width, width)
    whole = scale[0]
    steps = tile_steps(largest(shaped, (1, 3)), whole, layout)  # [down, right]
    inverse = inverse_step(steps, whole)[:, None, :, None]
    value = (shaped * inverse).reshape(rows, across)  # [rows, columns] of the block
    draws = None
    if stochastic:
        origin = pl.program_id(0) * rows, pl.program_id(1) * across
        draws = uniforms(indices(rows, across, *origin, columns), key[...])
    count, _, power = round_size(value, layout.element, draws)
    codes[...] = encode(value, count, power, layout.element)
    stored = e4m3_codes(steps) if layout.scale == "e4m3" else steps
    tiles[...] = stored.astype(tiles.dtype)
