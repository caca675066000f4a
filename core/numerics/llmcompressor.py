"""Rounding to nearest in the arithmetic of llm-compressor 0.14, for the same bytes; NumPy.

Its `QuantizationModifier` computes in the dtype of the model, here BF16: the largest value of a
tile, its quotient by the largest code, and the quotients of the weights by the scale are rounded to
BF16 one after the other (compressed-tensors 0.19, `quantization/utils/helpers.py`, function
`calculate_qparams`, and `lifecycle/forward_helpers.py`). Scales that are 0 become the epsilon of
their type. Powers of two (MXFP4, MXFP8) are those of the largest value, rounded up from 1.75, less
the exponent of the largest code. In NVFP4 the scale of the matrix is 2688 times the BF16 reciprocal
of the largest value, in BF16, and what is divided by it is float32.
"""

import numpy as np

from sabia.core.numerics.floats import E4M3, round_bfloat16
from sabia.core.numerics.integers import code_range, group_width
from sabia.core.numerics.scales import Scales, in_tiles, spread
from sabia.core.numerics.schemes import Scheme

EPSILON = {"bf16": np.float32(2.0**-7), "e4m3": np.float32(0.125), "e8m0": np.float32(2.0**-127)}


def whole_scale(largest: float) -> np.float32:
    """The scale of a matrix in NVFP4 whose largest value (BF16) is this."""
    if not largest:
        return np.float32(1)
    reciprocal = round_bfloat16(1 / np.array([largest], np.float32))
    return np.float32(round_bfloat16(reciprocal * np.float32(2688))[0])


def rounded(
    weight: np.ndarray, scheme: Scheme, whole: np.float32 = np.float32(1)
) -> tuple[np.ndarray, Scales]:
    """(codes[O, I], scales) of weight[O, I], float32 with BF16 values; whole: of `whole_scale`."""
    lowest, highest = _edges(weight, scheme)
    if scheme.symmetric:
        stored = _of_largest(np.maximum(-lowest, highest), scheme, whole)
        zero = None
    else:
        first, last = code_range(scheme.bits)
        stored = round_bfloat16(round_bfloat16(highest - lowest) / np.float32(last - first))
        stored = np.where(stored == 0, EPSILON[scheme.scale], stored)
        start = round_bfloat16(np.float32(first) - round_bfloat16(lowest / stored))
        zero = np.rint(np.clip(start, first, last)).astype(np.int8)
    step = spread((stored / whole).astype(np.float32), scheme, weight.shape)
    scaled = weight / step
    if scheme.scale != "e4m3":
        scaled = round_bfloat16(scaled)
    if zero is not None:
        shift = spread(zero.astype(np.float32), scheme, weight.shape)
        scaled = round_bfloat16(scaled + shift)
    return scheme.codes.encode(scaled), Scales(stored.astype(np.float32), zero, whole)


def _edges(weight: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """The smallest value up to 0 and the largest from 0 on of each tile [down, across]."""
    rows, columns = weight.shape
    if scheme.tile[0] == 1:
        tiles = weight.reshape(rows, -1, group_width(columns, scheme.group))
        return np.minimum(tiles.min(-1), 0), np.maximum(tiles.max(-1), 0)
    blocks = in_tiles(weight, scheme)
    return np.minimum(blocks.min((1, 3)), 0), np.maximum(blocks.max((1, 3)), 0)


def _of_largest(largest: np.ndarray, scheme: Scheme, whole: np.float32) -> np.ndarray:
    if scheme.scale == "e8m0":
        # a quarter of the mantissa of BF16 is added, which carries from 1.75 on
        bits = (largest.astype(np.float32).view(np.uint32) >> 16) + 32 & 0xFF80
        power = (bits >> 7).astype(np.int32) - 127
        offset = int(np.log2(scheme.codes.max))
        stored = np.ldexp(np.float32(1), np.maximum(power - offset, -127))
        return np.asarray(stored, np.float32)
    if scheme.element.startswith("int"):
        first, last = code_range(scheme.bits)
        top = np.float32(last - first) / 2
    else:
        top = np.float32(scheme.codes.max)
    stored = round_bfloat16(largest / top)
    if scheme.scale == "e4m3":
        stored = E4M3.decode(E4M3.encode(stored * whole))
    return np.where(stored == 0, EPSILON[scheme.scale], stored).astype(np.float32)
