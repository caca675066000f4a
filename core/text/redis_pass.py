"""A run of dedup against an index in Redis: what is in it drops, what stays goes into it.

The index holds signatures and no n-grams, so where candidates are verified they are by the share
of equal slots, an estimate of the Jaccard similarity with a deviation of sqrt(s (1 - s) / slots),
0.04 at 0.7 of 128. An indexed document stays before all new ones, and so does away with the whole
cluster of new documents that one like it is in. Inputs are read once more, for their signatures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes, stop
from sabia.core.errors import BadData
from sabia.core.options.dedup import DedupOptions
from sabia.core.progress import progress
from sabia.core.shards.sources import Source
from sabia.core.text import keep, lsh
from sabia.core.text.clusters import ALONE, EXACT, KEPT, Clusters, choose_kept
from sabia.core.text.redis_index import Known, RedisIndex, names, placed
from sabia.core.text.sketch_files import Corpus
from sabia.core.text.sketching import Spool, batches_of, in_order, text_buffers
from sabia.kernels import minhash
from sabia.kernels.minhash import SketchConfig

BATCH = 256  # documents of a round trip


@dataclass(frozen=True)
class Matches:
    """Rows int64[m] of the corpus that are like an indexed document, the likest.

    place int64[m]: which of `known`; similarity float32[m].
    """

    rows: np.ndarray
    place: np.ndarray
    similarity: np.ndarray
    known: list[Known]


@dataclass(frozen=True)
class WithIndexed:
    """Ids of the rows of a corpus and, after them, of indexed documents."""

    corpus: Corpus
    indexed: list[str]

    def take(self, rows: np.ndarray) -> pa.Array:
        """Ids of ascending rows."""
        count = self.corpus.count
        inside = self.corpus.take(rows[rows < count])
        others = [self.indexed[row - count] for row in rows[rows >= count].tolist()]
        return pa.concat_arrays([inside, pa.array(others, pa.string())])


def take_out(
    index: RedisIndex, sources: Sequence[Source], corpus: Corpus, found: Clusters,
    config: DedupOptions, engine: str, jobs: int,
) -> tuple[Clusters, WithIndexed]:  # fmt: skip
    """Clusters with indexed documents as rows after the corpus's own; inserts what stays."""
    slots = _signatures(sources, index.sketch, engine, jobs)
    if len(slots) != corpus.count:
        raise BadData("an input changed while it was being deduplicated; run again")
    asked = np.flatnonzero((corpus.counts > 0) & (found.reason != EXACT))
    matches = find_matches(index, slots, asked, config.threshold if config.verify else 0.0)
    found = joined(found, keep.whole([corpus.worth], config.keep), matches)
    kept = np.flatnonzero((found.reason[: corpus.count] == KEPT) & (corpus.counts > 0))
    _insert(index, corpus.take(kept), slots, kept)
    notes.note(
        f"{index.address.said}: {len(matches.rows):,} documents like one there,"
        f" {len(kept):,} inserted; MinHashLSH(num_perm={config.permutations},"
        f" params=({index.sketch.bands}, {index.sketch.rows})) reads it"
    )
    return found, WithIndexed(corpus, names(matches.known))


def _signatures(
    sources: Sequence[Source], sketch: SketchConfig, engine: str, jobs: int
) -> np.ndarray:
    """The slots of all documents, uint32[n, bands * rows], on disk."""

    def work(item: tuple[int, pa.RecordBatch]) -> np.ndarray:
        return minhash.signatures(*text_buffers(item[1].column("text")), sketch, engine)

    spool, count = Spool(), 0
    for slots in in_order(work, batches_of(sources, ["text"]), jobs):
        spool.append(slots)
        count += len(slots)
    return spool.array(np.uint32, (count, sketch.bands * sketch.rows))


def _batches(rows: np.ndarray, said: str) -> Iterator[np.ndarray]:
    with progress(len(rows), f"dedup: {said}") as bar:
        for low in range(0, len(rows), BATCH):
            stop.check()
            yield rows[low : low + BATCH]
            bar.advance(len(rows[low : low + BATCH]))


def find_matches(index: RedisIndex, slots: np.ndarray, rows: np.ndarray, least: float) -> Matches:
    """The likest indexed document of each of `rows` that has one of similarity `least`."""
    known: dict[bytes, Known] = {}
    found: list[tuple[int, bytes, float]] = []
    for batch in _batches(rows, "asking Redis"):
        for row, there in zip(batch.tolist(), index.candidates(slots[batch]), strict=True):
            if not there:
                continue
            likeness = (np.stack([one.slots for one in there]) == slots[row]).mean(axis=1)
            best = int(likeness.argmax())  # the earliest of equals
            if likeness[best] >= least:
                known[there[best].key] = there[best]
                found.append((row, there[best].key, float(likeness[best])))
    ordered = sorted(known.values(), key=placed)
    place = {one.key: number for number, one in enumerate(ordered)}
    return Matches(
        np.array([row for row, _, _ in found], np.int64),
        np.array([place[key] for _, key, _ in found], np.int64),
        np.array([similarity for _, _, similarity in found], np.float32),
        ordered,
    )


def joined(found: Clusters, worth: np.ndarray, matches: Matches) -> Clusters:
    """Clusters of n rows and, after them, the indexed documents that some are like.

    worth float64[n]. Clusters without an indexed document are as they were.
    """
    n, more = len(found.of_row), len(matches.known)
    inside = np.flatnonzero(found.of_row != ALONE)
    ours = np.stack((inside, found.kept_row[found.of_row[inside]]), axis=1)
    theirs = np.stack((matches.rows, n + matches.place), axis=1)
    component = lsh.components(n + more, np.concatenate((ours, theirs)))
    made = choose_kept(component, np.concatenate((worth, np.full(more, np.inf))))
    kept = np.append(made.kept_row, ALONE)[made.of_row]  # ALONE, being -1, takes the last
    before = np.flatnonzero(kept[:n] < n)
    made.reason[before] = found.reason[before]
    made.similarity[before] = found.similarity[before]
    direct = kept[matches.rows] == n + matches.place
    made.similarity[matches.rows[direct]] = matches.similarity[direct]
    return made


def _insert(index: RedisIndex, ids: pa.Array, slots: np.ndarray, rows: np.ndarray) -> None:
    """Insert the documents of `rows`, after making sure that their ids are free."""
    if pc.count_distinct(ids).as_py() < len(ids):
        counts = pc.value_counts(ids)
        twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))[0]
        raise BadData(f"{index.address.said}: the id {twice.as_py()!r} occurs twice; it is a key")
    for low in range(0, len(rows), BATCH):
        index.refuse_taken(ids[low : low + BATCH].to_pylist())
    index.register()
    first = 0
    for batch in _batches(rows, "inserting into Redis"):
        index.insert(ids[first : first + len(batch)].to_pylist(), slots[batch])
        first += len(batch)
