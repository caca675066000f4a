"""Arrays with known shape and dtype, whose rows are fetched from a device or a file when used.

`batches_by_size` groups arrays, or anything else with a size, into batches of a bounded size: for
one file or one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np


@dataclass(frozen=True)
class LazyArray:
    """An array that is fetched when used: `fetch(start, stop)` returns rows of its first axis.

    An array without axes is a single row, `fetch(0, 1)`. It has the attributes of a NumPy array
    (shape, dtype, iteration, np.asarray) that are needed to write it to a file or a device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[int, int], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[LazyArray]:
        return (self.row(number) for number in range(len(self)))

    def row(self, number: int) -> LazyArray:
        """One slice of the first axis, as a lazy array; a fetch reads all of the slice."""

        def fetch(start: int, stop: int) -> np.ndarray:
            whole = np.asarray(self.fetch(number, number + 1)[0])
            return whole[start:stop] if whole.ndim else whole

        return LazyArray(self.shape[1:], self.dtype, fetch)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> np.ndarray:
        whole = self.fetch(0, self.shape[0] if self.shape else 1)
        return np.array(whole, dtype, copy=copy)

    def __float__(self) -> float:
        return float(np.asarray(self))


T = TypeVar("T")


def batches_by_size(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Lists of consecutive items whose sizes sum to at most `limit`, or one larger item."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + size(item) > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
