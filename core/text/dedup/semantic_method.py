"""`dedup --method semantic`: documents that mean the same, by the cosine of embeddings.

Embeddings come from a column, or from a model that the caller hands in; they are clustered by
k-means and compared within clusters only, so the cost falls by the number of clusters and a pair
parted by a border is missed. Within a cluster rows are taken from the most worth to the least: a
row goes if its cosine to a row kept before reaches the threshold, in favour of the most similar.
So every row removed is that similar to the row that stays in its place, without chains, and rows
kept in a cluster are not similar to each other. SemDeDup: Abbas et al. 2023 (arXiv 2303.09540),
which keeps by distance to the centre.

On disk: 4 bytes a dimension for each document; in memory 60 bytes a document, the centres, and the
rows kept of the clusters at work.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import BadData
from sabia.core.options.dedup import DedupOptions
from sabia.core.progress import progress
from sabia.core.shards.executor import map_threads
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source, batches_of
from sabia.core.shards.spools import IdSpool, Spool
from sabia.core.text.dedup import barrier, keep_rules, kmeans, removal_pass
from sabia.core.text.dedup.clusters import SEMANTIC, Clusters, choose_kept

WHOLE = 4_096  # so many documents are compared without clusters
_BLOCK = 512


class Embedder(Protocol):
    """Gives texts their vectors; what made them enters the fingerprints of outputs."""

    fingerprint: str

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32[n, d]; NaN where a text has no vector."""


def run(job: Job, options: DedupOptions, embedder: Embedder | None = None) -> None:
    """Deduplicate the job's inputs by their column, or by the vectors of an embedder."""
    salt = embedder.fingerprint if embedder else ""
    barrier.run(job, options.removed, partial(_decide, job, options, embedder), salt)


def _decide(
    job: Job, options: DedupOptions, embedder: Embedder | None, sources: list[Source]
) -> barrier.Decision:
    read = _read(sources, options, embedder)
    n = len(read.rows)
    k = min(n, options.clusters or (1 if n <= WHOLE else math.isqrt(n)))
    missing = len(read.worth) - n
    notes.note(f"{n:,} vectors in {k:,} clusters; {missing:,} documents without one stay")
    found = find_semantic(read, options.threshold, k, job.seed, job.jobs)
    return removal_pass.decision(sources, removal_pass.Plan.write(read.ids, found))


class Read(NamedTuple):
    """vectors float32[v, d] of length one, their rows int64[v], worth float64[n] of all rows."""

    vectors: np.ndarray
    rows: np.ndarray
    worth: np.ndarray
    ids: IdSpool


def _read(sources: Sequence[Source], options: DedupOptions, embedder: Embedder | None) -> Read:
    spool, ids = Spool(), IdSpool(sources=len(sources))
    rows, worth = [np.empty(0, np.int64)], list[np.ndarray]()
    wanted = ["id", options.embeddings or "text", *keep_rules.columns(options.keep)]
    base, width = 0, 0
    with progress(None, "dedup: reading") as bar:
        for index, batch in batches_of(sources, list(dict.fromkeys(wanted))):
            raw = _raw(batch, options.embeddings, embedder, sources[index].name)
            width = _same_width(width, raw, sources[index].name)
            vectors = kmeans.unit(raw)
            there = ~np.isnan(vectors).any(axis=1)
            spool.append(vectors[there])
            rows.append(base + np.flatnonzero(there))
            ids.append(batch.column("id"), index)
            worth.append(keep_rules.worth(batch, options.keep))
            base += batch.num_rows
            bar.advance(batch.num_rows)
    known = np.concatenate(rows)
    if base and not len(known):
        raise BadData("--method semantic: no document has a vector of finite length above 0")
    vectors = spool.array(np.float32, (len(known), width))
    return Read(vectors, known, keep_rules.whole(worth, options.keep), ids)


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
    there = np.flatnonzero(np.asarray(values.is_valid()))
    held = values.take(pa.array(there))
    sizes = held.value_lengths().to_numpy(zero_copy_only=False) if lists else []
    width = int(sizes[0]) if lists and len(sizes) else getattr(values.type, "list_size", 0)
    if lists and (np.asarray(sizes) != width).any():
        raise BadData(f"{name} has vectors of {width} and of other numbers (expected one length)")
    vectors = np.full((len(values), width if len(there) else 0), np.nan)
    if len(there):
        vectors[there] = held.flatten().to_numpy(zero_copy_only=False).reshape(len(there), width)
    return vectors


