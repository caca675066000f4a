"""Last pass of dedup: drop the rows that go, name the clusters, write down what was removed.

Decisions travel to worker processes through unnamed files that vanish with the parent process,
whatever ends it. Every row comes out with `cluster` (the id of the document kept) and
`cluster_size`; a removed row also with `reason`, `kept_id` and `similarity`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import BadData, UsageError
from sabia.core.shards.atomic import atomic_directory
from sabia.core.shards.mapping import ShardContext
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import IdSpool, Spool
from sabia.core.text.dedup.barrier import Decision
from sabia.core.text.dedup.clusters import ALONE, KEPT, REASONS, Clusters
from sabia.core.text.dedup.signature_files import Corpus
from sabia.core.text.removed_rows import Again, put_column

Ids = IdSpool | Corpus  # know the id of every row, and the first row of each source
DECISION = np.dtype([("cluster", "i8"), ("reason", "u1"), ("similarity", "f4")])


class Held:
    """Keeps spools open in the process that made them; its copy in a worker keeps nothing."""

    def __init__(self, *spools: Spool) -> None:
        self.spools = spools

    def __reduce__(self) -> tuple[type["Held"], tuple[()]]:
        return Held, ()


@dataclass(frozen=True)
class Plan:
    """Decisions by row and clusters by number, readable from any process by path."""

    rows_path: str
    clusters_path: str
    starts: tuple[int, ...]
    kept: Held

    @classmethod
    def write(cls, ids: Ids, found: Clusters, directory: Path | None = None) -> "Plan":
        """Write down what was decided, into a directory (whole or not at all) or unnamed files."""
        if directory is None:
            return cls._spool(ids, found, None)
        with atomic_directory(directory) as temporary:
            made = cls._spool(ids, found, temporary)
            (temporary / "starts.json").write_text(json.dumps(made.starts))
        return cls.open(directory)

    @classmethod
    def _spool(cls, ids: Ids, found: Clusters, place: Path | None) -> "Plan":
        rows, clusters = (Spool(str(place / n) if place else "") for n in ("rows", "clusters"))
        table = np.empty(len(found.of_row), DECISION)
        table["cluster"], table["reason"] = found.of_row, found.reason
        table["similarity"] = found.similarity
        rows.append(table)
        rows.file.flush()
        batch = pa.RecordBatch.from_arrays(
            [_kept_ids(ids, found.kept_row), pa.array(found.size, pa.int64())], ["id", "size"]
        )
        with pa.ipc.new_file(clusters.file, batch.schema) as writer:
            writer.write_batch(batch)
        clusters.file.flush()
        starts = tuple(ids.starts.tolist())
        return cls(rows.path, clusters.path, starts, Held(rows, clusters))

    @classmethod
    def open(cls, directory: Path) -> "Plan":
        """A plan that was written into a directory; raises UsageError where there is none."""
        try:
            starts = tuple(json.loads((directory / "starts.json").read_text()))
        except FileNotFoundError as error:
            raise UsageError(
                f"{directory.parent}: no plan for these inputs and options; run --phase compare"
            ) from error
        return cls(str(directory / "rows"), str(directory / "clusters"), starts, Held())

    def rows(self, index: int) -> np.ndarray:
        """Decisions of the rows of source `index`."""
        first, last = self.starts[index : index + 2]
        if first == last:
            return np.empty(0, DECISION)
        where = first * DECISION.itemsize
        return np.memmap(self.rows_path, DECISION, "r", where, (last - first,))

    def clusters(self) -> pa.RecordBatch:
        """id (of the document kept) and size of each cluster."""
        return pa.ipc.open_file(pa.memory_map(self.clusters_path)).get_batch(0)


def _kept_ids(ids: Ids, kept_row: np.ndarray) -> pa.Array:
    order = np.argsort(kept_row)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return ids.take(kept_row[order]).take(pa.array(place, pa.int64()))


def _decided(
    batches: Iterable[pa.RecordBatch], plan: Plan, index: int, name: str
) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """(batch with cluster and cluster_size, decisions) of one source."""
    rows, clusters = plan.rows(index), plan.clusters()
    for first, batch in placed(batches, 0, len(rows), name):
        part = rows[first : first + batch.num_rows]
        yield _with_cluster(batch, part["cluster"], clusters), part


def placed(
    batches: Iterable[pa.RecordBatch], first: int, last: int, name: str
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(first row, batch) of the source of this name; BadData where it has others than first to
    last - 1."""
    for batch in batches:
        if first + batch.num_rows > last:
            raise BadData(f"{name}: grew while it was being deduplicated; run again")
        yield first, batch
        first += batch.num_rows
    if first != last:
        raise BadData(f"{name}: shrank while it was being deduplicated; run again")


def _with_cluster(
    batch: pa.RecordBatch, cluster: np.ndarray, clusters: pa.RecordBatch
) -> pa.RecordBatch:
    """A document without duplicates is a cluster of its own."""
    number = pa.array(cluster, pa.int64(), mask=cluster == ALONE)
    ids = pc.coalesce(clusters.column("id").take(number), batch.column("id"))
    sizes = pc.fill_null(clusters.column("size").take(number), 1)
    return put_column(put_column(batch, "cluster", ids), "cluster_size", sizes)


def drop(
    batches: Iterator[pa.RecordBatch], context: ShardContext, plan: Plan
) -> Iterator[pa.RecordBatch]:
    """The transform: rows kept, with their cluster."""
    for batch, part in _decided(batches, plan, context.index, context.name):
        for number, reason in enumerate(REASONS):
            count = int((part["reason"] == number).sum())
            if count and number != KEPT:
                context.count(f"{reason} duplicates", count)
        yield batch.filter(pa.array(part["reason"] == KEPT))


def tell(
    batches: Iterator[pa.RecordBatch], context: ShardContext, plan: Plan
) -> Iterator[pa.RecordBatch]:
    """The transform that drops nothing: the id of every row and what was decided of it."""
    ids = (batch.select(["id"]) for batch in batches)
    for batch, part in _decided(ids, plan, context.index, context.name):
        kept = part["reason"] == KEPT
        context.count("kept", int(kept.sum()))
        batch = put_column(batch, "kept", pa.array(kept))
        batch = put_column(batch, "reason", pa.array(np.array(REASONS)[part["reason"]]))
        similarity = pa.array(part["similarity"], mask=np.isnan(part["similarity"]))
        yield put_column(batch, "similarity", similarity)


def decision(sources: Sequence[Source], plan: Plan, told: bool = False) -> Decision:
    """What a stage with a barrier does by the plan; `told`: the decisions are its output."""
    dropped = [
        Again(partial(_dropped, source, plan, index))
        for index, source in enumerate(sources)
        if (plan.rows(index)["reason"] != KEPT).any()
    ]
    if told:
        return Decision(partial(tell, plan=plan), dropped, ("id",))
    return Decision(partial(drop, plan=plan), dropped)


def _dropped(source: Source, plan: Plan, index: int) -> Iterator[pa.RecordBatch]:
    """The removed rows of one source."""
    for batch, part in _decided(source.batches(), plan, index, source.name):
        gone = part["reason"] != KEPT
        if not gone.any():
            continue
        rows, part = batch.filter(pa.array(gone)), part[gone]
        reasons = pa.array(np.array(REASONS)[part["reason"]], pa.string())
        similarity = pa.array(part["similarity"], mask=np.isnan(part["similarity"]))
        rows = put_column(rows, "reason", reasons)
        rows = put_column(rows, "kept_id", rows.column("cluster"))
        yield put_column(rows, "similarity", similarity)
