"""Clusters of duplicate documents, and the document of each cluster that is kept.

Exact duplicates are joined first; the first of each takes part in the search for near-duplicates,
whose candidate pairs are compared exactly when verification is on. Clusters are connected
components. The result is a function of the rows and their order: the earlier of equal rows wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sabia.core.options.dedup import DedupOptions
from sabia.core.text.dedup import keep_rules, lsh
from sabia.core.text.dedup.near_duplicates import estimate, jaccard, join_near
from sabia.core.text.dedup.signature_files import Corpus

KEPT, EXACT, NEAR, URL, SEMANTIC = range(5)
REASONS = ("kept", "exact", "near", "url", "semantic")
ALONE = -1


@dataclass(frozen=True)
class Clusters:
    """The outcome for n rows in c clusters of two or more.

    of_row int64[n]: the row's cluster, ALONE if it has none; reason uint8[n]: KEPT, EXACT, NEAR …;
    similarity float32[n]: of a removed row to the row kept, NaN where unknown;
    kept_row int64[c], size int64[c].
    """

    of_row: np.ndarray
    reason: np.ndarray
    similarity: np.ndarray
    kept_row: np.ndarray
    size: np.ndarray


def find_clusters(
    corpus: Corpus, config: DedupOptions, engine: str, prior: int = 0,
    known: Sequence[tuple[int, int, float]] = (),
) -> Clusters:  # fmt: skip
    """Join duplicates, choose the row to keep, and give the reason for each removed row.

    The first `prior` rows have priority over all others, the earliest of a cluster first. known:
    (one of these rows, another row, their similarity), from an index that stores no n-grams.
    """
    first = first_of_equal(corpus.exact)
    parent = first
    if config.method == "minhash":
        distinct = (first == np.arange(corpus.count)) & (corpus.counts > 0)
        parent = join_near(corpus, parent, distinct, config, engine)
    pairs = np.array([pair[:2] for pair in known], np.int64).reshape(-1, 2)
    parent = lsh.join(parent, pairs)
    priority = keep_rules.all_priorities([corpus.priority], config.keep)
    priority[:prior] = np.inf
    clusters = choose_kept(parent, priority)
    # the reason of each removed row and its similarity to the row kept
    removed = np.flatnonzero(clusters.reason != KEPT)
    kept = clusters.kept_row[clusters.of_row[removed]]
    exact = first[removed] == first[kept]
    clusters.reason[removed[exact]] = EXACT
    clusters.similarity[removed[exact]] = 1.0
    near = np.stack((first[removed[~exact]], first[kept[~exact]]), axis=1)
    if config.with_shingles:
        similarities = jaccard(corpus, near, engine)
        counted = corpus.counts[near[:, 1]] > 0
        clusters.similarity[removed[~exact]] = np.where(counted, similarities, np.nan)
    elif len(near):
        rows = lsh.sketch_of(config, 0).rows
        clusters.similarity[removed[~exact]] = estimate(corpus, near, rows)
    for one, row, similarity in known:
        if clusters.kept_row[clusters.of_row[row]] == one:
            clusters.similarity[row] = similarity
    return clusters


def first_of_equal(exact: np.ndarray) -> np.ndarray:
    """int64[n]: the first row with the same exact hash, for exact[n, 2]."""
    order = np.lexsort((exact[:, 1], exact[:, 0]))  # stable: equal rows stay ascending
    ordered = exact[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    heads = order[np.flatnonzero(is_first)]
    result = np.empty(len(order), np.int64)
    result[order] = heads[np.cumsum(is_first) - 1]
    return result


def choose_kept(component: np.ndarray, priority: np.ndarray, reason: int = NEAR) -> Clusters:
    """Keep the row of highest priority[n] of each component of two or more, the first of equals.

    component[n] holds one row of each row's component; the others are removed for `reason`.
    """
    count = len(component)
    sizes = np.bincount(component, minlength=count)
    roots = np.flatnonzero(sizes > 1)
    number = np.full(count, ALONE, np.int64)
    number[roots] = np.arange(len(roots))
    of_row = number[component]
    members = np.flatnonzero(of_row != ALONE)
    order = np.lexsort((members, -priority[members], of_row[members]))
    _, heads = np.unique(of_row[members][order], return_index=True)
    kept_row = members[order][heads]
    why = np.where(of_row == ALONE, KEPT, reason).astype(np.uint8)
    why[kept_row] = KEPT
    unknown = np.full(count, np.nan, np.float32)
    return Clusters(of_row, why, unknown, kept_row, sizes[roots])
