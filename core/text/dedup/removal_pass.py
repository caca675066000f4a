"""Last pass of dedup: remove rows, add the cluster columns, and write the removed rows.

Decisions are passed to worker processes through unnamed files, which disappear with the parent
process even if it is killed. Every output row has `cluster` (the id of the document kept) and
`cluster_size`; a removed row also with `reason`, `kept_id` and `similarity`.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import BadData
from sabia.core.shards.atomic import atomic_directory, file_digest, read_json, write_json
from sabia.core.shards.mapping import ShardContext
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import IdSpool, Spool
from sabia.core.text.dedup.clusters import ALONE, DECISION, KEPT, REASONS, Clusters, read_parts
from sabia.core.text.dedup.phases import Decision
from sabia.core.text.dedup.signature_files import Corpus
from sabia.core.text.removed_rows import Repeatable, put_columns

Ids = IdSpool | Corpus  # both have the id of every row, and the first row of each source
PLAN_FILES = "rows", "clusters"


class OpenSpools:
    """Keeps spools open in the process that created them; its copy in a worker is empty."""

    def __init__(self, *spools: Spool) -> None:
        self.spools = spools

    def __reduce__(self) -> tuple[type["OpenSpools"], tuple[()]]:
        return OpenSpools, ()


def write_table(spool: Spool, **columns: pa.Array) -> None:
    """Write columns as an Arrow file."""
    batch = pa.RecordBatch.from_pydict(columns)
    with pa.ipc.new_file(spool.file, batch.schema) as writer:
        writer.write_batch(batch)
    spool.file.flush()


def write_record(path: Path, names: Sequence[str], **figures: object) -> None:
    """Write the record of a plan, with the digests of its files, which are beside it."""
    files = {name: file_digest(path.with_name(name)) for name in names}
    write_json(path, figures | {"files": files})


def read_record(path: Path, names: Sequence[str]) -> Mapping[str, Any]:
    """What `write_record` wrote; raises FileNotFoundError if there is none, BadData if it or a file
    of the plan is damaged."""
    try:
        record = read_json(path)
        intact = all(file_digest(path.with_name(n)) == record["files"][n] for n in names)
    except (ValueError, KeyError):
        intact = False
    if not intact:
        raise BadData(f"{path.parent}: damaged bits; remove it and run --phase compare")
    return record


@dataclass(frozen=True)
class RemovalPlan:
    """Decisions by row and clusters by number, which any process can read by path."""

    rows_path: str
    clusters_path: str
    starts: tuple[int, ...]
    kept: OpenSpools
    annotated: bool  # the output is the decisions themselves

    @classmethod
    def write(
        cls, ids: Ids, clusters: Clusters, directory: Path | None = None, annotated: bool = False
    ) -> "RemovalPlan":
        """Write the decisions into a directory (atomically) or into unnamed files."""
        order = np.argsort(clusters.kept_row)
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        kept_ids = ids.take(clusters.kept_row[order]).take(pa.array(position, pa.int64()))
        columns = {"id": kept_ids, "size": pa.array(clusters.size, pa.int64())}
        starts = tuple(ids.starts.tolist())
        if directory is None:
            rows, spool = clusters.decisions, Spool()
            write_table(spool, **columns)
            return cls(rows.path, spool.path, starts, OpenSpools(rows, spool), annotated)
        with atomic_directory(directory) as temporary:
            shutil.copyfile(clusters.decisions.path, temporary / "rows")
            write_table(Spool(str(temporary / "clusters")), **columns)
            write_record(temporary / "starts.json", PLAN_FILES, starts=starts)
        return cls.open(directory, annotated)

    @classmethod
    def open(cls, directory: Path, annotated: bool = False) -> "RemovalPlan":
        """A plan that was written into a directory; see `read_record`."""
        record = read_record(directory / "starts.json", PLAN_FILES)
        rows, clusters = (str(directory / name) for name in PLAN_FILES)
        return cls(rows, clusters, tuple(record["starts"]), OpenSpools(), annotated)

    def rows(self, index: int) -> Iterator[np.ndarray]:
        """DECISION[r] of the rows of source `index`, part by part. They are read, not mapped: pages
        of a mapping count as memory of this process."""
        with open(self.rows_path, "rb") as file:
            for _, part in read_parts(file, DECISION, *self.starts[index : index + 2]):
                yield part

    def clusters(self) -> pa.RecordBatch:
        """id (of the document kept) and size of each cluster."""
        return pa.ipc.open_file(pa.memory_map(self.clusters_path)).get_batch(0)

    def decision(self, sources: Sequence[Source]) -> Decision:
        """See phases.Plan."""
        dropped = {
            index: Repeatable(partial(_dropped, source, self, index))
            for index, source in enumerate(sources)
            if any((part["reason"] != KEPT).any() for part in self.rows(index))
        }
        if self.annotated:
            return Decision(partial(annotate, plan=self), dropped, ("id",))
        return Decision(partial(drop, plan=self), dropped)


def _with_decisions(
    batches: Iterable[pa.RecordBatch], plan: RemovalPlan, index: int, name: str
) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """(batch with cluster and cluster_size, decisions) of one source.

    A document without duplicates is a cluster of its own.
    """
    (first, last), clusters = plan.starts[index : index + 2], plan.clusters()
    decisions, held = plan.rows(index), np.empty(0, DECISION)
    for _, batch in numbered(batches, first, last, name):
        while len(held) < batch.num_rows:
            held = np.concatenate((held, next(decisions)))
        part, held = held[: batch.num_rows], held[batch.num_rows :]
        number = pa.array(part["cluster"], pa.int64(), mask=part["cluster"] == ALONE)
        ids = pc.coalesce(clusters.column("id").take(number), batch.column("id"))
        sizes = pc.fill_null(clusters.column("size").take(number), 1)
        yield put_columns(batch, {"cluster": ids, "cluster_size": sizes}), part


def numbered(
    batches: Iterable[pa.RecordBatch], first: int, last: int, name: str
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(number of its first row, batch) of a source; raises BadData unless it has the rows first to
    last - 1."""
    for batch in batches:
        if first + batch.num_rows > last:
            raise BadData(f"{name}: grew while it was being deduplicated; run again")
        yield first, batch
        first += batch.num_rows
    if first != last:
        raise BadData(f"{name}: shrank while it was being deduplicated; run again")


