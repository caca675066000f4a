"""Sinks: where the runner (`mapping`) writes the rows of an output, part by part.

A part appears whole or not at all and records what it was made from, so that a run that is
repeated writes only the parts that are missing or were made from something else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from sabia.core.shards import manifest, outputs
from sabia.core.shards.dry_run import parquet_bytes
from sabia.core.shards.job import Job


class Sink(Protocol):
    """The output of a job. `per_shard`: every input shard gives one part; else all give one."""

    @property
    def per_shard(self) -> bool: ...

    def path(self, part: int) -> str:
        """The file whose presence shows that a part is complete."""

    def rows_made(self, part: int, provenance: dict[str, Any]) -> int | None:
        """Rows of a part that is complete and has this provenance; None where there is none."""

    def write(
        self, part: int, schema: pa.Schema, provenance: dict[str, Any],
        batches: Iterator[pa.RecordBatch],
    ) -> int:  # fmt: skip
        """Write all batches as one part, atomically; returns its rows. If `batches` raises, the
        part must not appear.
        """

    def finish(self, parts: int) -> None:
        """Called once this process has written its share of so many parts."""

    def estimated_bytes(self, batches: Sequence[pa.RecordBatch]) -> int:
        """Bytes that these rows take on disk, for `--dry-run`."""


@dataclass(frozen=True)
class ParquetSink:
    """The output that `outputs` opens: a Parquet file, a directory of shards, or stdout."""

    job: Job

    @property
    def per_shard(self) -> bool:
        return self.job.to_directory

    def path(self, part: int) -> str:
        return outputs.output_path(self.job, part)

    def rows_made(self, part: int, provenance: dict[str, Any]) -> int | None:
        return None if self.job.to_stdout else manifest.rows_made(self.path(part), provenance)

    def write(
        self, part: int, schema: pa.Schema, provenance: dict[str, Any],
        batches: Iterator[pa.RecordBatch],
    ) -> int:  # fmt: skip
        rows = 0
        with outputs.open_output(self.job, schema, provenance, part) as writer:
            for batch in batches:
                writer.write(batch)
                rows += batch.num_rows
        return rows

    def finish(self, parts: int) -> None:
        manifest.finish_directory(self.job, parts)

    def estimated_bytes(self, batches: Sequence[pa.RecordBatch]) -> int:
        return parquet_bytes(batches)
