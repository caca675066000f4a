"""Which documents are duplicates of which, and which one of each cluster stays.

Exact duplicates are joined first; the first of each goes on to the near-duplicates, whose
candidate pairs are compared exactly when verification is on. Clusters are connected components.
All of it is a function of the rows and their order: earlier rows win ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sabia.core import notes, stop
from sabia.core.errors import BadData
from sabia.core.shards.sources import Source
from sabia.core.text import lsh
from sabia.core.text.dedup_config import DedupConfig
from sabia.core.text.sketching import Corpus, shingle_sets_of
from sabia.kernels import minhash

KEPT, EXACT, NEAR, URL, SEMANTIC = range(5)
REASONS = ("kept", "exact", "near", "url", "semantic")
ALONE = -1
_SLICE = 1 << 16


@dataclass(frozen=True)
class Clusters:
    """The outcome for n rows in c clusters of two or more.

    of_row int64[n]: the row's cluster, ALONE if it has none; reason uint8[n]: KEPT, EXACT, NEAR …;
    similarity float32[n]: of a row that goes to the one kept, NaN where unknown;
    kept_row int64[c], size int64[c].
    """

    of_row: np.ndarray
    reason: np.ndarray
    similarity: np.ndarray
    kept_row: np.ndarray
    size: np.ndarray


class ShingleSets:
    """Shingle sets of the rows that are candidates, for exact similarity."""

    def __init__(
        self, sources: Sequence[Source], corpus: Corpus, rows: np.ndarray, ngram: int,
        engine: str, jobs: int,
    ) -> None:  # fmt: skip
        self.rows, self.engine = rows, engine
        found = shingle_sets_of(sources, corpus.starts, rows, ngram, engine, jobs)
        self.values, self.starts = found

    def jaccard(self, pairs: np.ndarray) -> np.ndarray:
        """float64[p] of row pairs[p, 2]."""
        result = np.empty(len(pairs))
        for low in range(0, len(pairs), _SLICE):
            stop.check()
            places = np.searchsorted(self.rows, pairs[low : low + _SLICE])
            part = minhash.jaccard(self.values, self.starts, places, self.engine)
            result[low : low + len(part)] = part
        return result


def find_clusters(
    corpus: Corpus, sources: Sequence[Source], config: DedupConfig, engine: str, jobs: int
) -> Clusters:
    """Join duplicates, choose whom to keep, and say why each of the others goes."""
    everyone = np.arange(corpus.count)
    first = first_of_equal(corpus.exact)
    edges = np.stack((first, everyone), axis=1)[first != everyone]
    sets = None
    if config.method == "minhash":
        distinct = np.flatnonzero((first == everyone) & (corpus.words > 0))
        near, sets = _near_pairs(corpus, sources, distinct, config, engine, jobs)
        edges = np.concatenate((edges, near))
    clusters = choose_kept(lsh.components(corpus.count, edges), _worth(corpus, config.keep))
    _explain(clusters, first, corpus, sets)
    return clusters


def _near_pairs(
    corpus: Corpus, sources: Sequence[Source], distinct: np.ndarray, config: DedupConfig,
    engine: str, jobs: int,
) -> tuple[np.ndarray, ShingleSets | None]:  # fmt: skip
    """Pairs of near-duplicates among distinct rows, and the sets that showed it."""
    pairs = lsh.candidate_pairs(corpus.digests, distinct, lsh.WINDOW if config.verify else 1)
    if not config.verify:
        return pairs, None
    sets = ShingleSets(sources, corpus, np.unique(pairs), config.ngram, engine, jobs)
    true = sets.jaccard(pairs) >= config.threshold
    notes.note(
        f"{len(pairs):,} candidate pairs, {int(true.sum()):,} at {config.threshold:g} or more"
    )
    return pairs[true], sets


def first_of_equal(exact: np.ndarray) -> np.ndarray:
    """int64[n]: the first row with the same exact hash, for exact[n, 2]."""
    order = np.lexsort((exact[:, 1], exact[:, 0]))  # stable: equal rows stay ascending
    ordered = exact[order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    heads = order[np.flatnonzero(fresh)]
    result = np.empty(len(order), np.int64)
    result[order] = heads[np.cumsum(fresh) - 1]
    return result


def choose_kept(component: np.ndarray, worth: np.ndarray, reason: int = NEAR) -> Clusters:
    """The row of most worth[n] kept of each component of two or more, the first of equals.

    component[n] holds a row's component's least row; the others go for `reason`.
    """
    count = len(component)
    sizes = np.bincount(component, minlength=count)
    roots = np.flatnonzero(sizes > 1)
    number = np.full(count, ALONE, np.int64)
    number[roots] = np.arange(len(roots))
    of_row = number[component]
    members = np.flatnonzero(of_row != ALONE)
    order = np.lexsort((members, -worth[members], of_row[members]))
    _, heads = np.unique(of_row[members][order], return_index=True)
    kept_row = members[order][heads]
    why = np.where(of_row == ALONE, KEPT, reason).astype(np.uint8)
    why[kept_row] = KEPT
    unknown = np.full(count, np.nan, np.float32)
    return Clusters(of_row, why, unknown, kept_row, sizes[roots])


def _worth(corpus: Corpus, keep: str) -> np.ndarray:
    """What makes a row better than its duplicates, float64[n]; a missing score is worst."""
    if keep == "first":
        return np.zeros(corpus.count)
    if keep == "longest" or corpus.score is None:
        return corpus.size.astype(float)
    if corpus.count and np.isnan(corpus.score).all():
        raise BadData(f"--keep {keep}: no document has this score; sabia classify adds scores")
    return np.where(np.isnan(corpus.score), -np.inf, corpus.score)


def _explain(
    clusters: Clusters, first: np.ndarray, corpus: Corpus, sets: ShingleSets | None
) -> None:
    """Fill in why each removed row goes, and how similar it is to the row kept."""
    gone = np.flatnonzero(clusters.reason != KEPT)
    kept = clusters.kept_row[clusters.of_row[gone]]
    exact = first[gone] == first[kept]
    clusters.reason[gone[exact]] = EXACT
    clusters.similarity[gone[exact]] = 1.0
    near = np.stack((first[gone[~exact]], first[kept[~exact]]), axis=1)
    if sets is not None:
        clusters.similarity[gone[~exact]] = sets.jaccard(near)
    elif len(near):
        clusters.similarity[gone[~exact]] = estimate(corpus.digests, near, corpus.rows_per_band)


def estimate(digests: np.ndarray, pairs: np.ndarray, rows: int) -> np.ndarray:
    """Similarity from the share of equal bands: share ** (1 / rows); NaN if no band is equal."""
    result = np.empty(len(pairs))
    for low in range(0, len(pairs), _SLICE):
        part = pairs[low : low + _SLICE]
        share = (digests[part[:, 0]] == digests[part[:, 1]]).mean(axis=1)
        result[low : low + len(part)] = np.where(share > 0, share, np.nan) ** (1 / rows)
    return result
