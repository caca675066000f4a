"""BF16, E4M3, E5M2, E2M1 and E8M0 in NumPy: the oracles that other code is compared with.

BF16 is the upper half of a float32, rounded to nearest, ties to even. The small formats have a
sign, `exponent` bits of the given bias and `mantissa` bits (OCP FP8, arXiv 2209.05433; OCP
Microscaling Formats 1.0):
  E4M3  bias 7, largest 448, NaN at 0x7F and 0xFF, no infinities (the "fn" form)
  E5M2  bias 15, largest 57344, infinities at 0x7C and 0xFC, NaN above
  E2M1  bias 1, values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, no NaN
  E8M0  no sign: code c is 2^(c-127), 255 is NaN; for scales only
`encode` rounds to nearest, ties to even, or stochastically with given uniform numbers; larger
values and infinities become the largest value, NaN the format's NaN (in E2M1: 0). The sign of a
zero is kept. Subnormal float32 inputs count as zeros, because accelerators flush them.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

SMALLEST_NORMAL = np.float32(2.0**-126)


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of a NumPy or ml_dtypes name: 'float32', 'bfloat16', 'float8_e4m3fn'."""
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The BF16 numbers (of ml_dtypes) nearest to x[...], ties to even."""
    import ml_dtypes

    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


def round_bfloat16(x: np.ndarray) -> np.ndarray:
    """x rounded to BF16, as float32."""
    return bfloat16(x).astype(np.float32)


@dataclass(frozen=True)
class SmallFloat:
    """A signed format; `largest` is its largest finite code without the sign, `nan` its NaN."""

    exponent: int
    mantissa: int
    bias: int
    largest: int
    nan: int | None

    @cached_property
    def values(self) -> np.ndarray:
        """The float32 values of the codes 0 … largest, ascending."""
        code = np.arange(self.largest + 1)
        power, rest = code >> self.mantissa, code % 2**self.mantissa
        fraction = (rest + 2**self.mantissa * (power > 0)) / 2**self.mantissa
        # exponent field 0: subnormal, with the exponent of field 1 and no leading 1
        return np.ldexp(fraction, np.maximum(power, 1) - self.bias).astype(np.float32)

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(self.values[-1])

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent + self.mantissa

    @property
    def sign(self) -> int:
        """The code of the sign."""
        return 1 << (self.exponent + self.mantissa)

    @cached_property
    def table(self) -> np.ndarray:
        """The float32 value of every code."""
        half = np.full(self.sign, np.nan, np.float32)
        half[: len(self.values)] = self.values
        if self.nan is not None and self.largest + 1 < self.nan:
            half[self.largest + 1] = np.inf
        return np.concatenate([half, -half])

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """float32 values of codes (uint8)."""
        return self.table[np.asarray(codes, np.uint8)]

    def round(self, x: np.ndarray) -> np.ndarray:
        """Values (float32) nearest to finite x[...], ties to even: decode(encode(x)), faster."""
        size = np.abs(x)
        power = np.frexp(size)[1] - 1  # 2^power ≤ |x| < 2^(power+1)
        step = np.ldexp(np.float32(1), np.maximum(power, 1 - self.bias) - self.mantissa)
        return np.copysign(np.minimum(np.rint(size / step) * step, self.values[-1]), x)

    def encode(self, x: np.ndarray, uniforms: np.ndarray | None = None) -> np.ndarray:
        """Codes (uint8) of x[...]: nearest, or up where uniforms[...] < the distance from below.

        uniforms lie in [0, 1); with them E[decode(encode(x))] = x for |x| ≤ max.
        """
        x = np.asarray(x, np.float32)
        size = np.abs(x)
        size = np.minimum(np.where(size < SMALLEST_NORMAL, np.float32(0), size), self.values[-1])
        if uniforms is None:
            middle = (self.values[:-1] + self.values[1:]) / 2  # exact: few bits each
            code = np.searchsorted(middle, size, side="left")
            tie = size == middle[np.minimum(code, len(middle) - 1)]
            code = np.minimum(code + (tie & (code % 2 == 1)), self.largest)
        else:
            last = len(self.values) - 2
            below = np.minimum(np.searchsorted(self.values, size, side="right") - 1, last)
            low, high = self.values[below], self.values[below + 1]
            # P(up) = (|x| - low) / (high - low), so the expected value is |x|
            code = below + (uniforms < (size - low) / (high - low))
        code = code.astype(np.uint8) | (np.signbit(x) * np.uint8(self.sign))
        return np.where(np.isnan(x), np.uint8(self.nan or 0), code)


E2M1 = SmallFloat(2, 1, 1, 0x7, None)
E4M3 = SmallFloat(4, 3, 7, 0x7E, 0x7F)
E5M2 = SmallFloat(5, 2, 15, 0x7B, 0x7F)
FORMATS = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}


E8M0 = np.append(np.exp2(np.arange(255.0) - 127), np.nan).astype(np.float32)


def encode_e8m0(x: np.ndarray) -> np.ndarray:
    """Codes (uint8) of the smallest powers of two ≥ x[...] > 0, from 2^-127 to 2^127.

    Values that are not above 0 give code 0 (2^-127); NaN, infinities and x > 2^127 give 255.
    """
    x = np.asarray(x, np.float32)
    # x = f·2^p with 1/2 ≤ f < 1: 2^p is above x; if f = 1/2, x is 2^(p-1)
    fraction, power = np.frexp(np.where(np.isfinite(x) & (x > 0), x, np.float32(2.0**-127)))
    code = np.clip(power - (fraction == 0.5) + 127, 0, 255)
    return np.where(np.isfinite(x), code, 255).astype(np.uint8)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """float32 powers of two of E8M0 codes (uint8)."""
    return E8M0[np.asarray(codes, np.uint8)]
