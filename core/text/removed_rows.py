"""The rows that a stage removes by its options, with the reason: a file, or a directory of Parquet
parts with the number of their input shard. The ending of the path decides, as for the output.

They are not errors (those are written to the rejects). They keep all columns, so that users can
inspect them to check a threshold, and restore them.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core.digests import parquet_at
from sabia.core.errors import BadData, UsageError
from sabia.core.shards import schemas
from sabia.core.shards.atomic import scratch_directory
from sabia.core.shards.columns import unified
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job, check_ending, file_ending, is_stream
from sabia.core.shards.layout import MANIFEST, check_outside
from sabia.core.shards.lineage import run_record
from sabia.core.shards.manifest import (
    check_beside,
    check_output,
    holds,
    named_output,
    provenance,
    schema_of_all,
)
from sabia.core.shards.mapping import ShardContext
from sabia.core.shards.outputs import RowsIfAny, is_intact, open_file, read_metadata
from sabia.core.shards.sources import Source
from sabia.core.shards.stores import listed
from sabia.core.shards.stores.objects import NoObject, is_there, is_url, objects_below, remove

Work = Callable[[Job, str, Sequence[Source] | None], None]


def check_path(job: Job, path: str, flag: str = "--removed") -> None:
    """Raise UsageError unless `path` is empty, or a file or directory apart from the output."""
    if is_stream(path):
        raise UsageError(f"{flag}: {path} is a stream (expected a file or a directory)")
    check_ending(path, flag)
    check_outside(job, path, flag)
    if path and job.out and os.path.realpath(path) == os.path.realpath(job.out):
        raise UsageError(f"{flag}: {path} is the path of --out; give another")


def put_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """Replace a column, or append it."""
    index, field = batch.schema.get_field_index(name), pa.field(name, column.type)
    if index < 0:
        return batch.append_column(field, column)
    return batch.set_column(index, field, column)


def put_columns(batch: pa.RecordBatch, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Replace columns, or append them, in this order."""
    for name, column in columns.items():
        batch = put_column(batch, name, column)
    return batch


class RemovedPart(RowsIfAny):
    """A shard's removed rows as `part-NNNNN.parquet`, written only if there are any.

    With an empty directory nothing is written.
    """

    def __init__(self, directory: str, context: ShardContext) -> None:
        path = f"{directory.rstrip('/')}/{context.part}.parquet" if directory else ""
        super().__init__(path, context.made_from)

    def write(self, batch: pa.RecordBatch, reason: pa.Array) -> None:
        """Add rows with the reasons of their removal."""
        if self.path:
            self.write_batch(put_column(batch, "reason", reason))


def map_and_gather(job: Job, removed: str, work: Work, salt: str) -> None:
    """Run a map stage that writes RemovedParts to a directory; if `removed` is a file, gather them.

    `work(job, directory, sources)` runs the stage. Raises UsageError for a file and a slice of the
    shards, as every slice has removed rows.
    """
    check_path(job, removed)
    if not removed or job.dry_run:
        work(job, "", None)
        return
    if not file_ending(removed):
        sources = open_inputs(job, "document", once=not is_there(removed))
        check_outputs(job, sources, removed)
        work(job, removed, sources)
        return
    if job.shard:
        raise UsageError(
            f"--removed: {removed} is one file, but this is a slice of the shards; give a directory"
        )
    _gathered(job, removed, work, salt)


def provenance_of(job: Job, sources: Sequence[Source], salt: str) -> dict[str, object]:
    """The provenance of the file of removed rows; the sources are `unified`."""
    fingerprints = [source.fingerprint() for source in sources]
    origins = [source.origin for source in sources]
    names = run_record.inputs_of(sources)
    made = provenance(job, "removed", fingerprints, salt, schema_of_all(sources), origins, names)
    return made | {"out": named_output(job)}


def check_outputs(job: Job, sources: Sequence[Source], removed: str) -> None:
    """Raise UsageError if the output, or the removed rows beside it, are those of other inputs."""
    check_output(job, sources)
    if removed:
        check_beside(job, sources, removed, "--removed")


