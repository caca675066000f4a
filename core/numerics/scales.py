"""Scales of a matrix in a format of `schemes`, and codes for them; NumPy, the oracle.

A weight w[O, I] is stored as codes q and a scale s for each tile: w ≈ (q - z)·s/g, with zero points
z in asymmetric formats and the scale g of the whole matrix in NVFP4 (else 1). Scales are values of
their stored form, and codes are chosen for the scale that is stored, so that decoding gives what
was measured. `absmax` is the smallest scale that clips no value (up to its own rounding); `mse`
tries scales that cover other shares of the largest value, and keeps that with the least squared
error.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sabia.core.numerics.floats import (
    E4M3,
    SMALLEST_NORMAL,
    decode_e8m0,
    encode_e8m0,
    round_bfloat16,
)
from sabia.core.numerics.integers import code_range, group_width
from sabia.core.numerics.schemes import Scheme

Method = Literal["absmax", "mse"]
SHRINK = np.linspace(1.0, 0.5, 21)  # shares of the largest value that the mse search tries
GROW = (1.5, 1.25, 1.125)  # and in 4 bits: E2M1 has no value between 4 and 6
_CHUNK_ELEMENTS = 1 << 18  # rows are searched in pieces whose temporary arrays fit in a cache
ONE = np.float32(1)
F16_MAX = np.float32(65504)


@dataclass(frozen=True)
class Scales:
    """stored: values [down, across] of the stored scales, float32; zero: zero points of the same
    shape (int8), None in symmetric formats; whole: the scale of the matrix, by which the others are
    divided."""

    stored: np.ndarray
    zero: np.ndarray | None = None
    whole: np.float32 = ONE

    def rows(self, part: slice) -> "Scales":
        """Those of some rows of a matrix whose tiles are parts of one row."""
        zero = None if self.zero is None else self.zero[part]
        return Scales(self.stored[part], zero, self.whole)


def whole_scale(largest: float, scheme: Scheme) -> np.float32:
    """The scale g of a matrix: its largest value gets the largest E4M3 scale; 1 without one."""
    if scheme.scale != "e4m3" or not largest:
        return ONE
    with np.errstate(over="ignore"):
        scale = np.float32(E4M3.max * scheme.codes.max) / np.float32(largest)
    return scale if np.isfinite(scale) else ONE


def choose_scales(
    weight: np.ndarray, scheme: Scheme, method: Method = "mse", whole: np.float32 | None = None
) -> Scales:
    """Scales of weight[O, I] (float32); whole: g, by default that of this matrix alone.

    Only the scales of `scheme.searches` are searched. UsageError if tiles do not divide the columns
    of a row.
    """
    if whole is None:
        whole = whole_scale(float(np.abs(weight).max(initial=0)), scheme)
    if scheme.tile[0] != 1:
        largest = in_tiles(np.abs(weight), scheme).max((1, 3))
        return Scales(_stored(largest, scheme, whole), whole=whole)
    rows, columns = weight.shape
    width = group_width(columns, scheme.group)
    step = max(1, _CHUNK_ELEMENTS // max(columns, 1))
    pieces = [
        _of_groups(weight[start : start + step].reshape(-1, columns // width, width), scheme,
                   method if scheme.searches else "absmax", whole)
        for start in range(0, rows, step)
    ]  # fmt: skip
    stored, zero = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    return Scales(stored, None if scheme.symmetric else zero.astype(np.int8), whole)


def in_tiles(weight: np.ndarray, scheme: Scheme) -> np.ndarray:
    """weight[O, I], filled up with zeros, as [tiles down, height, tiles across, width]."""
    rows, columns = weight.shape
    down, across = scheme.tiles(rows, columns)
    height, width = scheme.tile[0] or rows, scheme.tile[1] or columns
    padded = np.pad(weight, ((0, down * height - rows), (0, across * width - columns)))
    return padded.reshape(down, height, across, width)


def _of_groups(
    weight: np.ndarray, scheme: Scheme, method: Method, whole: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """(scales, zero points) [O, groups] of weight[O, groups, group]."""
    best, least = None, np.empty(0)
    for scale, zero in candidates(weight, scheme, method, whole):
        if method == "absmax":
            return scale, zero
        error = _squared_error(weight, scale / whole, zero, scheme)
        if best is None:
            best, least = (scale, zero), error
            continue
        better = error < least
        best = np.where(better, scale, best[0]), np.where(better, zero, best[1])
        least = np.where(better, error, least)
    assert best is not None
    return best


def candidates(
    weight: np.ndarray, scheme: Scheme, method: Method, whole: np.float32
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(scales, zero points) [O, groups] that a search of weight[O, groups, group] tries."""
    lowest, highest = -np.abs(weight).max(-1), None  # [O, groups]
    if not scheme.symmetric:
        lowest, highest = (f(edge(weight, -1), 0) for f, edge in
                           ((np.minimum, np.min), (np.maximum, np.max)))  # fmt: skip
    shares = [*SHRINK, *(GROW if scheme.element == "e2m1" else ())] if method == "mse" else [1.0]
    for share in np.array(shares, np.float32):
        if highest is None:
            scale = _stored(-lowest * share, scheme, whole)
            yield scale, np.zeros_like(scale)
            continue
        first, last = code_range(scheme.bits)
        scale = _stored((highest - lowest) * share / 2, scheme, whole)
        yield scale, np.clip(np.rint(first - lowest * share / scale), first, last)


