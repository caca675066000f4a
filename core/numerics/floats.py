"""BF16 and FP8 E4M3 in NumPy: the oracles that other code is compared with.

BF16 is the upper half of a float32, rounded to nearest, ties to even. E4M3 (the "fn" form of OCP
FP8, arXiv 2209.05433) has 4 exponent bits with bias 7, 3 mantissa bits, no infinities, NaN at
0x7F and 0xFF, largest value 448. Encoding rounds to nearest, ties to even, and saturates.
"""

import numpy as np

E4M3_MAX = 448.0
_BITS = np.uint32


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """The BF16 bits (uint16) nearest to x[...] (float32); NaN stays a quiet NaN."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(_BITS)
    rounded = (bits + _BITS(0x7FFF) + ((bits >> _BITS(16)) & _BITS(1))) >> _BITS(16)
    quiet = (bits >> _BITS(16)) | _BITS(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def from_bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    """float32 values of BF16 bits (uint16)."""
    return (np.asarray(bits, np.uint16).astype(_BITS) << _BITS(16)).view(np.float32)


def round_bfloat16(x: np.ndarray) -> np.ndarray:
    """x rounded to BF16, as float32."""
    return from_bfloat16_bits(bfloat16_bits(x))


def _e4m3_table() -> np.ndarray:
    """The float32 value of each of the 256 codes."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value[code & 127 == 127] = np.nan
    return np.where(code > 127, -value, value).astype(np.float32)


E4M3 = _e4m3_table()
_MIDPOINTS = (E4M3[:126] + E4M3[1:127]) / 2  # exact: neighbours differ by a power of two


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """float32 values of E4M3 codes (uint8)."""
    return E4M3[np.asarray(codes, np.uint8)]


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """E4M3 codes (uint8) nearest to x[...]: ties to even, saturating at ±448; NaN is 0x7F."""
    x = np.asarray(x, np.float32)
    size = np.abs(x)
    code = np.searchsorted(_MIDPOINTS, size, side="left")
    tie = size == _MIDPOINTS[np.minimum(code, len(_MIDPOINTS) - 1)]
    code = np.minimum(code + (tie & (code & 1 == 1)), 126).astype(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), code | (np.signbit(x) * np.uint8(0x80)))
