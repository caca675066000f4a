"""NVFP4 and FP8 in plain torch, on any device: see `quantize` for the arithmetic.

`rounded` gives the values themselves, for emulated products; `quantize` the codes and
scales for the hardware units of a chip. Everything compiles without graph breaks. Hash words are
int32, whose products wrap as unsigned ones do.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.nn.functional as F

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

Tensor = torch.Tensor


def quantize(x: Tensor, layout: Layout, key: object = None) -> Quantized:
    """See `sabia.kernels.quantize.interface.quantize`; key: int32[2] tensor or two integers."""
    tiled, tiles, scale, draws = _prepare(x, layout, key)
    count, _, powers = _round(tiled, layout.element, draws)
    codes = _codes(tiled, count, powers, layout.element)
    stored = _e4m3_codes(tiles) if layout.scale == "e4m3" else tiles
    return Quantized(_cropped(codes, x), stored if layout.tile else None, scale)


def rounded(x: Tensor, layout: Layout, key: object = None) -> tuple[Tensor, Tensor]:
    """(values float32 [R, C], scale []) with x ≈ values · scale; BF16 holds every value."""
    tiled, tiles, scale, draws = _prepare(x, layout, key)
    count, steps, _ = _round(tiled, layout.element, draws)
    values = torch.copysign(count * steps, tiled) * tiles[:, None, :, None]
    return _cropped(values, x), scale


def pack_fp4(codes: Tensor) -> Tensor:
    """Bytes[..., C/2] of E2M1 codes[..., C]: the even column in the low half. C must be even."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """x[..., C] with each 16 columns transformed (C a multiple of 16), float32; signs[16]."""
    y = x.float().unflatten(-1, (-1, 16)) * signs  # [..., C / 16, 16]
    for stride in (1, 2, 4, 8):
        # one step of the fast Walsh-Hadamard transform
        low, high = y.unflatten(-1, (-1, 2, stride)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
    return (y * 0.25).flatten(-2)  # 1 / sqrt(16): orthonormal


def mix_tensor(x: Tensor) -> Tensor:
    """The hash on int32[...]."""
    for shift, factor in zip(MIX[::2], (*MIX[1::2], 1), strict=True):
        x = (x ^ ((x >> shift) & (0xFFFFFFFF >> shift))) * signed(factor)
    return x


def uniforms(rows: int, columns: int, key: object, device: torch.device) -> Tensor:
    """float32 [rows, columns] in (0, 1) by key and index."""
    key = key_tensor(key, device)
    index = torch.arange(rows * columns, device=device).to(torch.int32)
    bits = mix_tensor(mix_tensor(index ^ key[0]) + key[1])
    odd = ((bits >> 9) & 0x7FFFFF) * 2 + 1  # the upper 23 bits: u = odd * 2^-24
    return (odd.float() * 2.0**-24).view(rows, columns)


def key_tensor(key: Any, device: torch.device) -> Tensor:
    """int32[2] on the device, from a tensor or two 32-bit words."""
    if not isinstance(key, Tensor):
        key = torch.tensor([signed(word) for word in key], dtype=torch.int32)
    return key.to(device)


def global_scale(x: Tensor, layout: Layout) -> Tensor:
    """The scale [] of a matrix in `layout`."""
    if layout.scale == "power2":
        return torch.ones((), device=x.device)
    size = x.abs().amax().float()
    size = torch.where(size < SMALLEST_NORMAL, 0.0, size)
    size = torch.where(size < float("inf"), size, float("nan"))
    factor = 1.0 if layout.scale == "tensor" else LARGEST["e4m3"]
    return _at_least(size, _reciprocal(factor * LARGEST[layout.element]))


def signed(word: int) -> int:
    """A 32-bit word as int32 has it."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _prepare(
    x: Tensor, layout: Layout, key: object
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(x over its scales, tiled; tile scales [down, across]; scale; draws, tiled)."""
    wide = x.float()
    wide = torch.where(wide.abs() < SMALLEST_NORMAL, torch.copysign(wide.new_zeros(()), wide), wide)
    tiled = _tiled(wide, layout)
    tiles, scale = _scales(tiled, layout)
    step = tiles * scale
    inverse = torch.where(step == 0, 0.0, 1.0 / step)  # [down, across]
    draws = None if key is None else _tiled(uniforms(x.shape[0], x.shape[1], key, x.device), layout)
    return tiled * inverse[:, None, :, None], tiles, scale, draws


def _tiled(x: Tensor, layout: Layout) -> Tensor:
    """x[R, C], padded with zeros, as [down, height, across, width]."""
    rows, columns = x.shape
    height, width = layout.tile or (rows, columns)
    down, across = layout.tiles(rows, columns)
    if (down * height, across * width) != (rows, columns):
        x = F.pad(x, (0, across * width - columns, 0, down * height - rows))
    return x.reshape(down, height, across, width)


def _cropped(tiled: Tensor, like: Tensor) -> Tensor:
    if tiled.ndim == 4:
        tiled = tiled.flatten(2).flatten(0, 1)
    return tiled[: like.shape[0], : like.shape[1]]


def _scales(tiled: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    largest = LARGEST[layout.element]
    size = tiled.abs().amax((1, 3))  # [down, across]: a(tile)
    size = torch.where(size < float("inf"), size, float("nan"))
    scale = global_scale(size, layout)
    if layout.scale == "power2":
        return _power_of_two(size, largest), scale
    if layout.scale == "tensor":
        return torch.ones_like(size), scale
    # E4M3(a(tile) / largest / scale)
    count, steps, _ = _round(size * _reciprocal(largest) * (1.0 / scale), "e4m3", None)
    return count * steps, scale


def _reciprocal(x: float) -> float:
    """1/x rounded to float32."""
    return struct.unpack("f", struct.pack("f", 1 / x))[0]


def _at_least(size: Tensor, factor: float) -> Tensor:
    return torch.where(size == 0, 1.0, (size * factor).clamp(min=SMALLEST_SCALE))


def _power_of_two(size: Tensor, largest: float) -> Tensor:
    """The least power of two ≥ size/largest, by exponents: exact."""
    bits = size.contiguous().view(torch.int32)
    bound = struct.unpack("i", struct.pack("f", largest))[0]
    power = (bits >> 23) - (bound >> 23) + ((bits & 0x7FFFFF) > (bound & 0x7FFFFF))
    scale = ((power.clamp(min=-100) + 127) << 23).view(torch.float32)
    return torch.where(size == 0, 1.0, torch.where(size.isnan(), float("nan"), scale))


def _round(x: Tensor, element: str, draws: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """|x| as (count, step, exponent): value = count · step, all [...]; count keeps NaN."""
    _, mantissa, bias = BITS[element]
    size = x.abs().clamp(max=LARGEST[element])
    # exponent of |x|, at least that of the subnormal numbers
    power = ((size.contiguous().view(torch.int32) >> 23) - 127).clamp(1 - bias, 127)
    steps = ((power - mantissa + 127) << 23).view(torch.float32)
    # |x| in steps of 2^(power - mantissa)
    whole = size * ((mantissa - power + 127) << 23).view(torch.float32)
    if draws is None:
        return whole.round(), steps, power
    below = whole.floor()
    return below + (draws < whole - below), steps, power


def _codes(x: Tensor, count: Tensor, power: Tensor, element: str) -> Tensor:
    exponent, mantissa, bias = BITS[element]
    nan = count.isnan()
    whole = torch.where(nan, 0.0, count).to(torch.int32)
    code = ((power - (1 - bias)) << mantissa) + whole  # a carry of the count raises the exponent
    code = code | (torch.signbit(x).to(torch.int32) << (exponent + mantissa))
    return torch.where(nan, NAN[element], code).to(torch.uint8)


def _e4m3_codes(values: Tensor) -> Tensor:
    """Codes of numbers ≥ 0 that E4M3 holds."""
    count, _, power = _round(values, "e4m3", None)
    return _codes(values, count, power, "e4m3")
