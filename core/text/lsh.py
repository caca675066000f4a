"""Locality-sensitive hashing: bands and rows for a threshold, candidate pairs, components.

Two documents of Jaccard similarity s share at least one of b bands of r rows with probability
1 - (1 - s**r)**b. Candidates are found by sorting each band's digests: rows with equal digests lie
together, and each is paired with the next WINDOW of its bucket, so a bucket of m rows gives at
most WINDOW * m pairs, never m**2. Everything is a function of the digests and row numbers alone:
neither workers nor the order of the work can change it. Leskovec, Rajaraman, Ullman, MMDS ch. 3.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from sabia.core import stop

WINDOW = 8
CURVE_POINTS = 1001
# A verified false candidate costs a comparison, a missed pair stays in the corpus for good.
MISS_WEIGHT_VERIFIED = 0.95
MISS_WEIGHT_UNVERIFIED = 0.5


def hit_probability(similarity: ArrayLike, bands: int, rows: int) -> np.ndarray:
    """Probability that a pair of this similarity becomes a candidate."""
    return np.asarray(1 - (1 - np.asarray(similarity, float) ** rows) ** bands)


def choose_bands(threshold: float, permutations: int, miss_weight: float) -> tuple[int, int]:
    """(bands, rows) with bands * rows <= permutations of least weighted error.

    The error is (1 - miss_weight) * the area under the curve below the threshold (false
    candidates) + miss_weight * the area above the curve beyond it (missed pairs).
    """
    below = np.linspace(0, threshold, CURVE_POINTS)
    above = np.linspace(threshold, 1, CURVE_POINTS)
    best = (np.inf, 1, 1)
    for bands in range(1, permutations + 1):
        for rows in range(1, permutations // bands + 1):
            false = np.trapezoid(hit_probability(below, bands, rows), below)
            missed = np.trapezoid(1 - hit_probability(above, bands, rows), above)
            error = float((1 - miss_weight) * false + miss_weight * missed)
            best = min(best, (error, bands, rows))
    return best[1], best[2]


def candidate_pairs(digests: np.ndarray, rows: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Distinct pairs int64[p, 2] (first < second) of rows that share a band, sorted.

    digests[n, bands] uint64 (may be a memory map; one band is copied at a time); `rows` are the
    row numbers, ascending, that take part.
    """
    found = [np.empty(0, np.int64)]
    for band in range(digests.shape[1]):
        stop.check()
        found.append(np.unique(np.concatenate([*_band_pairs(digests[rows, band], window)])))
    packed = np.unique(np.concatenate(found))
    count = np.int64(max(len(rows), 1))
    return np.stack((rows[packed // count], rows[packed % count]), axis=1)


def _band_pairs(digest: np.ndarray, window: int) -> Iterator[np.ndarray]:
    """Pairs of one band, packed as first * n + second."""
    n = np.int64(max(len(digest), 1))
    order = np.argsort(digest, kind="stable")
    ordered = digest[order]
    yield np.empty(0, np.int64)
    for step in range(1, window + 1):
        same = np.flatnonzero(ordered[step:] == ordered[:-step])
        if not len(same):
            return
        yield order[same] * n + order[same + step]  # a stable sort keeps rows ascending


def components(count: int, pairs: np.ndarray) -> np.ndarray:
    """The least row of each row's connected component, int64[count], for edges int64[p, 2].

    Roots are hooked to smaller roots, then paths are halved, until no edge joins two trees.
    """
    parent = np.arange(count, dtype=np.int64)
    edges = pairs
    while len(edges):
        roots = parent[edges]
        low, high = roots.min(axis=1), roots.max(axis=1)
        joins = low != high
        edges, low, high = edges[joins], low[joins], high[joins]
        np.minimum.at(parent, high, low)
        while True:
            above = parent[parent]
            if np.array_equal(above, parent):
                break
            parent = above
    return parent
