"""Which rows a step reads, as batches: the order's arithmetic, minus the rows that are left out.

A row that is left out keeps its place in the order and counts for nothing (its mask is 0), so the
position of a run stays one integer. The list lies in the run's directory, `skipped.jsonl`, one line
a row; it outlives a rewind, which the checkpoints do not.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.order import DataOrder
from sabia.core.train.stepper import Batch, Stepper
from sabia.core.train.token_rows import TokenRows

FILE = "skipped.jsonl"
NameRows = Callable[[Sequence[int]], Sequence[str]]


def skipped_rows(directory: Path) -> list[dict[str, Any]]:
    """The record of rows left out of a run, in the order in which they were found."""
    path = directory / FILE
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@dataclass
class RowSource:
    """Batches of `batch_rows` for one process; `skipped` are numbers of rows left out."""

    rows: TokenRows
    order: DataOrder
    batch_rows: int
    stepper: Stepper
    skipped: set[int] = field(default_factory=set)

    def numbers(self, step: int) -> np.ndarray:
        """The rows of a step, of all processes, int64[batch_rows]."""
        return self.order.rows(step * self.batch_rows, self.batch_rows)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """This process's part of a step's rows."""
        return self._mine(self.rows, self.numbers(step))

    def validation(self, rows: TokenRows) -> Iterator[Batch]:
        """This process's part of all of `rows`, in batches of one size; what is over is void."""
        size = self.batch_rows
        for start in range(0, len(rows), size):
            numbers = np.arange(start, start + size)
            inside = numbers < len(rows)
            yield self._mine(rows, np.minimum(numbers, len(rows) - 1), inside)

    def _mine(
        self, rows: TokenRows, numbers: np.ndarray, counts: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        if counts is None:
            counts = np.array([number not in self.skipped for number in numbers.tolist()])
        part, parts = self.stepper.row_part
        length = rows.row_length if self.stepper.fixed_shapes else None
        batch = rows.batch(numbers[part::parts], length)
        batch["loss_mask"] = batch["loss_mask"] * counts[part::parts, None].astype(np.float32)
        if rows.unpacked:  # plain causal attention is faster and means the same
            del batch["segments"], batch["positions"]
        return batch

    def row_losses(self, step: int) -> np.ndarray:
        """Mean loss of each row of a step now, float64[batch_rows]; NaN for rows without tokens.

        One pass without gradients over all processes: the rows are told apart as if each was of a
        source of its own.
        """
        part, parts = self.stepper.row_part
        batch = self.batch(step) | {
            "source": np.eye(self.batch_rows, dtype=np.float32)[part::parts]
        }
        found = self.stepper.evaluate(batch)
        weight = np.asarray(found["source_weight"], np.float64)
        loss = np.asarray(found["source_loss"], np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(weight > 0, loss / weight, np.nan)
        return np.where((weight > 0) & ~np.isfinite(mean), np.inf, mean)

    def leave_out(self, found: Sequence[dict[str, Any]], directory: Path | None) -> None:
        """Leave rows out from now on; recorded where `directory` is given."""
        self.skipped |= {int(entry["row"]) for entry in found}
        if directory is not None:
            known = skipped_rows(directory)
            lines = [json.dumps(entry) + "\n" for entry in (*known, *found)]
            write_atomic(directory / FILE, "".join(lines))
