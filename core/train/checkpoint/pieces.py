"""What a process puts into a checkpoint: pieces of tensors, fetched when their turn comes.

A piece is a box of a global tensor: name, offset, shape. Its array is a NumPy array or a
`LazyArray`, of which only shape and dtype are known until rows (slices of the first axis) are
asked for; a writer asks for blocks of about BLOCK_BYTES, so that a copy from a device costs no more
host memory than a block, however large the tensor.
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
    """A box of the tensor `name`: all of it unless `offset` and `global_shape` say where."""

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
        fits = len(self.array.shape) == len(whole) == len(offset)
        if not fits or min(offset, default=0) < 0 or any(map(int.__gt__, ends, whole)):
            raise UsageError(
                f"checkpoint: piece of {self.name} of shape {self.array.shape} at {offset} "
                f"(expected inside {whole})"
            )

    @property
    def key(self) -> str:
        """The name in its file; what is not the whole tensor bears its offset: `m/w@0,512`."""
        if self.array.shape == self.global_shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.offset))}"


def whole_pieces(state: Mapping[str, Array]) -> Iterator[Piece]:
    """Pieces of arrays that are held whole."""
    return (Piece(name, array) for name, array in state.items())


def blocks(array: Array, limit: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """The bytes of an array in order, about `limit` at a time (a row at least)."""
    rows = array.shape[0] if array.shape else 1
    if not array.nbytes:
        return
    step = max(1, limit * rows // array.nbytes)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if isinstance(array, LazyArray):
            part = array.fetch(start, stop)
        else:
            part = array[start:stop] if array.shape else array
        yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
