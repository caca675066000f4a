"""The pieces of tensors that a process writes to a checkpoint, each fetched when it is written.

A piece is a box of a global tensor: name, offset, shape. Its array is a NumPy array or a
`LazyArray`, whose rows (slices of the first axis) are fetched when they are read; a writer reads
blocks of about BLOCK_BYTES, so that a copy from a device needs no more host memory than a block,
however large the tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.model.storage.lazy_array import LazyArray

BLOCK_BYTES = 64 << 20


Array = np.ndarray | LazyArray


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `name` at `offset` in a tensor of `global_shape` (default: all of it)."""

    name: str
    array: Array
    offset: tuple[int, ...] = ()
    global_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = self.array.shape if self.global_shape is None else self.global_shape
        whole = tuple(map(int, given))
        offset = tuple(map(int, self.offset)) or (0,) * len(whole)
        object.__setattr__(self, "global_shape", whole)
        object.__setattr__(self, "offset", offset)
        ends = [o + n for o, n in zip(offset, self.array.shape, strict=False)]
        # the box must be inside the whole tensor
        fits = len(self.array.shape) == len(whole) == len(offset)
        if not fits or min(offset, default=0) < 0 or any(map(int.__gt__, ends, whole)):
            raise UsageError(
                f"checkpoint: piece of {self.name} of shape {self.array.shape} at {offset} "
                f"(expected inside {whole})"
            )

    @property
    def key(self) -> str:
        """The name in its file, with the offset if it is not the whole tensor: `m/w@0,512`."""
        if self.array.shape == self.global_shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.offset))}"


def whole_pieces(state: Mapping[str, Array]) -> Iterator[Piece]:
    """Pieces of unsharded arrays."""
    return (Piece(name, array) for name, array in state.items())


def blocks(array: Array, limit: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """The bytes of an array in order, about `limit` at a time (at least one row)."""
    rows = array.shape[0] if array.shape else 1
    if not array.nbytes:
        return
    # rows per block
    step = max(1, limit * rows // array.nbytes)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if isinstance(array, LazyArray):
            part = array.fetch(start, stop)
        else:
            part = array[start:stop] if array.shape else array
        yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