def _same_width(width: int, vectors: np.ndarray, name: str) -> int:
    if vectors.shape[1] and width and vectors.shape[1] != width:
        raise BadData(f"{name}: vectors of {vectors.shape[1]} numbers (before: {width})")
    return vectors.shape[1] or width


def find_semantic(read: Read, threshold: float, k: int, seed: int, jobs: int) -> Clusters:
    """Rows that go, each with the row kept in its place and their cosine."""
    count = len(read.worth)
    leader = np.arange(count)
    similarity = np.full(count, np.nan, np.float32)

    def settle(members: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return settled(read.vectors, read.rows, read.worth, members, threshold)

    with progress(len(read.rows), "dedup: comparing") as bar:
        for gone, kept, cosine in map_threads(settle, _members(read, k, seed, jobs), jobs):
            leader[gone], similarity[gone] = kept, cosine
            bar.advance(len(gone))
    found = choose_kept(leader, (leader == np.arange(count)).astype(float), SEMANTIC)
    return replace(found, similarity=similarity)


def _members(read: Read, k: int, seed: int, jobs: int) -> Iterator[np.ndarray]:
    """The vectors of each cluster, ascending."""
    if k < 2:
        yield np.arange(len(read.rows))
        return
    nearest = kmeans.assign(read.vectors, kmeans.centres(read.vectors, k, seed), jobs)
    order = np.argsort(nearest, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(nearest[order])) + 1)


def settled(
    vectors: np.ndarray, rows: np.ndarray, worth: np.ndarray, members: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows that go, the kept row of each, their cosine) among some vectors, best rows first."""
    order = members[np.lexsort((members, -worth[rows[members]]))]
    kept, at = np.empty((_BLOCK, vectors.shape[1]), np.float32), np.empty(len(order), np.int64)
    held, gone = 0, [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))]
    for low in range(0, len(order), _BLOCK):
        stop.check()
        mine = order[low : low + _BLOCK]
        block = np.array(vectors[mine])
        best, cosine = _most_similar(block, kept[:held])
        fresh = np.flatnonzero(cosine < threshold)
        inside, near, stays = _among(block[fresh], threshold)
        away = np.flatnonzero(cosine >= threshold)
        new = fresh[stays]
        place, value = _closer(block, away, new)
        leads = np.where(value > cosine[away], mine[place], at[best[away]])
        gone.append((rows[mine[away]], rows[leads], np.maximum(value, cosine[away])))
        gone.append((rows[mine[fresh[~stays]]], rows[mine[fresh[inside]]], near))
        while held + len(new) > len(kept):
            kept = np.concatenate((kept, np.empty_like(kept)))
        kept[held : held + len(new)], at[held : held + len(new)] = block[new], mine[new]
        held += len(new)
    went, leaders, cosines = (np.concatenate(part) for part in zip(*gone, strict=True))
    return went, leaders, cosines


def _most_similar(block: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the first of the most similar kept rows of each row, their cosine; -2 if there is none)."""
    best, cosine = np.zeros(len(block), np.int64), np.full(len(block), -2, np.float32)
    for low in range(0, len(kept), 1 << 14):
        similar = block @ kept[low : low + (1 << 14)].T
        place = similar.argmax(axis=1)
        value = similar[np.arange(len(block)), place]
        better = value > cosine
        best[better], cosine[better] = low + place[better], value[better]
    return best, np.minimum(cosine, 1)


def _among(block: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Within a block, in order: (kept place and cosine of each row that goes; which rows stay)."""
    similar = np.minimum(block @ block.T, 1)
    stays = np.ones(len(block), bool)
    places, cosines = list[int](), list[float]()
    for i in np.flatnonzero((np.tril(similar, -1) >= threshold).any(axis=1)):
        row = np.where(stays[:i], similar[i, :i], -2)
        best = int(row.argmax())
        if row[best] >= threshold:
            stays[i] = False
            places.append(best)
            cosines.append(float(row[best]))
    return np.array(places, np.int64), np.array(cosines, np.float32), stays


def _closer(block: np.ndarray, away: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place in the block of the most similar new row before each row away, its cosine or -2)."""
    if not len(new):
        return np.zeros(len(away), np.int64), np.full(len(away), -2, np.float32)
    similar = np.minimum(block[away] @ block[new].T, 1)
    similar[new[None, :] > away[:, None]] = -2
    best = similar.argmax(axis=1)
    return new[best], similar[np.arange(len(away)), best]
