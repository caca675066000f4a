"""Near-duplicates among the rows of a corpus: candidates band by band, compared, joined.

A band's digests are sorted in as many parts, by their highest bits, as keep the sort within `mem`.
Candidates whose rows are joined already are passed over, as comparing them could change nothing:
the components of all similar pairs come out, whatever the parts, whoever computes. The sets of a
slice of pairs are copied from disk and let go. A part takes PART_BYTES of memory, or PART_SHARE
bytes for each document of the corpus where that is more, so that a band is read eight times at
most.
"""

from collections.abc import Iterator

import numpy as np

from sabia.core import notes, stop
from sabia.core.notes import progress
from sabia.core.options.dedup import DedupOptions
from sabia.core.text.dedup import lsh
from sabia.core.text.dedup.signature_files import Corpus
from sabia.kernels.minhash.interface import jaccard as jaccard_similarity

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
