"""Tensors that a checkpoint's files fuse into one: split when read, fused when written.

A `FusedPart` (core.spec.tensors) is a strided block of a view of the file's tensor. Reading all
parts of a file tensor and writing them back gives the same bytes, because every element belongs to
one part.
"""

from collections.abc import Iterable

import numpy as np

from sabia.core.errors import BadData
from sabia.core.spec.tensors import FusedPart


def _slices(part: FusedPart) -> tuple[slice, ...]:
    return tuple(slice(*cut) for cut in part.cut)


def read_part(part: FusedPart, fused: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of `shape` that `part` selects in the file's tensor; a view if possible."""
    if fused.shape != part.shape:
        raise BadData(f"model: {part.file} has shape {fused.shape} (expected {part.shape})")
    return fused.reshape(part.view)[_slices(part)].transpose(part.order).reshape(shape)


def write_parts(parts: Iterable[tuple[FusedPart, np.ndarray]]) -> np.ndarray:
    """The file's tensor, assembled from the arrays of all its parts."""
    fused = np.zeros(0)
    for number, (part, array) in enumerate(parts):
        if not number:
            fused = np.empty(part.shape, array.dtype)
        block = fused.reshape(part.view)[_slices(part)]
        permuted = block.transpose(part.order)
        permuted[...] = array.reshape(permuted.shape)
    return fused
