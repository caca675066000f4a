"""Rows that could not be used: written with a reason and counted, never dropped silently."""

import contextlib
import os
import socket
from typing import Any

import pyarrow as pa

from sabia.core.shards.job import Job, file_ending, without_ending
from sabia.core.shards.layout import REJECTS, check_outside, rejects_beside
from sabia.core.shards.outputs import Metadata, RowsIfAny

SCHEMA = pa.schema(
    [("reason", pa.string()), ("shard", pa.string()), ("record", pa.string())],
)
FLUSH_ROWS = 1_000


def reject_path(job: Job, part: int = 0) -> str:
    """Where a part's rejects go: `--rejects`, else beside the output, for stdout in this folder.

    Directories get OUT.rejects/part-NNNNN.parquet, OUT.jsonl gets OUT.rejects.jsonl, and stdout
    sabia-STAGE.rejects/ with a file for each process. Raises UsageError for a path among the
    shards of the output.
    """
    if job.to_directory:
        check_outside(job, job.rejects, "--rejects")
        directory = job.rejects or rejects_beside(str(job.out))
        return f"{directory.rstrip('/')}/{job.part_name(part)}.parquet"
    if job.rejects:
        return job.rejects
    if job.to_file:
        out = str(job.out)
        return f"{without_ending(out)}{REJECTS}{file_ending(out)}"
    return f"sabia-{job.command}{REJECTS}/{socket.gethostname()}-{os.getpid()}.parquet"


class Rejects(RowsIfAny):
    """Collects the rejects of one output part; the file appears only if there are any."""

    def __init__(self, path: str, metadata: Metadata = None) -> None:
        super().__init__(path, metadata)
        self.count, self._rows = 0, list[dict[str, str]]()

    def add(self, rows: pa.RecordBatch | dict[str, Any], reason: str, shard: str) -> None:
        """Reject a batch or a row."""
        from sabia.core.shards.records import to_json

        for row in [rows] if isinstance(rows, dict) else rows.to_pylist():
            self._rows.append({"reason": reason, "shard": shard, "record": to_json(row)})
            self.count += 1
        if len(self._rows) >= FLUSH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            columns = [pa.array([_utf8(row[name]) for row in self._rows]) for name in SCHEMA.names]
            self.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
            self._rows = []

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self._flush()
        super().__exit__(kind, error, trace)

    def remove(self) -> None:
        """Remove the file, and its folder if it is empty then."""
        super().remove()
        folder = os.path.dirname(self.path)
        if folder.endswith(REJECTS):
            with contextlib.suppress(OSError):  # it has other files
                os.rmdir(folder)


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
