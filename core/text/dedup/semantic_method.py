"""`dedup --method semantic`: documents with the same meaning, by cosine similarity of embeddings.

Embeddings come from a column, or from a model that the caller passes in. They are clustered by
k-means and compared within clusters only, so the cost falls with the number of clusters and a pair
in different clusters is missed. Within a cluster rows are visited from the highest priority to the
lowest: a row is removed if its cosine to an already kept row reaches the threshold, in favour of
the most similar one. So every removed row is that similar to the row kept in its place, without
chains, and kept rows of a cluster are not similar to each other. SemDeDup: Abbas et al. 2023
(arXiv 2303.09540), which keeps by distance to the centroid.

On disk: 4 bytes per dimension and document. In memory: 60 bytes per document, the centroids, and
the kept rows of the clusters in progress.

The clusters: spherical k-means of unit vectors on disk, by mini-batches (Sculley 2010). Centroids
start at distinct rows. Each step takes a batch of rows, assigns every row to the centroid of
greatest cosine and moves each centroid to the mean of all rows ever assigned to it (a learning rate
of one over their number), normalized. Every few steps a centroid without rows is moved to the row
of the batch that is least similar to its centroid. Batches are drawn by (seed, step) and computed
in fixed blocks, so the result does not depend on the number of workers. Dhillon and Modha 2001 for
the cosine.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import BadData
from sabia.core.notes import progress
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.executors.processes import map_threads
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import IdSpool, Spool
from sabia.core.text.dedup import keep_rules, phases
from sabia.core.text.dedup.clusters import SEMANTIC, Clusters, choose_kept
from sabia.core.text.dedup.phases import Arrays, Sketched, StreamMethod
from sabia.core.text.dedup.removal_pass import RemovalPlan

MAX_UNCLUSTERED = 4_096  # up to this many documents are compared without clusters
_BLOCK = 512
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


class Embedder(Protocol):
    """Computes embeddings of texts; its fingerprint enters those of outputs."""

    fingerprint: str

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32[n, d]; NaN where a text has no vector."""


class Embedded(NamedTuple):
    """unit vectors float32[v, d], their rows int64[v], priority float64[n] of all rows."""

    vectors: np.ndarray
    rows: np.ndarray
    priority: np.ndarray
    ids: IdSpool


def run(job: Job, options: DedupOptions, embedder: Embedder | None = None) -> None:
    """Deduplicate the job's inputs by an embedding column, or by the vectors of an embedder."""
    phases.run(SemanticMethod(job, options, embedder))


class SemanticMethod(StreamMethod):
    """The sketch: unit vectors (NaN where there is none), and the priority of each document."""

    def __init__(self, job: Job, options: DedupOptions, embedder: Embedder | None) -> None:
        super().__init__(job, options)
        self.embedder = embedder

    def salt(self, sources: list[Source]) -> str:
        """See phases.Method."""
        made_by = self.embedder.fingerprint if self.embedder else ""
        return f"{made_by} keep {keep_rules.MEASURE}"

    def sketch_key(self) -> Any:
        """See phases.Method."""
        options = self.options
        made_by = [self.embedder.fingerprint, options.backend] if self.embedder else []
        return [options.embeddings, made_by, options.keep, keep_rules.MEASURE]

    def columns(self) -> list[str]:
        """See StreamMethod."""
        return [self.options.embeddings or "text", *keep_rules.columns(self.options.keep)]

    def threads(self) -> int:
        """A model computes its vectors batch by batch, with threads of its own."""
        return 1 if self.embedder else self.job.jobs

    def read(self, batch: pa.RecordBatch, name: str) -> Arrays:
        """See StreamMethod."""
        raw = _raw(batch, self.options.embeddings, self.embedder, name)
        return normalized(raw), keep_rules.priorities(batch, self.options.keep)

    def compare(
        self, sources: list[Source], sketches: Iterator[Sketched], directory: Path | None
    ) -> RemovalPlan:
        """See StreamMethod."""
        options, job = self.options, self.job
        embedded = _embedded([source.name for source in sources], sketches, options.keep)
        n = len(embedded.rows)
        k = min(n, options.clusters or (1 if n <= MAX_UNCLUSTERED else math.isqrt(n)))
        missing = len(embedded.priority) - n
        without = f"{missing:,} documents without a vector are kept"
        notes.note(f"{n:,} vectors in {k:,} clusters; {without}")
        clusters = find_semantic(embedded, options.threshold, k, job.seed, job.jobs)
        return RemovalPlan.write(embedded.ids, clusters, directory)

    def open_plan(self, directory: Path) -> RemovalPlan:
        """See phases.Method."""
        return RemovalPlan.open(directory)


