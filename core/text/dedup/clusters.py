"""Clusters of duplicate documents, and the document of each cluster that is kept.

Exact duplicates are joined first; the first of each takes part in the search for near-duplicates,
whose candidate pairs are compared exactly when verification is on. Clusters are connected
components. The result is a function of the rows and their order: the earlier of equal rows wins.
Memory holds a row number (4 bytes below 2**31 rows) and a flag for each row, and a few numbers for
each cluster; decisions are written to a temporary file in input order.

Near-duplicates are found band by band: candidates, which are compared and joined. A band's digests
are sorted in as many parts, by their highest bits, as keep the sort within `mem`. Candidates whose
rows are joined already are passed over, as comparing them could change nothing: the components of
all similar pairs come out, whatever the parts, whoever computes. The sets of a slice of pairs are
copied from disk and let go. A part takes PART_BYTES of memory, or PART_SHARE bytes for each
document of the corpus where that is more, so that a band is read eight times at most.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from sabia.core import notes, stop
from sabia.core.notes import progress
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.spools import Spool, release_memory
from sabia.core.text.dedup import keep_rules, lsh
from sabia.core.text.dedup.signature_files import CHUNK_ROWS, Corpus, chosen
from sabia.kernels.minhash.interface import jaccard as jaccard_similarity

KEPT, EXACT, NEAR, URL, SEMANTIC = range(5)
REASONS = ("kept", "exact", "near", "url", "semantic")
ALONE = -1
DECISION = np.dtype([("cluster", "i8"), ("reason", "u1"), ("similarity", "f4")])
_SPREAD = np.uint64(0xD6E8FEB86659FD93)  # lane 0 of an exact hash need not be uniform
_DECIDED = 16  # parts of the rows, at most, whose decisions are made at once

# (removed rows int64[r] ascending, the row kept for each) -> (reasons uint8[r], similarities[r])
Judge = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray | int, np.ndarray | float]]
Chunks = Callable[[], Iterator[tuple[int, np.ndarray]]]  # (first row, values) of all rows in order

SORT_BYTES = 64  # per row, at the peak of sorting and pairing
PART_BYTES, PART_SHARE = 32 << 20, 8
_SLICE_PAIRS = 1024
_SLICE_SHINGLES = 1 << 22  # 16 MiB


def join_near(
    corpus: Corpus, parent: np.ndarray, distinct: np.ndarray, config: DedupOptions, engine: str
) -> np.ndarray:
    """parent[n] (smallest row of each row's component) with near-duplicates joined in place.

    distinct bool[n]: the rows that take part, each the smallest of its component.
    """
    compared = similar = 0
    window = lsh.WINDOW if config.verify else 1
    with progress(corpus.bands, "dedup: comparing", "bands") as bar:
        for band in range(corpus.bands):
            edges = [np.empty((0, 2), np.int64)]
            for rows, digests in parts_of(corpus, band, distinct, config.mem):
                pairs = lsh.bucket_pairs(rows, digests, window)
                pairs = pairs[parent[pairs[:, 0]] != parent[pairs[:, 1]]]
                compared += len(pairs)
                if config.verify:
                    pairs = pairs[jaccard(corpus, pairs, engine) >= config.threshold]
                similar += len(pairs)
                edges.append(pairs)
            parent = lsh.join(parent, np.concatenate(edges))
            bar.advance(1)
    if config.verify:
        similar_pairs = f"{similar:,} at {config.threshold:g} or more"
        notes.note(f"{compared:,} candidate pairs compared, {similar_pairs}")
    return parent


def part_bits(rows: int, count: int, mem: float) -> int:
    """Bits of a hash by which so many of the `count` rows of a corpus are divided for a sort."""
    limit = min(mem, max(PART_BYTES, PART_SHARE * count))
    return max(0, int(np.ceil(np.log2(max(rows * SORT_BYTES / limit, 1)))))


def parts_of(
    corpus: Corpus, band: int, distinct: np.ndarray, mem: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows int64, digests uint64) of one band, in parts whose sort fits into `mem` bytes."""
    bits = part_bits(int(np.count_nonzero(distinct)), corpus.count, mem)
    for part in range(1 << bits):
        chunks = [(np.empty(0, np.int64), np.empty(0, np.uint64))]
        for first, digests in corpus.band(band):
            stop.check()
            chosen = distinct[first : first + len(digests)]
            if bits:
                chosen = chosen & (digests >> np.uint64(64 - bits) == np.uint64(part))
            rows = np.flatnonzero(chosen)
            chunks.append((rows + first, digests[rows]))
        rows, digests = (np.concatenate(column) for column in zip(*chunks, strict=True))
        del chunks
        yield rows, digests


def jaccard(corpus: Corpus, pairs: np.ndarray, engine: str) -> np.ndarray:
    """float64[p]: exact similarity of the shingle sets of row pairs[p, 2]; NaN where the second has
    no shingles."""
    result = np.empty(len(pairs))
    rows, positions = np.unique(pairs, return_inverse=True)
    positions = positions.reshape(-1, 2)
    extents = corpus.extents(rows, engine)
    counts = (extents[:, 1] - extents[:, 0])[positions]
    for low, high in _slices(counts.sum(axis=1)):
        stop.check()
        used, places = np.unique(positions[low:high], return_inverse=True)
        sets = corpus.shingles(rows[used], extents[used], engine)
        result[low:high] = jaccard_similarity(*sets, places.reshape(-1, 2), engine)
    result[counts[:, 1] == 0] = np.nan
    return result


def _slices(shingles: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of pairs, bounded in their number and in their number of shingles[p]."""
    load, low = np.cumsum(shingles), 0
    while low < len(load):
        before = load[low - 1] if low else 0
        high = int(np.searchsorted(load, before + _SLICE_SHINGLES, side="right"))
        high = min(max(high, low + 1), low + _SLICE_PAIRS)
        yield low, high
        low = high


def estimate(corpus: Corpus, pairs: np.ndarray, rows_per_band: int) -> np.ndarray:
    """Similarity from the share of equal bands: share ** (1 / rows); NaN if no band is equal."""
    equal = np.zeros(len(pairs))
    rows, positions = np.unique(pairs, return_inverse=True)
    first, second = positions.reshape(-1, 2).T
    for band in range(corpus.bands):
        digests = corpus.digests(band, rows)
        equal += digests[first] == digests[second]
    share = np.where(equal > 0, equal / corpus.bands, np.nan)
    return share ** (1 / rows_per_band)


@dataclass(frozen=True)
class Clusters:
    """The outcome for n rows in c clusters of two or more: kept_row int64[c], size int64[c].

    decisions: DECISION of each row: its cluster, ALONE if it has none; KEPT, EXACT, NEAR …; of a
    removed row its similarity to the row kept, NaN where unknown.
    """

    decisions: Spool
    count: int
    kept_row: np.ndarray
    size: np.ndarray

    def parts(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """(row, DECISION[r]) of the rows from first to last - 1, part by part."""
        last = self.count if last is None else last
        return read_parts(self.decisions.file, DECISION, first, last)

    def rows(self, kept: bool, first: int = 0, last: int | None = None) -> np.ndarray:
        """The rows from first to last - 1 that are kept, or removed; int64, ascending."""
        parts = [np.empty(0, np.int64)]
        for row, part in self.parts(first, last):
            parts.append(row + np.flatnonzero((part["reason"] == KEPT) == kept))
        return np.concatenate(parts)

    def at(self, rows: np.ndarray) -> np.ndarray:
        """The decisions about ascending rows."""
        return np.concatenate([np.empty(0, DECISION), *chosen(self.parts(), rows)])


def read_parts(
    file: BinaryIO, kind: np.dtype[Any], first: int, last: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(row, kind[r]) of the rows from first to last - 1 of a file, part by part."""
    for row in range(first, last, CHUNK_ROWS):
        file.seek(row * kind.itemsize)
        yield row, np.fromfile(file, kind, min(CHUNK_ROWS, last - row))


def find_clusters(
    corpus: Corpus, config: DedupOptions, engine: str, prior: int = 0,
    known: Sequence[tuple[int, int, float]] = (),
) -> Clusters:  # fmt: skip
    """Join duplicates, choose the row to keep, and give the reason for each removed row.

    The first `prior` rows have priority over all others, the earliest of a cluster first. known:
    (one of these rows, another row, their similarity), from an index that stores no n-grams.
    """
    parent = _first_of_equal_rows(corpus, config.mem)
    firsts = Spool()
    firsts.append(parent)
    firsts.file.flush()
    kind = parent.dtype
    if config.method == "minhash":
        distinct = np.empty(corpus.count, bool)
        for row, counts in corpus.column("counts"):
            part = parent[row : row + len(counts)]
            rows = np.arange(row, row + len(counts))
            distinct[row : row + len(counts)] = (part == rows) & (counts > 0)
        parent = join_near(corpus, parent, distinct, config, engine)
        del distinct
        release_memory()
    pairs = np.array([pair[:2] for pair in known], np.int64).reshape(-1, 2)
    parent = lsh.join(parent, pairs)
    keep_rules.check_some((values for _, values in corpus.column("worth")), config.keep)

    def priority() -> Iterator[tuple[int, np.ndarray]]:
        for row, values in corpus.column("worth"):
            values[: max(0, prior - row)] = np.inf
            yield row, values

    def first_of(rows: np.ndarray) -> np.ndarray:
        """The first row with the same exact hash."""
        distinct, position = np.unique(rows, return_inverse=True)
        parts = read_parts(firsts.file, kind, 0, corpus.count)
        first = np.concatenate([np.empty(0, kind), *chosen(parts, distinct)])
        return first[position].astype(np.int64)

    similar_row = {row: (one, similarity) for one, row, similarity in known}

    def judge(removed: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, first_kept = first_of(removed), first_of(kept)
        exact = first == first_kept
        near = np.stack((first, first_kept), axis=1)[~exact]
        similarity = np.ones(len(removed))
        if config.with_shingles:
            similarity[~exact] = jaccard(corpus, near, engine)
        elif len(near):
            similarity[~exact] = estimate(corpus, near, lsh.sketch_of(config, 0).rows)
        for i in range(len(removed) if similar_row else 0):
            one, value = similar_row.get(int(removed[i]), (ALONE, 0.0))
            if one == kept[i]:
                similarity[i] = value
        return np.where(exact, EXACT, NEAR), similarity

    return choose_kept(parent, priority, judge)


def _first_of_equal_rows(corpus: Corpus, mem: float) -> np.ndarray:
    """`first_of_equal` of a corpus, sorted in parts; the parts wait on disk, so that a sort and the
    array of all rows are not in memory at the same time."""
    kind = np.int32 if corpus.count < 1 << 31 else np.int64
    parts, counts = Spool(), list[int]()
    bits = part_bits(corpus.count, corpus.count, mem)
    for part in range(1 << bits):
        chunks = [(np.empty(0, np.int64), np.empty((0, 2), np.uint64))]
        for first, exact in corpus.column("exact"):
            stop.check()
            rows = np.arange(len(exact))
            if bits:
                mixed = exact[:, 0] * _SPREAD >> np.uint64(64 - bits)
                rows = np.flatnonzero(mixed == np.uint64(part))
            chunks.append((rows + first, exact[rows]))
        rows, keys = (np.concatenate(column) for column in zip(*chunks, strict=True))
        del chunks
        firsts = rows[first_of_equal(keys)]
        parts.append(np.stack((rows, firsts)).astype(kind))
        counts.append(len(rows))
    del rows, keys, firsts
    release_memory()
    parts.file.seek(0)
    result = np.empty(corpus.count, kind)
    for count in counts:
        stored = np.fromfile(parts.file, kind, 2 * count).reshape(2, count)
        result[stored[0]] = stored[1]
    return result


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


def choose_kept(component: np.ndarray, priority: Chunks, judge: Judge) -> Clusters:
    """Keep the row of highest priority[n] of each component of two or more, the first of equals.

    component[n] holds one row of each row's component, at that row too; the others are removed, for
    the reason that `judge` gives.
    """
    count = len(component)
    others = [np.empty(0, component.dtype)]
    for low in range(0, count, CHUNK_ROWS):
        part = component[low : low + CHUNK_ROWS]
        others.append(part[part != np.arange(low, low + len(part))])
    roots, size = np.unique(np.concatenate(others), return_counts=True)
    del others

    def members(row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows in clusters, their clusters) of a part of the rows."""
        part = component[row : row + length]
        number = np.minimum(np.searchsorted(roots, part), max(len(roots) - 1, 0))
        inside = np.flatnonzero(roots[number] == part) if len(roots) else number[:0]
        return row + inside, number[inside]

    best = np.full(len(roots), -np.inf)
    for row, values in priority():
        rows, number = members(row, len(values))
        np.maximum.at(best, number, values[rows - row])
    kept_row = np.full(len(roots), count, np.int64)
    for row, values in priority():
        rows, number = members(row, len(values))
        chosen = values[rows - row] == best[number]
        np.minimum.at(kept_row, number[chosen], rows[chosen])
    del best
    decisions = Spool()
    step = max(CHUNK_ROWS, -(-count // _DECIDED))
    for row in range(0, count, step):
        stop.check()
        table = np.zeros(min(step, count - row), DECISION)
        table["cluster"], table["similarity"] = ALONE, np.nan
        rows, number = members(row, len(table))
        table["cluster"][rows - row] = number
        removed = rows != kept_row[number]
        rows, number = rows[removed], number[removed]
        table["reason"][rows - row], table["similarity"][rows - row] = judge(rows, kept_row[number])
        decisions.append(table)
    decisions.file.flush()
    return Clusters(decisions, count, kept_row, size + 1)
