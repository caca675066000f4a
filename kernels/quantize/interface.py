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

Order of choice
    torch on CUDA       triton, which writes scales and codes in one pass; else reference.
    torch on CPU        reference.
    JAX                 reference: XLA fuses it with its neighbours. pallas by name, on TPU.
"""

from __future__ import annotations

from typing import Any

from sabia.kernels.quantize.definitions import Layout, Quantized
from sabia.kernels.runtime.dispatch import Choice, framework


def _library_module(x: object) -> Any:
    if framework(x) == "torch":
        from sabia.kernels.quantize import torch_impl

        return torch_impl
    from sabia.kernels.quantize import jax_impl

    return jax_impl


def choose_quantize(x: object, *, implementation: str | None = None) -> Choice:
    """The implementation that `quantize` uses for this array, and the reason."""
    return _library_module(x).choose_quantize(x, implementation)


def quantize(
    x: object, layout: Layout, key: object = None, *, implementation: str | None = None
) -> Quantized:
    """x[R, C] (float) in `layout`; stochastically where a key is given (two 32-bit words).

    Raises dispatch.Unavailable if the named implementation is unavailable.
    """
    module = _library_module(x)
    name = module.choose_quantize(x, implementation).implementation
    return module.IMPLEMENTATIONS[name](x, layout, key)