def _embedded(names: Sequence[str], sketches: Iterator[Sketched], keep: str) -> Embedded:
    """The vectors of all documents, on disk; names: of the sources."""
    spool, ids = Spool(), IdSpool(sources=len(names))
    rows, priority = [np.empty(0, np.int64)], list[np.ndarray]()
    base, width = 0, 0
    for index, ids_of_batch, (vectors, priority_of_batch) in sketches:
        if vectors.shape[1] and width and vectors.shape[1] != width:
            raise BadData(
                f"{names[index]}: vectors of {vectors.shape[1]} numbers (before: {width})"
            )
        width = vectors.shape[1] or width
        valid = ~np.isnan(vectors).any(axis=1) & (vectors.shape[1] > 0)
        spool.append(vectors[valid])
        rows.append(base + np.flatnonzero(valid))
        ids.append(ids_of_batch, index)
        priority.append(priority_of_batch)
        base += len(vectors)
    known = np.concatenate(rows)
    if base and not len(known):
        raise BadData("--method semantic: no document has a vector of finite length above 0")
    array = spool.array(np.float32, (len(known), width))
    keep_rules.check_some(priority, keep)
    return Embedded(array, known, np.concatenate([np.empty(0), *priority]), ids)


def _raw(batch: pa.RecordBatch, column: str, embedder: Embedder | None, name: str) -> np.ndarray:
    """[rows, d], NaN where there is no vector; d is 0 if no row of the batch has one."""
    if embedder is not None:
        return embedder.embed(batch.column("text").to_pylist())
    if column not in batch.schema.names:
        raise BadData(f"{name}: no column {column!r} (--embeddings)")
    return column_vectors(batch.column(column), f"{name}: column {column!r}")


def column_vectors(values: pa.Array, name: str) -> np.ndarray:
    """float64[n, d] of a list column of numbers; rows that are null or hold a null become NaN."""
    lists = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    if not lists and not pa.types.is_fixed_size_list(values.type):
        raise BadData(f"{name} is {values.type} (expected a list of numbers)")
    kind = values.type.value_type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise BadData(f"{name} is {values.type} (expected a list of numbers)")
    valid = np.flatnonzero(np.asarray(values.is_valid()))
    present = values.take(pa.array(valid))
    sizes = present.value_lengths().to_numpy(zero_copy_only=False) if lists else []
    width = int(sizes[0]) if lists and len(sizes) else getattr(values.type, "list_size", 0)
    if lists and (np.asarray(sizes) != width).any():
        raise BadData(f"{name} has vectors of {width} and of other numbers (expected one length)")
    vectors = np.full((len(values), width if len(valid) else 0), np.nan)
    if len(valid):
        vectors[valid] = present.flatten().to_numpy(zero_copy_only=False).reshape(len(valid), width)
    return vectors


def find_semantic(embedded: Embedded, threshold: float, k: int, seed: int, jobs: int) -> Clusters:
    """Clusters: removed rows, each with the row kept in its place and their cosine."""
    count = len(embedded.priority)
    leader = np.arange(count)
    similarity = np.full(count, np.nan, np.float32)
    dedup_cluster = partial(dedup_members, embedded, threshold)
    with progress(len(embedded.rows), "dedup: comparing") as bar:
        members = _members(embedded, k, seed, jobs)
        for removed, kept, cosine in map_threads(dedup_cluster, members, jobs):
            leader[removed], similarity[removed] = kept, cosine
            bar.advance(len(removed))
    is_leader = (leader == np.arange(count)).astype(float)
    return choose_kept(
        leader, lambda: iter([(0, is_leader)]),
        lambda removed, _kept: (SEMANTIC, similarity[removed]),
    )  # fmt: skip


