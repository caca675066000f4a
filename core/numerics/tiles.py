"""NVFP4 and FP8 matrices in NumPy: the oracle of every engine of `sabia.kernels.quantize`.

The layouts and the arithmetic are described there; this is the simplest form of each step: tables
for the formats (`floats`), one line for each formula.
"""

import numpy as np

from sabia.core.numerics.floats import E4M3, FORMATS, SMALLEST_NORMAL, decode_e8m0, encode_e8m0
from sabia.kernels.quantize.definitions import MIX, SMALLEST_SCALE, Layout, Quantized

ONE = np.float32(1)


def uniforms(shape: tuple[int, ...], key: tuple[int, int]) -> np.ndarray:
    """float32 in (0, 1), odd multiples of 2^-24: a function of the key and the row-major index."""
    index = np.arange(np.prod(shape, dtype=np.int64)).astype(np.uint32)
    bits = _mix(_mix(index ^ np.uint32(key[0])) + np.uint32(key[1]))
    odd = (bits >> np.uint32(9)) * np.uint32(2) + np.uint32(1)
    return (odd * np.float32(2.0**-24)).astype(np.float32).reshape(shape)


def _mix(x: np.ndarray) -> np.ndarray:
    for shift, factor in zip(MIX[::2], (*MIX[1::2], 1), strict=True):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x


def encode(x: np.ndarray, layout: Layout, uniforms: np.ndarray | None = None) -> Quantized:
    """x[R, C] in `layout`; stochastically where uniforms[R, C] are given."""
    x = np.asarray(x, np.float32)
    x = np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)
    tiles, scale = _scales(x, layout)  # codes of the tile scales (or None), scale [] of the tensor
    step = np.broadcast_to(scale, x.shape)
    if tiles is not None:
        step = _spread(_tile_values(tiles, layout), x.shape, layout) * scale
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = x * np.where(step == 0, np.float32(0), ONE / step)
    codes = FORMATS[layout.element].encode(scaled, uniforms)
    return Quantized(codes, tiles, scale)


def decode(quantized: Quantized, layout: Layout) -> np.ndarray:
    """float32 values x̂[R, C] = value · tile scale · scale."""
    values = FORMATS[layout.element].decode(quantized.codes)
    if quantized.tiles is not None:
        values = values * _spread(_tile_values(quantized.tiles, layout), values.shape, layout)
    return values * quantized.scale


def simulate(x: np.ndarray, layout: Layout, uniforms: np.ndarray | None = None) -> np.ndarray:
    """x encoded in `layout` and decoded again."""
    return decode(encode(x, layout, uniforms), layout)


def pack_fp4(codes: np.ndarray) -> np.ndarray:
    """Bytes[..., C/2] of E2M1 codes[..., C]: the even column in the low half. C must be even."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_fp4(packed: np.ndarray) -> np.ndarray:
    """E2M1 codes[..., C] of bytes[..., C/2]."""
    return np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], -1)


def _scales(x: np.ndarray, layout: Layout) -> tuple[np.ndarray | None, np.ndarray]:
    largest = np.float32(FORMATS[layout.element].max)
    down, across = layout.tiles(*x.shape)
    height, width = layout.tile or (max(x.shape[0], 1), max(x.shape[1], 1))
    padded = np.pad(np.abs(x), ((0, down * height - len(x)), (0, across * width - x.shape[1])))
    tiles = padded.reshape(down, height, across, width)
    size = tiles.max((1, 3), initial=np.float32(0))  # the largest value of each tile
    size = np.where(np.isfinite(size), size, np.float32(np.nan))
    everything = size.max(initial=np.float32(0))
    if layout.scale == "tensor":
        return None, _at_least(everything, ONE / largest)  # s = amax / largest
    if layout.scale == "power2":
        return _power_of_two(size, largest), np.asarray(ONE)
    # NVFP4: the largest tile scale, amax / largest, is mapped to the largest E4M3 value
    scale = _at_least(everything, ONE / (largest * np.float32(E4M3.max)))
    return E4M3.encode(size * (ONE / largest) * (ONE / scale)), scale


def _at_least(size: np.ndarray, factor: np.float32) -> np.ndarray:
    scale = np.maximum(size * factor, np.float32(SMALLEST_SCALE))
    return np.asarray(np.where(size == 0, ONE, scale), np.float32)


def _power_of_two(size: np.ndarray, largest: np.float32) -> np.ndarray:
    wanted = size.astype(np.float64) / float(largest)  # exact enough: float32 / few bits
    codes = encode_e8m0(np.where(size == 0, 1.0, np.maximum(wanted, SMALLEST_SCALE)))
    return decode_e8m0(codes)


def _spread(tiles: np.ndarray, shape: tuple[int, ...], layout: Layout) -> np.ndarray:
    height, width = layout.tile or shape
    return np.repeat(np.repeat(tiles, height, 0), width, 1)[: shape[0], : shape[1]]


def _tile_values(tiles: np.ndarray, layout: Layout) -> np.ndarray:
    return E4M3.decode(tiles) if layout.scale == "e4m3" else tiles
