"""The rows that a stage removes by its options, with the reason, as Parquet.

They are not errors (those are written to the rejects). They keep all columns, so that users can
inspect them to check a threshold, and restore them.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core.digests import parquet_at
from sabia.core.errors import BadData, UsageError
from sabia.core.shards import schemas
from sabia.core.shards.columns import unified
from sabia.core.shards.endings import file_ending
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.layout import check_outside
from sabia.core.shards.manifest import check_output, holds, is_current, provenance, schema_of_all
from sabia.core.shards.outputs import RowsIfAny, open_file
from sabia.core.shards.sources import Source

Work = Callable[[Job, str, Sequence[Source] | None], None]


def check_path(job: Job, path: str, flag: str = "--removed") -> None:
    """Raise UsageError unless `path` is empty or a Parquet file outside the output."""
    if path and not path.endswith(".parquet"):
        raise UsageError(f"{flag}: {path} (expected a file ending in .parquet)")
    check_outside(job, path, flag)


def put_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """Replace a column, or append it."""
    index, field = batch.schema.get_field_index(name), pa.field(name, column.type)
    if index < 0:
        return batch.append_column(field, column)
    return batch.set_column(index, field, column)


class RemovedPart(RowsIfAny):
    """A shard's removed rows as `part-NNNNN.parquet`, written only if there are any.

    With an empty directory nothing is written.
    """

    def __init__(self, directory: str, part: str) -> None:
        super().__init__(f"{directory.rstrip('/')}/{part}.parquet" if directory else "")

    def write(self, batch: pa.RecordBatch, reason: pa.Array) -> None:
        """Add rows with the reasons of their removal."""
        if self.path:
            self.write_batch(put_column(batch, "reason", reason))


def map_and_gather(job: Job, removed: str, work: Work, salt: str) -> None:
    """Run a map stage that writes RemovedParts to a directory, and gather them in `removed`.

    `work(job, directory, sources)` runs the stage. If the job writes a directory, `removed` is a
    directory of parts; else it is one file. Raises UsageError where it is not.
    """
    if not removed or job.dry_run:
        work(job, "", None)
    elif job.to_directory:
        if removed.endswith(".parquet"):
            raise UsageError(
                "--removed: -o is a directory, so give a directory here too (one part per shard)"
            )
        check_outside(job, removed, "--removed")
        work(job, removed, None)
    else:
        _gathered(job, removed, work, salt)


def provenance_of(job: Job, sources: Sequence[Source], salt: str) -> dict[str, Any]:
    """The provenance of the file of removed rows; the sources are `unified`."""
    fingerprints = [source.fingerprint() for source in sources]
    origins = [source.origin for source in sources]
    return provenance(job, "removed", fingerprints, salt, schema_of_all(sources), origins)


def check_outputs(job: Job, sources: Sequence[Source], removed: str) -> None:
    """Raise UsageError if the output, or the file of removed rows, has those of other inputs."""
    check_output(job, sources)
    if file_ending(removed):
        beside = replace(job, out=removed, append=None)
        check_output(beside, sources, flag="--removed")


def _gathered(job: Job, final: str, work: Work, salt: str) -> None:
    check_path(job, final)
    sources = unified(open_inputs(job, "document"))
    check_outputs(job, sources, final)
    made = provenance_of(job, sources, salt)
    written = holds(final, made)
    done = written and is_current(job, sources, salt)
    job = job if written else replace(job, force=True)
    parent = os.path.dirname(os.path.abspath(final))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sabia-", dir=parent) as scratch:
        work(job, scratch, sources)
        if not done:
            paths = sorted(Path(scratch).glob("part-*.parquet"))
            write_removed(final, [Repeatable(partial(_part, path)) for path in paths], made)


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


def write_removed(
    path: str, parts: Sequence[Iterable[pa.RecordBatch]], metadata: dict[str, Any]
) -> None:
    """Write the rows of all parts; columns that only some parts have are null in the others.

    Each part is iterated twice (the first time for its first batch) and has one schema.
    """
    heads = [head.schema for part in parts if (head := next(iter(part), None)) is not None]
    empty = schemas.document().append(pa.field("reason", pa.string()))
    try:
        schema = pa.unify_schemas(heads, promote_options="permissive") if heads else empty
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise BadData(f"--removed: the column types of the shards differ ({error})") from error
    schema = schema.remove_metadata()
    with open_file(path, schema, metadata) as writer:
        for part in parts:
            for batch in part:
                writer.write(schemas.fit(batch, schema))
