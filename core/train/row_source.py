"""The batches of a run: the rows of each step in the data order, with skipped rows masked.

A skipped row keeps its position in the order and has no weight (its mask is 0), so the position of
a run remains one integer. Skipped rows are recorded in the run's directory, `skipped.jsonl`, one
line per row, which a rewind does not undo as it undoes checkpoints. A thread prepares the batch of
the next step while the current one is computed.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.order import DataOrder
from sabia.core.train.stepper import Batch, Stepper
from sabia.core.train.token_rows import TokenRows, check_ids

FILE = "skipped.jsonl"
NameRows = Callable[[Sequence[int]], Sequence[str]]
Entry = dict[str, Any]  # of one skipped row: row, name, step, loss


def skipped_rows(directory: Path) -> list[Entry]:
    """The skipped rows of a run, in the order in which they were found."""
    path = directory / FILE
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@dataclass
class RowSource:
    """Batches of `batch_rows` for one process; `skipped`: numbers of skipped rows.

    `close` ends the thread that reads ahead; without `read_ahead` there is none.
    """

    rows: TokenRows
    order: DataOrder
    batch_rows: int
    stepper: Stepper
    skipped: set[int] = field(default_factory=set)
    read_ahead: bool = False
    _next: tuple[int, Future[dict[str, np.ndarray]]] | None = None  # a step, and its batch
    _thread: ThreadPoolExecutor | None = None

    def numbers(self, step: int) -> np.ndarray:
        """Row numbers of a step, for all processes, int64[batch_rows]."""
        return self.order.rows(step * self.batch_rows, self.batch_rows)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """This process's part of a step's rows; raises BadData for ids that the model lacks."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == step:
            batch = ahead[1].result()
        else:
            batch = self._read(self.rows, self.numbers(step))
        if self.read_ahead:
            self._thread = self._thread or ThreadPoolExecutor(1, "next-batch")
            following = self.numbers(step + 1)
            self._next = step + 1, self._thread.submit(self._read, self.rows, following)
        # rows may have been skipped since they were read
        is_read = [number not in self.skipped for number in self.numbers(step).tolist()]
        return self._weighted(batch, np.array(is_read))

    def close(self) -> None:
        """Wait for the batch that is being read, and end the thread."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)

    def validation(self, rows: TokenRows) -> Iterator[Batch]:
        """This process's part of `rows`; the last batch is padded with rows without weight."""
        size = self.batch_rows
        for start in range(0, len(rows), size):
            numbers = np.arange(start, start + size)  # [batch_rows]
            batch = self._read(rows, np.minimum(numbers, len(rows) - 1))
            yield self._weighted(batch, numbers < len(rows))

    def _read(self, rows: TokenRows, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """This process's part of the rows of a batch."""
        # process p of n has the rows p, p + n, …
        part, parts = self.stepper.row_part
        length = rows.row_length if self.stepper.fixed_shapes else None
        batch = rows.batch(numbers[part::parts], length)
        check_ids(batch["input_ids"], self.stepper.spec.vocab_size)
        if rows.unpacked:  # plain causal attention is equivalent and faster
            del batch["segments"], batch["positions"]
        return batch

    def _weighted(
        self, batch: dict[str, np.ndarray], has_weight: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The batch, where `has_weight` bool[batch_rows] says which rows count."""
        part, parts = self.stepper.row_part
        # [B, T] · [B, 1]
        batch["loss_mask"] = batch["loss_mask"] * has_weight[part::parts, None].astype(np.float32)
        return batch

    def row_losses(self, step: int) -> np.ndarray:
        """Current mean loss of each row of a step, float64[batch_rows]; NaN: no tokens.

        One pass without gradients over all processes, in which each row is a source of its own.
        """
        part, parts = self.stepper.row_part
        # [B, batch_rows]: row r is its own source
        source = np.eye(self.batch_rows, dtype=np.float32)[part::parts]
        sums = self.stepper.evaluate(self.batch(step) | {"source": source})
        weight = np.asarray(sums["source_weight"], np.float64)
        loss = np.asarray(sums["source_loss"], np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(weight > 0, loss / weight, np.nan)
        # an infinite or undefined loss of a row with tokens counts as infinite
        return np.where((weight > 0) & ~np.isfinite(mean), np.inf, mean)

    def skip(self, entries: Sequence[Entry], directory: Path | None) -> None:
        """Skip rows from now on; they are recorded if `directory` is given."""
        self.skipped |= {int(entry["row"]) for entry in entries}
        if directory is not None:
            known = skipped_rows(directory)
            lines = [json.dumps(entry) + "\n" for entry in (*known, *entries)]
            write_atomic(directory / FILE, "".join(lines))