def drop(
    batches: Iterator[pa.RecordBatch], context: ShardContext, plan: RemovalPlan
) -> Iterator[pa.RecordBatch]:
    """The transform that yields the kept rows with their cluster."""
    for batch, part in _with_decisions(batches, plan, context.index, context.name):
        for number, reason in enumerate(REASONS):
            count = int((part["reason"] == number).sum())
            if count and number != KEPT:
                context.count(f"{reason} duplicates", count)
        yield batch.filter(pa.array(part["reason"] == KEPT))


def annotate(
    batches: Iterator[pa.RecordBatch], context: ShardContext, plan: RemovalPlan
) -> Iterator[pa.RecordBatch]:
    """The transform of `--decisions`: the id of every row and the decision about it."""
    ids = (batch.select(["id"]) for batch in batches)
    for batch, part in _with_decisions(ids, plan, context.index, context.name):
        kept = part["reason"] == KEPT
        context.count("kept", int(kept.sum()))
        yield put_columns(batch, {"kept": pa.array(kept), **_described(part)})


def _dropped(source: Source, plan: RemovalPlan, index: int) -> Iterator[pa.RecordBatch]:
    """The removed rows of one source."""
    for batch, part in _with_decisions(source.batches(), plan, index, source.name):
        removed = part["reason"] != KEPT
        if not removed.any():
            continue
        rows, about = batch.filter(pa.array(removed)), _described(part[removed])
        kept_id = {"kept_id": rows.column("cluster")}
        yield put_columns(rows, {"reason": about["reason"], **kept_id, **about})


def _described(part: np.ndarray) -> dict[str, pa.Array]:
    """The columns `reason` and `similarity` of decisions."""
    similarity = pa.array(part["similarity"], mask=np.isnan(part["similarity"]))
    return {"reason": pa.array(np.array(REASONS)[part["reason"]], pa.string()),
            "similarity": similarity}  # fmt: skip