def _gathered(job: Job, final: str, work: Work, salt: str) -> None:
    there = is_there(final)
    sources = unified(open_inputs(job, "document", once=not there))
    check_outputs(job, sources, final)
    made = partial(provenance_of, job, sources, salt)
    written = there and holds(final, made())
    job = job if written else replace(job, force=True)
    parent = None if is_url(final) else os.path.dirname(os.path.abspath(final))
    if parent:
        os.makedirs(parent, exist_ok=True)
    with scratch_directory(os.path.basename(final), parent) as scratch:
        work(job, str(scratch), sources)
        if not written:
            paths = sorted(scratch.glob("part-*.parquet"))
            parts = [Repeatable(partial(_part, path)) for path in paths]
            write_removed(final, dict(enumerate(parts)), made())


def _part(path: Path) -> Iterator[pa.RecordBatch]:
    """The removed rows of one shard."""
    with parquet_at(path) as file:
        yield from file.iter_batches()


@dataclass(frozen=True)
class Repeatable:
    """Batches that can be read more than once: `read` reads them again."""

    read: Callable[[], Iterator[pa.RecordBatch]]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.read()


def is_written(path: str, made: dict[str, Any]) -> bool:
    """Whether all removed rows of this provenance are in the file or the directory."""
    if file_ending(path):
        return holds(path, made)
    folder = path.rstrip("/")
    try:
        manifest = listed.read_json(f"{folder}/{MANIFEST}")
    except (NoObject, OSError, ValueError):
        return False
    there, shards = _parts_in(folder), manifest.get("shards", ())
    if manifest.get("fingerprint") != made["fingerprint"]:
        return False
    if is_url(path):  # objects are not read
        return all(there.get(one["name"]) == one["size_bytes"] for one in shards)
    return all(is_intact(f"{folder}/{name}") for name in {*there, *(s["name"] for s in shards)})


def _parts_in(folder: str) -> dict[str, int]:
    """Name → size of the parts in a folder."""
    if is_url(folder):
        below = {name: int(about["size"]) for name, about in objects_below(folder).items()}
        return {name: below[name] for name in below if re.fullmatch(r"part-\w+\.parquet", name)}
    return {path.name: path.stat().st_size for path in Path(folder).glob("part-*.parquet")}


def write_removed(
    path: str, parts: Mapping[int, Iterable[pa.RecordBatch]], made: dict[str, Any]
) -> None:
    """Write the rows of all parts; columns that only some parts have are null in the others.

    Each part is iterated twice (the first time for its first batch) and has one schema. `made`: the
    provenance. A directory gets a file for each part, and its manifest last.
    """
    heads = {i: head.schema for i, part in parts.items() if (head := next(iter(part), None))}
    empty = schemas.document().append(pa.field("reason", pa.string()))
    try:
        schema = empty
        if heads:
            schema = pa.unify_schemas(list(heads.values()), promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise BadData(f"--removed: the column types of the shards differ ({error})") from error
    schema = schema.remove_metadata()
    if file_ending(path):
        _write_file(path, schema, [parts[i] for i in heads], made)
        return
    folder = path.rstrip("/")
    remove(f"{folder}/{MANIFEST}")
    for old in (f"{folder}/{name}" for name in _parts_in(folder)):
        if (read_metadata(old) or {}).get("command") == made["command"]:
            remove(old)
    for index in heads:
        _write_file(f"{folder}/part-{index:05d}.parquet", schema, [parts[index]], made)
    plain, run = run_record.split(made)
    record = {run_record.RUN: run.ended(None, beside=True)} if run else {}
    names = [f"part-{index:05d}.parquet" for index in heads]
    if is_url(path):
        shards = listed.shards_of(folder, names, plain)
    else:
        sizes = _parts_in(folder)
        shards = {"shards": [{"name": name, "size_bytes": sizes[name]} for name in names]}
    listed.write_json(f"{folder}/{MANIFEST}", plain | record | shards)
    if run and not is_url(path):
        run_record.keep_beside(folder, record[run_record.RUN])


def _write_file(
    path: str, schema: pa.Schema, parts: Iterable[Iterable[pa.RecordBatch]], made: dict[str, Any]
) -> None:
    with open_file(path, schema, made) as writer:
        for part in parts:
            for batch in part:
                writer.write(schemas.fit(batch, schema))
