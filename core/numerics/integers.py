"""Symmetric integers with a scale for each row or each group of columns; packing into int32.

A weight w[O, I] is stored as codes q[O, I] in [-2^(b-1), 2^(b-1)-1] and scales s[O, groups] with
w ≈ q·s. Scales are BF16 values, and codes are chosen for the scale that is stored, so that the
product is exact in float32. Packed form: code + 2^(b-1), 32/b codes an int32, column j in bits
b·(j mod 32/b), columns padded to whole words.
"""

from typing import Literal

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.numerics.floats import round_bfloat16

Method = Literal["absmax", "mse"]
SHRINK = np.linspace(1.0, 0.5, 21)  # fractions of the largest value that the mse search tries
_CHUNK_ELEMENTS = 1 << 22  # rows are searched in pieces, to bound temporary memory


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest code: (-8, 7) for 4 bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def group_width(columns: int, group: int | None) -> int:
    """Columns of one group; None is the whole row. UsageError if `group` does not divide."""
    if group is None:
        return columns
    if group < 1 or columns % group:
        fits = [g for g in (32, 64, 128, 256) if columns % g == 0]
        hint = f"groups of {', '.join(map(str, fits))} fit" if fits else "use one scale a row"
        raise UsageError(f"group size {group} does not divide {columns} columns; {hint}")
    return group


def grouped(weight: np.ndarray, group: int | None) -> np.ndarray:
    """weight[O, I] as a view [O, groups, group]."""
    rows, columns = weight.shape
    width = group_width(columns, group)
    return weight.reshape(rows, columns // width, width)


def stored_scale(largest: np.ndarray, bits: int) -> np.ndarray:
    """The BF16 scale (as float32) that maps `largest` to the largest code; 1 if it is 0."""
    scale = round_bfloat16(largest / code_range(bits)[1])  # s = |w|_max / (2^(b-1) - 1)
    return np.where(scale > 0, scale, np.float32(1))


def choose_scales(
    weight: np.ndarray, bits: int, group: int | None, method: Method = "mse"
) -> np.ndarray:
    """Scales[O, groups] of weight[O, I]: by its largest value, or by least squared error.

    `mse` tries scales that cover SHRINK of the largest value and clip the rest.
    """
    rows = max(1, _CHUNK_ELEMENTS // max(weight.shape[1], 1))
    pieces = [
        _scales(grouped(weight[start : start + rows], group), bits, method)
        for start in range(0, len(weight), rows)
    ]
    return np.concatenate(pieces)


def _scales(weight: np.ndarray, bits: int, method: Method) -> np.ndarray:
    largest = np.abs(weight).max(-1)  # [O, groups]
    best = stored_scale(largest, bits)
    if method == "absmax":
        return best
    least = _squared_error(weight, best, bits)
    for share in SHRINK[1:]:
        scale = stored_scale(largest * np.float32(share), bits)
        error = _squared_error(weight, scale, bits)
        better = error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return best


def _squared_error(weight: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    wide = scale[..., None]  # [O, groups, 1]
    difference = np.clip(np.rint(weight / wide), *code_range(bits)) * wide - weight
    return np.einsum("ogi,ogi->og", difference, difference)  # Σ (q·s - w)² of each group


def encode(weight: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """Codes[O, I] (int8) of weight[O, I] for scales[O, groups]: to nearest, ties to even."""
    wide = np.repeat(scale, weight.shape[1] // scale.shape[1], axis=1)  # [O, I]
    return np.clip(np.rint(weight / wide), *code_range(bits)).astype(np.int8)


def decode(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 values of codes[O, I] with scales[O, groups]."""
    wide = np.repeat(scale.astype(np.float32), codes.shape[1] // scale.shape[1], axis=1)
    return codes.astype(np.float32) * wide


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 words[O, ceil(I·bits/32)] of codes[O, I] (4 or 8 bits)."""
    per_word = 32 // bits
    padding = -codes.shape[1] % per_word
    raised = codes.astype(np.int16) - code_range(bits)[0]  # q + 2^(b-1), unsigned
    raised = np.pad(raised.astype(np.uint32), ((0, 0), (0, padding)))
    shifts = bits * np.arange(per_word, dtype=np.uint32)
    words = (raised.reshape(len(codes), -1, per_word) << shifts).sum(-1, dtype=np.uint32)
    return words.view(np.int32)


def unpack(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Codes[O, columns] (int8) of int32 words[O, n]; BadData if there are too few words."""
    per_word = 32 // bits
    if words.shape[1] * per_word < columns:
        raise BadData(f"{words.shape[1]} words of {per_word} codes (expected {columns} columns)")
    shifts = bits * np.arange(per_word, dtype=np.uint32)
    raised = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & (2**bits - 1)
    flat = raised.reshape(len(words), -1)[:, :columns]
    return (flat.astype(np.int16) + code_range(bits)[0]).astype(np.int8)
