"""Matrices in NVFP4 and FP8: arithmetic, layouts and engines.

A matrix x[R, C] becomes codes[R, C] (uint8), a scale for each tile of r × c elements (tiles at the
edges are smaller) and one float32 scale for the whole: x ≈ value(code) · tile scale · scale.
`largest` is the layout's largest element; all arithmetic is float32, in just this order, so that
every engine gives the same bits; a(tile) is the largest |x| of a tile, A of the matrix.
  tensor  scale = A · (1/largest); no tile scales
  power2  tile scale = the least power of two ≥ a(tile)/largest; scale = 1
  e4m3    scale = A · (1/(448·largest)); tile scale = E4M3(a(tile) · (1/largest) · (1/scale))
  code = round(x · (1/(tile scale · scale))), saturating; 0 where a tile's scale is 0
Rounding is to nearest, ties to even, or stochastic: element i (row-major in [R, C]) goes up where
u(i) is below its distance from the value beneath, in units of the gap. u(i) is an odd multiple of
2^-24 from `mix`, a 32-bit hash, of i and a key of two words: no state is kept, so a
draw can be repeated anywhere.
Zeros: a matrix of zeros has scale 1, a tile of zeros code 0 (of the element's sign). Subnormal
numbers count as zeros, and no scale is below 2^-100. NaN or infinity makes the scale NaN of its
tile (power2) or of the matrix (tensor, e4m3), so that later checks detect it.
NVFP4: NVIDIA, arXiv 2509.25149. FP8 by tiles: DeepSeek-V3, arXiv 2412.19437 §3.3, with the powers
of two of its §3.3.3, which a change of tiling (x, then xᵀ) cannot round twice. `mix` has the
constants of C. Wellons' hash prospector (16, 0x21f0aaad, 15, 0xd35a2d97, 15).
Engines: torch and jax are the plain references; triton and pallas write codes in one pass.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from sabia.kernels.quantize.definitions import (
    Layout,
    Quantized,
)

ENGINES = ("torch", "triton", "jax", "pallas")


def engine_for(x: Any) -> str:
    """triton for a CUDA tensor where it is installed, else the plain engine of the library.

    XLA fuses the plain engine with the surrounding operations, so pallas must be named.
    """
    if type(x).__module__.partition(".")[0] != "torch":
        return "jax"
    return "triton" if x.is_cuda and importlib.util.find_spec("triton") else "torch"


def quantize(x: Any, layout: Layout, key: Any = None, engine: str | None = None) -> Quantized:
    """x[R, C] (float) in `layout`; stochastically where a key is given (two 32-bit words).

    engine: one of ENGINES, of the library that x belongs to; None takes the fastest.
    """
    engine = engine or engine_for(x)
    # imported by statements: torch.compile does not trace importlib.import_module
    if engine == "torch":
        from sabia.kernels.quantize.torch_impl import quantize as run
    elif engine == "triton":
        from sabia.kernels.quantize.triton_impl import quantize as run
    elif engine == "jax":
        from sabia.kernels.quantize.jax_impl import quantize as run
    elif engine == "pallas":
        from sabia.kernels.quantize.pallas_impl import quantize as run
    else:
        raise ValueError(f"engine {engine!r} (expected one of {', '.join(ENGINES)})")
    return run(x, layout, key)
