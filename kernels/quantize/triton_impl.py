"""NVFP4 and FP8 as one Triton kernel: scales and codes of a block of whole tiles in one pass.

The same arithmetic as torch_arithmetic, bit for bit; the largest value of the matrix is found
first, where the layout needs it. Runs on CUDA, and anywhere under TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sabia.kernels.quantize.definitions import BITS, LARGEST, MIX, NAN, Layout, Quantized
from sabia.kernels.quantize.torch_arithmetic import global_scale, key_tensor
from sabia.kernels.runtime.cache_folder import name_compilers_folders
from sabia.kernels.runtime.tuned import tuned_blocks

name_compilers_folders()

Tensor = torch.Tensor
_KINDS = {"tensor": 0, "power2": 1, "e4m3": 2}
BLOCKS = (16, 128, 4)  # rows, columns of a program at least (whole tiles of every layout), warps
_E4M3 = tl.constexpr((4, 3, 7, 448.0, 0x7F))
_MIX = tl.constexpr(MIX)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _power(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round(x, draws, format: tl.constexpr, stochastic: tl.constexpr):
    """(count, exponent) of |x|: value = count · 2^(exponent - mantissa)."""
    size = tl.abs(x)
    size = tl.where(size > format[3], format[3], size)
    power = (_bits(size) >> 23) - 127  # exponent of |x|; 8 bits above the 23 of the mantissa
    # subnormal values of the format share one exponent
    power = tl.minimum(tl.maximum(power, 1 - format[2]), 127)
    whole = size * _power(format[1] - power)  # |x| in steps of 2^(exponent - mantissa)
    if stochastic:
        below = tl.floor(whole)
        count = below + tl.where(draws < whole - below, 1.0, 0.0)
    else:
        count = (whole + 8388608.0) - 8388608.0  # to nearest even: 2^23 leaves no fraction
    return count, power


@triton.jit
def _code(x, count, power, format: tl.constexpr):
    nan = count != count
    whole = tl.where(nan, 0.0, count).to(tl.int32)
    # a carry of the count raises the exponent
    code = ((power - (1 - format[2])) << format[1]) + whole
    code = code | (((_bits(x) >> 31) & 1) << (format[0] + format[1]))
    return tl.where(nan, format[4], code).to(tl.uint8)


@triton.jit
def _mix(x):
    x = (x ^ (x >> _MIX[0])) * _MIX[1]
    x = (x ^ (x >> _MIX[2])) * _MIX[3]
    return x ^ (x >> _MIX[4])


@triton.jit
def _uniforms(index, key):
    first = tl.load(key).to(tl.uint32, bitcast=True)
    second = tl.load(key + 1).to(tl.uint32, bitcast=True)
    bits = _mix(_mix(index.to(tl.uint32) ^ first) + second)
    return ((bits >> 9) * 2 + 1).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _power_of_two(size_bits, largest_bits: tl.constexpr):
    """The least power of two ≥ size/largest, by exponents; 1 for 0."""
    above = ((size_bits & 0x7FFFFF) > (largest_bits & 0x7FFFFF)).to(tl.int32)
    power = (size_bits >> 23) - (largest_bits >> 23) + above
    scale = tl.where(size_bits == 0, 1.0, _power(tl.maximum(power, -100)))
    return tl.where(size_bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def encode_block(
    x, codes, tiles, scale, key, rows, columns, across, inverse_largest, format: tl.constexpr,
    largest_bits: tl.constexpr, kind: tl.constexpr, stochastic: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """The codes and tile scales of one block of x[rows, columns]."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)[:, None]
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)[None, :]
    inside = (row < rows) & (column < columns)
    index = row.to(tl.int64) * columns + column
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(tl.abs(value) < _SMALLEST_NORMAL, value * 0.0, value)
    whole = tl.load(scale)
    if kind == 0:
        value = value * tl.div_rn(1.0, whole)
    else:
        down: tl.constexpr = block_rows // height
        right: tl.constexpr = block_columns // width
        shaped = tl.reshape(value, (down, height, right, width))  # [down, height, right, width]
        # [down, right]: a(tile); the bits order as the numbers do
        size_bits = tl.max(tl.max(_bits(shaped) & 0x7FFFFFFF, axis=3), axis=1)
        tile_row = tl.program_id(0) * down + tl.arange(0, down)[:, None]
        tile_column = tl.program_id(1) * right + tl.arange(0, right)[None, :]
        tile_index = tile_row * across + tile_column
        present = (tile_row * height < rows) & (tile_column < across)
        if kind == 1:
            step = _power_of_two(size_bits, largest_bits)
            tl.store(tiles + tile_index, step, mask=present)
        else:
            size = size_bits.to(tl.float32, bitcast=True)
            size = tl.where(size_bits >= 0x7F800000, float("nan"), size)
            wanted = size * inverse_largest * tl.div_rn(1.0, whole)  # a(tile) / largest / scale
            count, power = _round(wanted, 0.0, _E4M3, False)
            tl.store(tiles + tile_index, _code(wanted, count, power, _E4M3), mask=present)
            step = count * _power(power - 3) * whole  # E4M3 tile scale * scale
        inverse = tl.where(step == 0.0, 0.0, tl.div_rn(1.0, step))
        shaped = shaped * inverse[:, None, :, None]
        value = tl.reshape(shaped, (block_rows, block_columns))
    draws = _uniforms(index, key) if stochastic else 0.0
    count, power = _round(value, draws, format, stochastic)
    tl.store(codes + index, _code(value, count, power, format), mask=inside)


