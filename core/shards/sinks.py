"""Sinks: where the runner (`mapping`) writes the rows of an output, part by part.

A part appears whole or not at all and records what it was made from, so that a run that is
repeated writes only the parts that are missing or were made from something else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import pyarrow as pa

from sabia.core.errors import UsageError
from sabia.core.shards import manifest, outputs
from sabia.core.shards.dry_run import parquet_bytes
from sabia.core.shards.job import Job
from sabia.core.shards.outputs import Provenance


class Sink(Protocol):
    """The output of a job. `per_shard`: every input shard gives one part; else all give one."""

    @property
    def per_shard(self) -> bool: ...

    @property
    def ending(self) -> str:
        """The ending of `path`."""

    def path(self, part: int) -> str:
        """The file whose presence shows that a part is complete."""

    def rows_made(self, part: int, provenance: dict[str, Any]) -> int | None:
        """Rows of a part that is complete and has this provenance; None where there is none."""

    def write(
        self, part: int, schema: pa.Schema, provenance: Provenance,
        batches: Iterator[pa.RecordBatch],
    ) -> int:  # fmt: skip
        """Write all batches as one part, atomically; returns its rows. If `batches` raises, the
        part must not appear. The provenance of a part that is made from a stream is a function:
        of False at the start, of True when there are no more batches.
        """

    def for_run(self, job: Job, existing: frozenset[str]) -> Self:
        """The sink of a job that names its parts, where these paths existed before the run."""

    def finish(self, parts: int) -> None:
        """Called once this process has written its share of so many parts."""

    def estimated_bytes(self, batches: Sequence[pa.RecordBatch]) -> int:
        """Bytes that these rows take on disk, for `--dry-run`."""


@dataclass(frozen=True)
class ParquetSink:
    """The output that `outputs` opens: a Parquet file, a directory of shards, or stdout."""

    job: Job
    existing: frozenset[str] = field(default=frozenset(), kw_only=True)
    ending = ".parquet"

    @property
    def per_shard(self) -> bool:
        return self.job.to_directory

    def path(self, part: int) -> str:
        return outputs.output_path(self.job, part)

    def rows_made(self, part: int, provenance: dict[str, Any]) -> int | None:
        return None if self.job.to_stdout else manifest.rows_made(self.path(part), provenance)

    def write(
        self, part: int, schema: pa.Schema, provenance: Provenance,
        batches: Iterator[pa.RecordBatch],
    ) -> int:  # fmt: skip
        rows = 0
        to_path = not self.job.to_stdout and not self.job.force
        new = to_path and self.path(part) not in self.existing
        try:
            with outputs.open_output(self.job, schema, provenance, part, new) as writer:
                for batch in batches:
                    writer.write(batch)
                    rows += batch.num_rows
        except FileExistsError:
            wanted = provenance(True) if callable(provenance) else provenance
            if (made := self.rows_made(part, wanted)) is not None:
                return made
            raise UsageError(
                f"--out: {self.path(part)} was written by another call at the same time; run this "
                "one again, which names the ways to keep both"
            ) from None
        return rows

    def for_run(self, job: Job, existing: frozenset[str]) -> Self:
        return replace(self, job=job, existing=existing)

    def finish(self, parts: int) -> None:
        manifest.write_manifest(self.job)

    def estimated_bytes(self, batches: Sequence[pa.RecordBatch]) -> int:
        return parquet_bytes(batches)
