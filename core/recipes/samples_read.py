"""The samples that a run has read: names of token rows, and all samples in reading order.

The order is arithmetic (core.shards.order), so the list needs no log: the run's options, its rows
and the step of its last checkpoint determine it. Rows that a guard skipped are marked.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.errors import UsageError
from sabia.core.shards.job import Job
from sabia.core.shards.outputs import open_stdout
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.row_file import COLUMNS
from sabia.core.train import checkpoint
from sabia.core.train.row_source import NameRows, skipped_rows
from sabia.core.train.run_directory import RunDirectory
from sabia.core.train.token_rows import TokenRows

SCHEMA = pa.schema(
    [("step", pa.int64()), ("sample", pa.int64()), ("row", pa.int64()), ("name", pa.string()),
     ("source", pa.string()), ("left_out", pa.bool_())]
)  # fmt: skip
STEPS_AT_A_TIME = 64


def row_names(sources: Sequence[Source], rows: TokenRows) -> NameRows:
    """A function that names rows by shard and id; it reads a shard's ids when it needs them."""

    @cache
    def ids_of(shard: int) -> pa.ChunkedArray:
        batches = sources[shard].batches(columns=["id", *COLUMNS])
        return pa.chunked_array([batch.column("id") for batch in batches], pa.string())

    def name(numbers: Sequence[int]) -> list[str]:
        names = []
        for shard, row in zip(*rows.located(np.array(numbers, np.int64)), strict=True):
            stored = ids_of(int(shard))[int(row)].as_py()
            # a row without an id is named by its number
            names.append(f"{sources[shard].name}:{row if stored is None else stored}")
        return names

    return name


def write_read_rows(
    job: Job, run: RunDirectory, rows: TokenRows, plan: Any, name_rows: NameRows
) -> None:
    """Write one row per sample, for all steps up to the run's last checkpoint, to stdout."""
    newest = checkpoint.latest(run.checkpoints)
    if newest is None:
        raise UsageError(f"{run.path}: no checkpoint (expected a run that has saved one)")
    left_out = {int(entry["row"]) for entry in skipped_rows(run.path)}
    with open_stdout(job, SCHEMA, {"command": job.command, "run": str(run.path)}) as writer:
        for first in range(0, newest.step, STEPS_AT_A_TIME):
            count = min(STEPS_AT_A_TIME, newest.step - first) * plan.batch_rows
            sample = np.arange(first * plan.batch_rows, first * plan.batch_rows + count)
            numbers = plan.order.rows(int(sample[0]), count)
            columns = {
                "step": sample // plan.batch_rows + 1,
                "sample": sample,
                "row": numbers,
                "name": name_rows(numbers.tolist()),
                "source": [rows.source_names[i] for i in rows.source_of(numbers)],
                "left_out": [int(n) in left_out for n in numbers],
            }
            writer.write(pa.RecordBatch.from_pydict(columns, SCHEMA))
