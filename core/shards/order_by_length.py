"""Batches of rows of similar length, in an order that is still a pure function of the position.

The samples of WINDOW batches are sorted by length and cut into batches, and the batches are
permuted: only differences within a batch need padding, and each epoch has other batches. A batch
remains a pure function of (seed, position), and every row of a window is in exactly one of its
batches, so a run resumes as with any other order.
"""

from dataclasses import dataclass, field, fields

import numpy as np

from sabia.core.shards.order import DataOrder, Permutation, key64

WINDOW = 64  # batches
_STREAM = 0x6C656E  # tells this permutation's keys from those of the sources


@dataclass(frozen=True)
class OrderByLength(DataOrder):
    """`lengths[n]` of the rows by number; `batch` rows a step; `total` samples in the run."""

    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0), compare=False)
    batch: int = 1
    total: int = 0

    def rows(self, start: int, count: int) -> np.ndarray:
        """See DataOrder.rows."""
        first, last = start // self.batch, -(-(start + count) // self.batch)
        indices = np.concatenate([self._batch(number) for number in range(first, last)])
        return indices[start - first * self.batch :][:count]

    def _batch(self, number: int) -> np.ndarray:
        window, index = divmod(number, WINDOW)
        first = window * WINDOW * self.batch
        size = min(WINDOW * self.batch, max(self.total - first, (index + 1) * self.batch))
        rows = super().rows(first, size)
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        mixed = Permutation(size // self.batch, key64(self.seed, _STREAM, window))
        chosen = int(mixed(np.array([index]))[0])
        return rows[chosen * self.batch : (chosen + 1) * self.batch]


def by_length(order: DataOrder, lengths: np.ndarray, batch: int, steps: int) -> OrderByLength:
    """The order of a run of `steps` batches, arranged so."""
    given = {f.name: getattr(order, f.name) for f in fields(DataOrder)}
    return OrderByLength(**given, lengths=lengths, batch=batch, total=steps * batch)