def _stored(largest: np.ndarray, scheme: Scheme, whole: np.float32) -> np.ndarray:
    """The stored scales, as float32, that map `largest` to the largest code; 1 where it is 0.

    In asymmetric formats `largest` is half of the range of the weights, and the codes' half range
    takes the place of the largest code.
    """
    top = scheme.codes.max
    if not scheme.symmetric:
        top = (2**scheme.bits - 1) / 2
    wanted = np.asarray(largest / top, np.float32)
    if scheme.scale == "bf16":
        stored = round_bfloat16(wanted)
    elif scheme.scale == "f16":
        stored = np.minimum(wanted, F16_MAX).astype(np.float16).astype(np.float32)
    elif scheme.scale == "e8m0":
        stored = decode_e8m0(encode_e8m0(np.maximum(wanted, SMALLEST_NORMAL)))
    else:
        stored = np.maximum(E4M3.decode(E4M3.encode(wanted * whole)), E4M3.values[1])
    return np.where((stored > 0) & (wanted > 0), stored, ONE)


def _squared_error(
    weight: np.ndarray, step: np.ndarray, zero: np.ndarray, scheme: Scheme
) -> np.ndarray:
    wide, shift = step[..., None], zero[..., None]  # [O, groups, 1]
    scaled = weight / wide
    if not scheme.symmetric:
        scaled += shift
    difference = scheme.codes.round(scaled)
    if not scheme.symmetric:
        difference -= shift
    difference *= wide
    difference -= weight
    return np.einsum("ogi,ogi->og", difference, difference)  # Σ (q·s - w)² of each group


def spread(values: np.ndarray, scheme: Scheme, shape: tuple[int, ...]) -> np.ndarray:
    """values[down, across] of tiles for the elements of [O, I], or an array that broadcasts."""
    height, width = scheme.tile
    if height not in (None, 1):
        values = np.repeat(values, height, 0)[: shape[0]]
    return values if width is None else np.repeat(values, width, 1)[:, : shape[1]]


def steps(
    scales: Scales, scheme: Scheme, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray | None]:
    """(s/g, zero points as float32 or None) of the elements of [O, I], see `spread`."""
    zero = scales.zero
    return (
        spread(scales.stored.astype(np.float32) / scales.whole, scheme, shape),
        None if zero is None else spread(zero.astype(np.float32), scheme, shape),
    )


def encode(weight: np.ndarray, scales: Scales, scheme: Scheme) -> np.ndarray:
    """Codes[O, I] (int8, or uint8 of floats) of weight[O, I]: to nearest, ties to even."""
    step, zero = steps(scales, scheme, weight.shape)
    scaled = weight / step
    return scheme.codes.encode(scaled if zero is None else scaled + zero)


def decode(codes: np.ndarray, scales: Scales, scheme: Scheme) -> np.ndarray:
    """float32 values of codes[O, I]."""
    step, zero = steps(scales, scheme, codes.shape)
    values = scheme.codes.decode(codes)
    return (values if zero is None else values - zero) * step
