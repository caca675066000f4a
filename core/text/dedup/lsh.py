"""Locality-sensitive hashing: bands and rows for a threshold, candidate pairs, components.

Two documents of Jaccard similarity s share at least one of b bands of r rows with probability
1 - (1 - s**r)**b. Candidates are found by sorting a band's digests: rows with equal digests are
adjacent, and each is paired with the next WINDOW of its bucket, so a bucket of m rows gives at
most WINDOW * m pairs, never m**2. Everything is a function of the digests and row numbers alone:
neither workers nor the order of the work can change it. Leskovec, Rajaraman, Ullman, MMDS ch. 3.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from sabia.core.options.dedup import DedupOptions
from sabia.kernels.minhash.definitions import SketchConfig

WINDOW = 8
_HALVED = 1 << 16  # rows whose paths are halved at once
MOST_NODES = 128  # of the sums that choose the bands
# A false candidate costs one comparison when pairs are verified; a missed pair is never removed.
MISS_WEIGHT_VERIFIED = 0.95
MISS_WEIGHT_UNVERIFIED = 0.5


def hit_probability(similarity: ArrayLike, bands: ArrayLike, rows: ArrayLike) -> np.ndarray:
    """Probability that a pair of this similarity becomes a candidate; arguments broadcast."""
    equal_band = np.asarray(similarity, float) ** np.asarray(rows)
    return np.asarray(1 - (1 - equal_band) ** np.asarray(bands))


@lru_cache(maxsize=8)  # a run calls it many times with the same arguments
def choose_bands(threshold: float, permutations: int, miss_weight: float) -> tuple[int, int]:
    """(bands, rows) with bands * rows <= permutations of least weighted error, as datasketch's
    MinHashLSH chooses them (whose import takes longer than a small run).

    The error is (1 - miss_weight) * the area under the curve below the threshold (false
    candidates) + miss_weight * the area above the curve beyond it (missed pairs). The areas are
    Gauss-Legendre sums: the curve is a polynomial of degree bands * rows.
    """
    counts = range(1, permutations + 1)
    pairs = np.array([(b, r) for b in counts for r in range(1, permutations // b + 1)], float)
    nodes, weights = np.polynomial.legendre.leggauss(min(permutations // 2 + 1, MOST_NODES))
    bands, rows = pairs[:, :1], pairs[:, 1:]  # [pairs, 1]
    low, high = threshold * (nodes + 1) / 2, threshold + (1 - threshold) * (nodes + 1) / 2
    false_candidates = hit_probability(low, bands, rows) @ weights * threshold / 2
    missed = (1 - hit_probability(high, bands, rows)) @ weights * (1 - threshold) / 2
    best = np.argmin((1 - miss_weight) * false_candidates + miss_weight * missed)
    return int(bands[best, 0]), int(rows[best, 0])


def sketch_of(options: DedupOptions, seed: int) -> SketchConfig:
    """Bands and rows for the threshold; no bands for the exact method."""
    if options.method == "exact":
        return SketchConfig(options.ngram, 0, 1, seed)
    weight = MISS_WEIGHT_VERIFIED if options.verify else MISS_WEIGHT_UNVERIFIED
    bands, rows = choose_bands(options.threshold, options.permutations, weight)
    return SketchConfig(options.ngram, bands, rows, seed, options.signatures, options.permutations)


def bucket_pairs(rows: np.ndarray, digests: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Pairs int64[p, 2] (first < second, sorted) of rows that share a digest of one band.

    rows int64[m] ascending, digests uint64[m]. The high bits of a digest and the row's position are
    packed into one integer, so that values can be sorted, which is much faster than an argsort.
    """
    bits = np.uint64(max(len(rows) - 1, 1).bit_length())
    keys = digests >> bits << bits
    keys |= np.arange(len(rows), dtype=np.uint64)
    keys.sort()
    position = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    same = np.flatnonzero(keys[1:] >> bits == keys[:-1] >> bits)
    del keys
    if (digests[position[same]] != digests[position[same + 1]]).any():
        # some digests are equal in their high bits only
        position = np.argsort(digests, kind="stable")
        same = np.flatnonzero(digests[position[1:]] == digests[position[:-1]])
    pairs_by_step, run = [np.empty((0, 2), np.int64)], same
    for step in range(1, window + 1):  # same[i]: positions i and i + 1 share a bucket
        pairs_by_step.append(np.stack((position[run], position[run + step]), axis=1))
        run = run[np.isin(run + step, same, assume_unique=True)]
        if not len(run):
            break
    pairs = np.concatenate(pairs_by_step)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))] if len(pairs) else pairs
    return rows[pairs]


def join(parent: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Components after adding edges int64[p, 2]: parent[n], which is changed and returned, holds
    the smallest row of each row's component, before and after.

    Roots are linked to smaller roots, then paths are halved, until no edge joins two trees.
    """
    edges = pairs
    while len(edges):
        roots = parent[edges]
        low, high = roots.min(axis=1), roots.max(axis=1)
        joins = low != high
        edges, low, high = edges[joins], low[joins], high[joins]
        np.minimum.at(parent, high, low)
        changed = len(edges) > 0
        while changed:
            changed = False
            for first in range(0, len(parent), _HALVED):
                part = parent[first : first + _HALVED]
                above = parent[part]
                if not np.array_equal(above, part):
                    part[:] = above
                    changed = True
    return parent
