"""Spherical k-means of unit vectors on disk, by mini-batches (Sculley 2010).

Centroids start at distinct rows. Each step takes a batch of rows, assigns every row to the centroid
of greatest cosine and moves each centroid to the mean of all rows ever assigned to it (a learning
rate of one over their number), normalized. Every few steps a centroid without rows is moved to the
row of the batch that is least similar to its centroid. Batches are drawn by (seed, step) and
computed in fixed blocks, so the result does not depend on the number of workers.
Dhillon and Modha 2001 for the cosine.
"""

from collections.abc import Iterator

import numpy as np

from sabia.core import stop
from sabia.core.shards.executors.processes import map_threads

BATCH = 4_096  # rows per step, or four per centroid if that is more
STEPS = 60
_REVIVE_EVERY = 5  # steps after which centroids without rows are moved
_CELLS = 1 << 24  # elements of a block of similarities


def centres(vectors: np.ndarray, k: int, seed: int) -> np.ndarray:
    """Centroids float32[k, d] of unit rows vectors[n, d], n >= k; a memory map is accepted."""
    n, drawn = len(vectors), np.random.default_rng([seed, 0])
    centres = np.array(vectors[np.sort(drawn.choice(n, k, replace=False))], np.float32)
    counts = np.zeros(k, np.int64)
    for step in range(1, STEPS + 1):
        stop.check()
        rows = np.random.default_rng([seed, step]).integers(0, n, min(n, max(BATCH, 4 * k)))
        batch = np.array(vectors[np.sort(rows)], np.float32)
        nearest, similarity = _nearest(batch, centres)
        order = np.argsort(nearest, kind="stable")
        chosen, heads, added = np.unique(nearest[order], return_index=True, return_counts=True)
        sums = np.add.reduceat(batch[order], heads)
        centres[chosen] = normalized(centres[chosen] * counts[chosen][:, None] + sums)
        counts[chosen] += added
        if step % _REVIVE_EVERY == 0 and step < STEPS - _REVIVE_EVERY:
            empty = np.flatnonzero(counts == 0)
            worst = np.argsort(similarity, kind="stable")[: len(empty)]
            centres[empty[: len(worst)]] = batch[worst]
    return centres


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to unit length; rows of length 0 or that are not finite become NaN."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        wide = vectors.astype(np.float64)
        return (wide / np.linalg.norm(wide, axis=1, keepdims=True)).astype(np.float32)


def _nearest(rows: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the centroid of each row, int64, the first of equals; their cosine float32)."""
    nearest, best = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    size = max(1, _CELLS // len(centres))
    for low in range(0, len(rows), size):
        similar = rows[low : low + size] @ centres.T
        nearest[low : low + size] = similar.argmax(axis=1)
        best[low : low + size] = similar.max(axis=1)
    return nearest, best


def assign(vectors: np.ndarray, centres: np.ndarray, jobs: int) -> np.ndarray:
    """int64[n]: the centroid nearest to each row, whatever the number of threads `jobs`."""
    size = max(1, _CELLS // len(centres))

    def blocks() -> Iterator[np.ndarray]:
        for low in range(0, len(vectors), size):
            yield np.array(vectors[low : low + size])

    parts = map_threads(lambda rows: _nearest(rows, centres)[0], blocks(), jobs)
    return np.concatenate([np.empty(0, np.int64), *parts])
