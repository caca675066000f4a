"""Integer codes in [-2^(b-1), 2^(b-1)-1], and their packing into int32.

Packed form: code + 2^(b-1), 32/b codes an int32, column j in bits b·(j mod 32/b), columns padded to
whole words.
"""

import math
from dataclasses import dataclass

import numpy as np

from sabia.core.errors import BadData, UsageError


@dataclass(frozen=True)
class Integers:
    """Signed integers, with the methods of `floats.SmallFloat`."""

    bits: int

    @property
    def max(self) -> float:
        """The largest code."""
        return float(code_range(self.bits)[1])

    def round(self, x: np.ndarray) -> np.ndarray:
        """The nearest codes of x[...] as float32, ties to even."""
        return np.clip(np.rint(x), *code_range(self.bits))

    def encode(self, x: np.ndarray) -> np.ndarray:
        """The nearest codes (int8) of x[...], ties to even."""
        return self.round(x).astype(np.int8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """float32 values of codes."""
        return codes.astype(np.float32)


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest code: (-8, 7) for 4 bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


GROUPS = (128, 64, 32)


def usual_group(shape: tuple[int, ...], stacked: bool) -> int | None:
    """The largest of GROUPS that divides the columns of a matrix (of experts, rows and columns: one
    size for all matrices of an expert, which servers fuse); None: one scale per row."""
    columns = math.gcd(*shape[-2:]) if stacked else shape[-1]
    return next((size for size in GROUPS if columns % size == 0), None)


def group_width(columns: int, group: int | None) -> int:
    """Columns of one group; None is the whole row. UsageError if `group` does not divide."""
    if group is None:
        return columns
    if group < 1 or columns % group:
        fits = [g for g in (32, 64, 128, 256) if columns % g == 0]
        hint = f"groups of {', '.join(map(str, fits))} fit" if fits else "use one scale a row"
        raise UsageError(f"group size {group} does not divide {columns} columns; {hint}")
    return group


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