def _members(embedded: Embedded, k: int, seed: int, jobs: int) -> Iterator[np.ndarray]:
    """The vectors of each cluster, ascending."""
    if k < 2:
        yield np.arange(len(embedded.rows))
        return
    nearest = assign(embedded.vectors, centres(embedded.vectors, k, seed), jobs)
    order = np.argsort(nearest, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(nearest[order])) + 1)


def dedup_members(
    embedded: Embedded, threshold: float, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(removed rows, the kept row of each, their cosine) among some vectors, best rows first."""
    vectors, rows, priority, _ = embedded
    order = members[np.lexsort((members, -priority[rows[members]]))]
    kept, at = np.empty((_BLOCK, vectors.shape[1]), np.float32), np.empty(len(order), np.int64)
    removed = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))]
    kept_count = 0
    for low in range(0, len(order), _BLOCK):
        stop.check()
        numbers = order[low : low + _BLOCK]
        block = np.array(vectors[numbers])
        best, cosine = _most_similar(block, kept[:kept_count])
        unmatched = np.flatnonzero(cosine < threshold)
        inside, near, stays = _within_block(block[unmatched], threshold)
        matched = np.flatnonzero(cosine >= threshold)
        new = unmatched[stays]
        nearest, value = _nearest_new(block, matched, new)
        leads = np.where(value > cosine[matched], numbers[nearest], at[best[matched]])
        cosines = np.maximum(value, cosine[matched])
        removed.append((rows[numbers[matched]], rows[leads], cosines))
        row = rows[numbers[unmatched]]
        removed.append((row[~stays], row[inside], near))
        end = kept_count + len(new)
        while end > len(kept):
            kept = np.concatenate((kept, np.empty_like(kept)))
        kept[kept_count:end], at[kept_count:end] = block[new], numbers[new]
        kept_count = end
    removed_rows, leaders, cosines = (np.concatenate(part) for part in zip(*removed, strict=True))
    return removed_rows, leaders, cosines


def _most_similar(block: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the first of the most similar kept rows of each row, their cosine; -2 if none is kept)."""
    best, cosine = np.zeros(len(block), np.int64), np.full(len(block), -2, np.float32)
    for low in range(0, len(kept), 1 << 14):
        similar = block @ kept[low : low + (1 << 14)].T
        nearest = similar.argmax(axis=1)
        value = similar[np.arange(len(block)), nearest]
        better = value > cosine
        best[better], cosine[better] = low + nearest[better], value[better]
    return best, np.minimum(cosine, 1)


def _within_block(block: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Within a block, in order: (kept position and cosine of each removed row; bool: rows kept)."""
    similar = np.minimum(block @ block.T, 1)
    stays = np.ones(len(block), bool)
    kept_positions, cosines = list[int](), list[float]()
    for i in np.flatnonzero((np.tril(similar, -1) >= threshold).any(axis=1)):
        row = np.where(stays[:i], similar[i, :i], -2)
        best = int(row.argmax())
        if row[best] >= threshold:
            stays[i] = False
            kept_positions.append(best)
            cosines.append(float(row[best]))
    return np.array(kept_positions, np.int64), np.array(cosines, np.float32), stays


def _nearest_new(
    block: np.ndarray, matched: np.ndarray, new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(block position of the most similar new row before each matched row, its cosine or -2)."""
    if not len(new):
        return np.zeros(len(matched), np.int64), np.full(len(matched), -2, np.float32)
    similar = np.minimum(block[matched] @ block[new].T, 1)
    similar[new[None, :] > matched[:, None]] = -2
    best = similar.argmax(axis=1)
    return new[best], similar[np.arange(len(matched)), best]
