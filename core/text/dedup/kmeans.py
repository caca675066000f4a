"""Spherical k-means of unit vectors that lie on disk, by mini-batches (Sculley 2010).

Centres begin at distinct rows; each step takes a batch of rows, gives every row to the centre of
the greatest cosine and moves a centre to the mean of all rows it was ever given (its learning rate
is one over their number), back on the sphere. A centre that has drawn nothing for a while is put
where a batch was served worst. Batches are drawn by (seed, step) and computed in fixed blocks, so
the result does not depend on workers. Dhillon and Modha 2001 for the cosine.
"""

from collections.abc import Iterator

import numpy as np

from sabia.core import stop
from sabia.core.shards.executor import map_threads

BATCH = 4_096  # rows of a step, or four for each centre if that is more
STEPS = 60
_PATIENCE = 5  # steps after which centres without rows are put elsewhere
_CELLS = 1 << 24  # of a block of similarities


def centres(vectors: np.ndarray, k: int, seed: int) -> np.ndarray:
    """float32[k, d] of unit rows vectors[n, d], n >= k; a map on disk will do."""
    n, drawn = len(vectors), np.random.default_rng([seed, 0])
    found = np.array(vectors[np.sort(drawn.choice(n, k, replace=False))], np.float32)
    given = np.zeros(k, np.int64)
    for step in range(1, STEPS + 1):
        stop.check()
        rows = np.random.default_rng([seed, step]).integers(0, n, min(n, max(BATCH, 4 * k)))
        batch = np.array(vectors[np.sort(rows)], np.float32)
        nearest, similarity = _nearest(batch, found)
        _move(found, given, batch, nearest)
        if step % _PATIENCE == 0 and step < STEPS - _PATIENCE:
            _revive(found, given, batch, similarity)
    return found


def _move(found: np.ndarray, given: np.ndarray, batch: np.ndarray, nearest: np.ndarray) -> None:
    order = np.argsort(nearest, kind="stable")
    chosen, heads, counts = np.unique(nearest[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(batch[order], heads)
    given[chosen] += counts
    moved = found[chosen] * (given[chosen] - counts)[:, None] + sums
    found[chosen] = unit(moved)


def _revive(
    found: np.ndarray, given: np.ndarray, batch: np.ndarray, similarity: np.ndarray
) -> None:
    idle = np.flatnonzero(given == 0)
    worst = np.argsort(similarity, kind="stable")[: len(idle)]
    found[idle[: len(worst)]] = batch[worst]


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of length one; rows of no length, or not finite, become NaN."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        wide = vectors.astype(np.float64)
        return (wide / np.linalg.norm(wide, axis=1, keepdims=True)).astype(np.float32)


def _nearest(rows: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the centre of each row, int64, the first of equals; their cosine float32)."""
    nearest, best = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    size = max(1, _CELLS // len(found))
    for low in range(0, len(rows), size):
        similar = rows[low : low + size] @ found.T
        nearest[low : low + size] = similar.argmax(axis=1)
        best[low : low + size] = similar.max(axis=1)
    return nearest, best


def assign(vectors: np.ndarray, found: np.ndarray, jobs: int) -> np.ndarray:
    """int64[n]: the centre nearest to each row; `jobs` threads change nothing."""
    size = max(1, _CELLS // len(found))

    def blocks() -> Iterator[np.ndarray]:
        for low in range(0, len(vectors), size):
            yield np.array(vectors[low : low + size])

    parts = map_threads(lambda rows: _nearest(rows, found)[0], blocks(), jobs)
    return np.concatenate([np.empty(0, np.int64), *parts])