def launch_options(layout: Layout, stochastic: bool, blocks: tuple[int, ...] = BLOCKS) -> Any:
    """The constants that the kernel is compiled for, and compiler options."""
    height, width = layout.tile or (1, 1)
    largest = LARGEST[layout.element]
    return {
        "format": (*BITS[layout.element], largest, NAN[layout.element]),
        "largest_bits": torch.tensor(largest).view(torch.int32).item(),
        "kind": _KINDS[layout.scale],
        "stochastic": stochastic,
        "height": height,
        "width": width,
        "block_rows": max(height, blocks[0]),
        "block_columns": max(width, blocks[1]),
        "num_warps": blocks[2],
    }


@torch.library.custom_op("sabia::quantize_matrix", mutates_args=())
def _quantize(
    x: Tensor, element: str, kind: str, tile: list[int], key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x[R, C] → codes[R, C], tile scales (empty if the layout has no tiles), scale []."""
    layout = _layout(element, kind, tile)
    rows, columns = x.shape
    scale = global_scale(x, layout)
    codes, tiles = _outputs(x, layout)
    blocks = tuned_blocks("quantize", f"{element} {kind} {layout.tile or ''}".strip(), x, BLOCKS)
    fixed = launch_options(layout, key is not None, blocks)
    grid = triton.cdiv(rows, fixed["block_rows"]), triton.cdiv(columns, fixed["block_columns"])
    if x.numel():
        encode_block[grid](
            x, codes, tiles if layout.tile else codes, scale, scale if key is None else key,
            rows, columns, layout.tiles(rows, columns)[1],
            float(1 / torch.tensor(LARGEST[element])), **fixed,
        )  # fmt: skip
    return codes, tiles, scale


@_quantize.register_fake
def _(x, element, kind, tile, key):
    return *_outputs(x, _layout(element, kind, tile)), x.new_empty((), dtype=torch.float32)


def _layout(element: str, kind: str, tile: list[int]) -> Layout:
    return Layout(element, kind, (tile[0], tile[1]) if tile else None)


def _outputs(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Empty codes and tile scales."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    shape = layout.tiles(*x.shape) if layout.tile else (0,)
    kind = torch.float32 if layout.scale == "power2" else torch.uint8
    return codes, x.new_empty(shape, dtype=kind)


def quantize(x: Tensor, layout: Layout, key: object = None) -> Quantized:
    """See `sabia.kernels.quantize.interface.quantize`; key: int32[2] tensor or two integers."""
    words = None if key is None else key_tensor(key, x.device)
    tile = list(layout.tile or ())
    codes, tiles, scale = _quantize(x.contiguous(), layout.element, layout.scale, tile, words)
    return Quantized(codes, tiles if layout.tile else None, scale)
